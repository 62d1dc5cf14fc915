"""A ControlNet service: nets beside rows whose bases are in other processes (Katz §5)."""
