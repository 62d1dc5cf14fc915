"""The block planner, beside FlashPS's Algorithm 1 and simpler planners."""
