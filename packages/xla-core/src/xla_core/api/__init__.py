"""The functions behind the names of ``torch_xla``."""
