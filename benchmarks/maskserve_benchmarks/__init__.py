"""Commands that measure maskserve: benchmarks, load, soaks, records, the simulator.

The wheel leaves this package out, and the product never imports it. `scripts/bench --list` shows
its commands; tests import from here.
"""
