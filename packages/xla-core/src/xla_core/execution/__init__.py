"""The process's devices: running recorded steps, donation, liveness, lost values."""
