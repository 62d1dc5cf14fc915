"""Clients of other Tritons: addresses behind names, calls, failures, and pools of servers."""
