"""torch_xla._internal: what well-known clients call of it."""
