"""How scripts and tests look at a running worker: as any Triton client does, without our own."""
