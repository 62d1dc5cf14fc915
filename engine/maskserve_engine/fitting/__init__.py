"""Counts the device's memory, and sizes the store of entries to what is left."""
