"""Node servers: their state, their answers that are kept, and the calls to them."""
