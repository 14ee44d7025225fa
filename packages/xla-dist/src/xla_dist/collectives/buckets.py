"""Collectives of many tensors in buckets of a bounded size, with one collective per bucket."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from xla_core.extension_api.operators import Operand
from xla_dist.collectives.model_collectives import Groups, all_gather, all_reduce, reduce_scatter

BUCKET_MB = 160
"""torch_xla's default size of a bucket, in MiB."""


class CoalescingBuckets:
    """Splits ``input_list`` into buckets of at most ``bucket_cap_mb`` MiB, and calls ``func`` for each bucket.

    ``func(tensors, outputs)`` takes a list of tensors and a list of outputs, None without ``output_list``, and
    returns the list of results. A tensor that is larger than a bucket has one of its own. Calling the object
    returns all results in order. Raises ValueError if the two lists differ in length.
    """

    def __init__(
        self,
        func: Callable[[list[torch.Tensor], list[torch.Tensor] | None], Sequence[torch.Tensor]],
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
        """Add ``tensor``, the input with index ``idx``, to the bucket; flushes the bucket first if it is full."""
        nbytes = tensor.numel() * tensor.element_size()
        if self._bucket and self._size + nbytes > self._cap:
            self.flush()
        self._bucket.append(idx)
        self._size += nbytes

    def flush(self) -> None:
        """Run the collective of the tensors in the bucket, and empty it."""
        if not self._bucket:
            return
        outputs = None if self._outputs is None else [self._outputs[i] for i in self._bucket]
        results = self._func([self._inputs[i] for i in self._bucket], outputs)
        for i, result in zip(self._bucket, results, strict=True):
            self._results[i] = result
        self._bucket, self._size = [], 0

    def __call__(self) -> list[Operand]:
        """Run the collectives of all buckets; returns the results in the order of the inputs."""
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
    """``all_gather`` of each tensor of a list, with one collective per ``bucket_cap_mb`` MiB (default: 160).

    The other arguments are those of ``all_gather``.
    """
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
    """``reduce_scatter`` of each tensor of a list, with one collective per ``bucket_cap_mb`` MiB (default: 160).

    The other arguments are those of ``reduce_scatter``.
    """
    del pin_layout, channel_id, use_global_device_ids

    def scatter(tensors: list[torch.Tensor], outputs: Operand) -> Operand:
        return reduce_scatter(
            reduce_type, tensors, scale, scatter_dim, shard_count, groups, outputs
        )

    return CoalescingBuckets(scatter, input_list, output, bucket_cap_mb)()


def all_reduce_bucketized_gradients(
    gradients: Sequence[torch.Tensor],
    scale: float,
    groups: Groups = None,
    pin_layout: bool = True,
    bucket_cap_mb: int = 0,
) -> None:
    """Replace ``gradients`` by their sums over the replicas times ``scale``, with one collective per bucket.

    ``bucket_cap_mb`` is the size of a bucket in MiB; 0 (default) is one collective for all. The buckets start with
    the gradients of the last layer, which are computed first: a bucket is reduced while the backward pass still
    computes the next. ``groups`` are those of ``all_reduce``; ``pin_layout`` has no effect.
    """
    del pin_layout
    if not bucket_cap_mb:
        all_reduce("sum", list(gradients), scale, groups)
        return

    def reduce(tensors: list[torch.Tensor], _outputs: Operand) -> Operand:
        return all_reduce("sum", tensors, scale, groups)

    CoalescingBuckets(reduce, list(reversed(gradients)), None, bucket_cap_mb)()
