"""Checkpoints of split tensors: planners for ``torch.distributed.checkpoint``, and managers of checkpoints."""
