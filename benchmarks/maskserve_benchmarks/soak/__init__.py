"""A worker under mixed load for a long time, and the judge of its memory, files and threads.

`scripts/bench soak` is the command; tests use `maskserve_benchmarks.soak.run.soak`.
"""
