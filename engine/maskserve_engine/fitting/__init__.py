"""What fits: the device's memory by count, and the store of entries in what that leaves."""
