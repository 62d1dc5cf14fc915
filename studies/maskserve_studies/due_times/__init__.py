"""Due times on a real worker of two devices, compared with the simulator."""
