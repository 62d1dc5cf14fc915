"""Emulated workers for tests and benchmarks of the router: real gRPC, a clock for a device."""
