"""The running batch: how rows are packed, and the state kept between their steps."""
