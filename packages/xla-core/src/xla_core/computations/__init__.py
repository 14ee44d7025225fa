"""Computations as one operation of a step: jax functions, loops, functions traced once, HLO."""
