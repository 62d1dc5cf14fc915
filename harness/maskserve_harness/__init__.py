"""What measures maskserve: benchmarks, load, soaks, records, the simulator.

It is no part of the product: the wheel leaves it out, and nothing of the product imports it.
`scripts/bench --list` shows what there is; tests import from here.
"""
