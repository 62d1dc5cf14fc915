"""Encoding and decoding together or one by one."""
