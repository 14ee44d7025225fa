"""``torch.compile(backend="openxla")`` on ``xla`` tensors."""
