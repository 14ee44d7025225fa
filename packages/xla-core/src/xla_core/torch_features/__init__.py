"""Features of PyTorch and torch_xla around the step: autocast, saving, checkpoints, composites."""
