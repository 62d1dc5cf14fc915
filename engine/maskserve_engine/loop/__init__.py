"""The engine's thread: schedule, plan, step and tell, over rows in its own process or in others."""
