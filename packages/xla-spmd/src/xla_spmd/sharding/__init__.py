"""Meshes, partition specs and shardings, in all their text forms; no tensors."""
