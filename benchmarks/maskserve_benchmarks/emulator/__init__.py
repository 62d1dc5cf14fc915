"""Emulated workers, which measure and test the router: real gRPC, and a clock instead of a device."""
