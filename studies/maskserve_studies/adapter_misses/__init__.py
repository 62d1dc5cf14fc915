"""Misses of adapters on a device, under the popularity that Katz measured."""
