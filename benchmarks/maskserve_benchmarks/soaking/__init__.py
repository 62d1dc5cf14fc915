"""A worker under mixed load for a long time, and whether it stays as it was.

`scripts/bench soak` is the command; tests use `maskserve_benchmarks.soaking.run.soak`.
"""
