"""The rules that pass varying lengths through primitives, one file for each family of primitives."""

from xla_core.varying.rules import contraction, elementwise, indexing, loop, reduction, shaping

MODULES = (contraction, elementwise, indexing, loop, reduction, shaping)
