"""A cluster of workers in virtual time, run by the production scheduler, planner and policies.

workload   edits: arrivals, masks, steps, templates
hardware   how long a step takes: the cost model and the planner
residency  which templates a host has, and in which tier
worker     one worker's step loop
cluster    the events, from arrival to answer
result     figures of a run, and what must be conserved
capacity   what a worker can serve at most
bars       the comparisons that must hold
gangs      a worker of several devices
deadlines  due times on it, beside TetriServe's figures
deadline_plots  pictures of that
"""
