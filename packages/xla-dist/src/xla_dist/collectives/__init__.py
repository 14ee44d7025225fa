"""Collectives on tensors: recorded in the step, through autograd, in buckets, for torch.distributed."""
