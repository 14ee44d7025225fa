"""The core of PyTorch's ``xla`` device: lazy tensors, traces, lowering, and the device interface."""

__version__ = "0.1.0"
