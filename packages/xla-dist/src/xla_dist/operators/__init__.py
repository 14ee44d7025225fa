"""Collectives as jax primitives and as operators of PyTorch."""
