"""Computations that are one operation of a step: jax functions, loops, functions recorded once, HLO."""
