"""Counters, flags, files and interrupts: no knowledge of tensors or programs."""
