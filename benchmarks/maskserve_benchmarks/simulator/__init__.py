"""A cluster of workers in virtual time, run by the production scheduler, planner and policies.

workload         edits: arrivals, masks, steps, templates
hardware         how long a step takes: the cost model and the planner
residency        which templates a host has, and in which tier
loras            the LoRAs of a worker
scenario         one run, described
job              one edit of a run
worker           one worker's step loop
events           virtual time
cluster          edits at workers, from arrival to response
result           figures of a run, and checks that nothing is lost
capacity         the most that a worker can serve
bars             comparisons of routing policies and ways of batching
gangs            a worker of several devices
small_instances  edits with due times, and the best schedule of them
"""
