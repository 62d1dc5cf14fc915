"""The block planner, compared with FlashPS's Algorithm 1 and simpler planners."""
