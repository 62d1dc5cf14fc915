"""The workers and node servers: their records, and the calls to them."""
