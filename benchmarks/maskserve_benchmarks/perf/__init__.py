"""Load from perf_analyzer, Triton's own load generator, with edits of real pictures.

tool     perf_analyzer: found, or installed in a folder of its own
inputs   the edits it sends: pictures, masks, prompts, settings
load     what is asked of it: a front, a protocol, an arrival process
server   the worker that is measured
run      one measurement
results  figures of a run, parsed from the tool's files
report   the table
"""
