"""Load from perf_analyzer, Triton's own load generator, with edits of real pictures.

tool     the perf_analyzer program, installed if it is missing
inputs   the edits that it sends: pictures, masks, prompts, settings
load     a front, a protocol, an arrival process
server   the worker under measurement
run      one measurement
results  figures of a run, parsed from the tool's files
report   the table
"""
