"""``torch_xla.core.xla_builder``: computations built operation by operation."""
