"""The rules of primitives, one file for each family; the interpreter imports this package."""

from xla_core.varying.rules import contraction, elementwise, indexing, loop, reduction, shaping

MODULES = (contraction, elementwise, indexing, loop, reduction, shaping)
