"""lazy_tensor_core.debug: see ``metrics``."""
