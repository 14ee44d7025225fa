"""lazy_tensor_core.core: see ``lazy_model``."""
