"""Due times on a real worker of two devices, beside the simulator."""
