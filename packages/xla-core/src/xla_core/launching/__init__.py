"""Runs that wait for their programs: what stands for their results meanwhile, and in which order they start."""
