"""What people would use instead, served by the same Triton and measured in the same run."""
