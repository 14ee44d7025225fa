"""Collectives of many tensors in buckets: one collective per bucket, of a bounded size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from xla_core.extension_api.operators import Operand
from xla_dist.collectives.model_collectives import Groups, all_gather, all_reduce, reduce_scatter

BUCKET_MB = 160
"""torch_xla's default size of a bucket, in MiB."""


class CoalescingBuckets:
    """Collects tensors, and calls ``func(tensors, outputs)`` whenever ``bucket_cap_mb`` MiB are full.

    ``func`` takes a list of tensors and a list of outputs (or None) and returns the results. A
    tensor that is larger than a bucket goes alone. Calling the object gives all results in order.
    """

    def __init__(
        self,
        func: Callable[[list[torch.Tensor], list[torch.Tensor] | None], Any],
        input_list: Sequence[torch.Tensor],
        output_list: Sequence[torch.Tensor] | None = None,
        bucket_cap_mb: int = BUCKET_MB,
    ) -> None:
        if output_list is not None and len(output_list) != len(input_list):
            raise ValueError(f"{len(input_list)} tensors and {len(output_list)} outputs")
        self._func = func
        self._inputs = list(input_list)
        self._outputs = None if output_list is None else list(output_list)
        self._cap = bucket_cap_mb * 1024 * 1024
        self._bucket: list[int] = []
        self._size = 0
        self._results: list[torch.Tensor] = [None] * len(self._inputs)

    def add(self, tensor: torch.Tensor, idx: int) -> None:
        """Put ``tensor``, number ``idx``, into the bucket, which is flushed first if it is full."""
        nbytes = tensor.numel() * tensor.element_size()
        if self._bucket and self._size + nbytes > self._cap:
            self.flush()
        self._bucket.append(idx)
        self._size += nbytes

    def flush(self) -> None:
        """Run the collective of what is in the bucket."""
        if not self._bucket:
            return
        outputs = None if self._outputs is None else [self._outputs[i] for i in self._bucket]
        results = self._func([self._inputs[i] for i in self._bucket], outputs)
        for i, result in zip(self._bucket, results, strict=True):
            self._results[i] = result
        self._bucket, self._size = [], 0

    def __call__(self) -> list[Operand]:
        """The results for all tensors."""
        for i, tensor in enumerate(self._inputs):
            self.add(tensor, i)
        self.flush()
        return self._results


def all_gather_bucketized(
    input_list: Sequence[torch.Tensor],
    dim: int = 0,
    groups: Groups = None,
    output: Sequence[torch.Tensor] | None = None,
    pin_layout: bool = False,
    channel_id: int | None = None,
    use_global_device_ids: bool | None = None,
    bucket_cap_mb: int = BUCKET_MB,
) -> list[torch.Tensor]:
    """``all_gather`` of each tensor of a list, ``bucket_cap_mb`` MiB at a time."""
    del pin_layout, channel_id, use_global_device_ids

    def gather(tensors: list[torch.Tensor], outputs: Operand) -> Operand:
        return all_gather(tensors, dim, groups, outputs)

    return CoalescingBuckets(gather, input_list, output, bucket_cap_mb)()


def reduce_scatter_bucketized(
    reduce_type: str,
    input_list: Sequence[torch.Tensor],
    scale: float,
    scatter_dim: int,
    shard_count: int,
    groups: Groups = None,
    output: Sequence[torch.Tensor] | None = None,
    pin_layout: bool = False,
    channel_id: int | None = None,
    use_global_device_ids: bool | None = None,
    bucket_cap_mb: int = BUCKET_MB,
) -> list[torch.Tensor]:
    """``reduce_scatter`` of each tensor of a list, ``bucket_cap_mb`` MiB at a time."""
    del pin_layout, channel_id, use_global_device_ids

    def scatter(tensors: list[torch.Tensor], outputs: Operand) -> Operand:
        where = (scatter_dim, shard_count, groups, outputs)
        return reduce_scatter(reduce_type, tensors, scale, *where)

    return CoalescingBuckets(scatter, input_list, output, bucket_cap_mb)()


def all_reduce_bucketized_gradients(
    gradients: Sequence[torch.Tensor],
    scale: float,
    groups: Groups = None,
    pin_layout: bool = True,
    bucket_cap_mb: int = 0,
) -> None:
    """``all_reduce`` of gradients in place, ``bucket_cap_mb`` MiB at a time, the last layer's first.

    The last layer's are ready first: its bucket travels while the backward pass still computes.
    0 puts all into one collective.
    """
    del pin_layout
    if not bucket_cap_mb:
        all_reduce("sum", list(gradients), scale, groups)
        return

    def reduce(tensors: list[torch.Tensor], _outputs: Operand) -> Operand:
        return all_reduce("sum", tensors, scale, groups)

    CoalescingBuckets(reduce, list(reversed(gradients)), None, bucket_cap_mb)()
