"""Encoding and decoding of several pictures together, or one by one."""
