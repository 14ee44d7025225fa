"""``torch_xla.core.xla_builder``: builds computations from HLO operations."""
