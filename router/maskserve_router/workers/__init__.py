"""The workers and node servers: what is known of each, and the calls to them."""
