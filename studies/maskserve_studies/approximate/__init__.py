"""Approximate caching (NIRVANA)."""
