"""The rules of primitives, one file for each family: whoever runs the interpreter imports this."""

from xla_core.varying.rules import contraction, elementwise, indexing, loop, reduction, shaping

MODULES = (contraction, elementwise, indexing, loop, reduction, shaping)
