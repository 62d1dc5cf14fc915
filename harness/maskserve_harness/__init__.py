"""What measures maskserve: benchmarks, faults, load, soaks, records, the simulator.

It is no part of the product: the wheel leaves it out, and nothing of the product imports it. The
commands are in scripts/; tests import from here.
"""
