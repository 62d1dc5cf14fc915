"""The running batch: how rows are packed, and what is kept between their steps."""
