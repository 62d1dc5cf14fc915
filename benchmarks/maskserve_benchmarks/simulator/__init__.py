"""A cluster of workers in virtual time, run by the production scheduler, planner and policies.

workload         edits: arrivals, masks, steps, templates
hardware         seconds of a step: the cost model and the planner
residency        templates of a host, by tier
loras            LoRAs of a worker
scenario         description of one run
job              one edit of a run
worker           one worker's step loop
events           virtual time
cluster          edits at workers, from arrival to response
result           figures of a run, and checks that nothing is lost
capacity         the largest rate of a worker
bars             comparisons of routing policies and kinds of batching
"""
