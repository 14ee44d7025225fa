"""Sharded tensors: annotating them, reading and writing their parts, and redistributing them."""
