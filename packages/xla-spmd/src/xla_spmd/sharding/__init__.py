"""Meshes, partition specs and shardings, and the texts that describe them. Nothing here uses tensors."""
