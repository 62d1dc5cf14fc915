"""The router: one front door for many workers."""
