"""What runs at ``import torch`` and ``import torch_xla``; nothing slow."""
