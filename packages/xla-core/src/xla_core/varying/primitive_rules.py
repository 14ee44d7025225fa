"""All rules of primitives: whoever runs the interpreter imports this."""

from xla_core.varying import (
    contraction_rules,
    elementwise_rules,
    indexing_rules,
    loop_rules,
    reduction_rules,
    shaping_rules,
)

MODULES = (
    contraction_rules,
    elementwise_rules,
    indexing_rules,
    loop_rules,
    reduction_rules,
    shaping_rules,
)
