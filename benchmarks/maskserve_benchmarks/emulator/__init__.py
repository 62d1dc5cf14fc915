"""Emulated workers for measuring and testing the router: real gRPC, a clock instead of a device."""
