"""The process's devices: running recorded steps, donation, liveness, values that cannot be computed."""
