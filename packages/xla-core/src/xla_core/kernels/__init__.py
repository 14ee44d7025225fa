"""Operators that models written for TPUs call by name: attention, paged attention, grouped products.

Each is an operator of the namespace ``xla`` with one lowering rule. For a TPU the rule puts in the kernel
that jax ships; for other devices, and for shapes which that kernel does not take, the same mathematics
as plain operations. Nothing here asks for a TPU, or imports a kernel before a program needs it.
"""
