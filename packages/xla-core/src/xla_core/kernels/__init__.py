"""Operators that models written for TPUs call by name: attention, paged attention, grouped products.

Each is an operator of the namespace ``xla`` with one lowering rule. For a TPU the rule calls the kernel that is
part of jax. For other devices, and for shapes that the kernel does not support, it computes the same by plain
operations. No TPU is needed, and a kernel is imported only when a program uses it.
"""
