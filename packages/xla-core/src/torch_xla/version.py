"""The version of the torch_xla API; clients compare it with releases of torch_xla."""

__version__ = "2.9.0+xla.core.0.1.0"
__xla_gitrev__ = "unknown"
__torch_gitrev__ = "unknown"
