"""Sharded tensors: annotating them, reading their parts, laying them out again."""
