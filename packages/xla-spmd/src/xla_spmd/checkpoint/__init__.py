"""Checkpoints of split tensors: planners for ``torch.distributed.checkpoint``, and a manager of many."""
