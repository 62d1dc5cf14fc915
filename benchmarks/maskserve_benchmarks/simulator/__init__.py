"""A cluster of workers in virtual time, run by the production scheduler, planner and policies.

workload   edits: arrivals, masks, steps, templates
hardware   how long a step takes: the cost model and the planner
residency  which templates a host has, and in which tier
worker     one worker's step loop
events     virtual time
cluster    edits at workers, from arrival to answer
result     figures of a run, and what must be conserved
capacity   what a worker can serve at most
bars       the comparisons that must hold
gangs      a worker of several devices
deadlines  due times on it, beside TetriServe's figures
deadline_plots  pictures of that
plans      plans of nodes over devices
plan_systems  LegoDiffusion's workflows, and the systems that serve them
plan_figures  its figures, what these need, and what masks and due times add
plan_tables  its tables
chains     requests for the plans that the product ships
"""
