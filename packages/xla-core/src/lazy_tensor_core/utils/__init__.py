"""lazy_tensor_core.utils: see ``serialization``."""
