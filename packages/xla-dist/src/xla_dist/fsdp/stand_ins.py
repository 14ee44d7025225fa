"""Functions of ``torch_xla.distributed.fsdp.utils``.

Collectives that only have the right shapes, and containers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch

from xla_core.contract.foreign_values import JsonObject
from xla_core.extension_api import runtime, tensors
from xla_core.extension_api.operators import Tree
from xla_dist.collectives.model_collectives import REDUCE_SUM, Groups, reduce_scatter

FLOAT_DTYPES: Final = [torch.float32, torch.float16, torch.bfloat16]

_MIB: Final = 1 << 20


def dummy_all_gather(value: torch.Tensor, dim: int = 0, groups: Groups = None) -> torch.Tensor:
    """A tensor of the shape of ``all_gather``'s result, which repeats this replica's value; runs no collective."""
    repeats = [1] * value.dim()
    repeats[dim] = len(groups[0]) if groups else runtime.world_size()
    return value.repeat(repeats)


def dummy_all_reduce(
    reduce_type: str, inputs: Tree, scale: float = 1.0, groups: Groups = None
) -> object:
    """``inputs`` times ``scale`` (default: 1), without a collective; a list of tensors is changed in place."""
    del reduce_type, groups
    if isinstance(inputs, torch.Tensor):
        return inputs * scale
    for tensor in inputs:
        tensor.mul_(scale)
    return inputs


class BucketizedReduceScatter:
    """Sums tensors over the replicas, and gives each replica its part, with one collective for many tensors.

    The collective runs when the next tensor does not fit in the bucket of ``bucket_size_mb`` MiB, or in ``flush``.
    ``shard_count`` is the number of replicas in each of ``groups``: each tensor is cut into as many parts
    along its first dimension. ``pin_layout`` has no effect.
    """

    def __init__(
        self, bucket_size_mb: float, shard_count: int, groups: Groups, pin_layout: bool
    ) -> None:
        self._bytes = int(bucket_size_mb * _MIB)
        self._options: JsonObject = {
            "scatter_dim": 0,
            "shard_count": shard_count,
            "groups": groups,
            "pin_layout": pin_layout,
        }
        self._waiting: list[tuple[torch.Tensor, Callable[[torch.Tensor], object]]] = []
        self._size = 0

    def __call__(self, input: torch.Tensor, callback: Callable[[torch.Tensor], object]) -> None:
        """Add ``input`` to the bucket; its collective will call ``callback(part)`` with this replica's part.

        Runs the collective of the bucket first if ``input`` does not fit in it.
        """
        size = input.numel() * input.element_size()
        if self._size + size > self._bytes:
            self.flush()
        self._waiting.append((input, callback))
        self._size += size

    def flush(self) -> None:
        """Run the collective of the tensors in the bucket, and their callbacks."""
        waiting, self._waiting, self._size = self._waiting, [], 0
        if not waiting:
            return
        parts: Sequence[torch.Tensor] = reduce_scatter(
            REDUCE_SUM, [tensor for tensor, _ in waiting], 1.0, **self._options
        )
        for part, (_, callback) in zip(parts, waiting, strict=True):
            callback(part)


class DummyReduceScatter(BucketizedReduceScatter):
    """``BucketizedReduceScatter`` without collectives: uses the first part of this replica's own value."""

    def __init__(self, shard_count: int) -> None:
        super().__init__(0, shard_count, None, pin_layout=False)
        self.shard_count = shard_count

    def __call__(self, input: torch.Tensor, callback: Callable[[torch.Tensor], object]) -> None:
        """Call ``callback`` with the first part of ``input`` immediately."""
        callback(input[: input.size(0) // self.shard_count])


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def apply_to_tensors(fn: Callable[[torch.Tensor], object], container: object) -> object:
    """A copy of ``container`` and the containers in it, with ``fn`` applied to each tensor."""
    return tensors.map_selected(container, _is_tensor, fn)


def collect_tensors(container: object) -> list[torch.Tensor]:
    """The tensors in ``container`` and the containers in it, in order."""
    return tensors.collect(container, _is_tensor)


def replace_by_prefix_(state_dict: dict[str, object], old_prefix: str, new_prefix: str) -> None:
    """Replace ``old_prefix`` of the dict's keys by ``new_prefix``, in place.

    Raises ValueError if both prefixes are the same.
    """
    if old_prefix == new_prefix:
        raise ValueError(f"both prefixes are {old_prefix!r}")
    for key in [key for key in state_dict if key.startswith(old_prefix)]:
        state_dict[new_prefix + key[len(old_prefix) :]] = state_dict.pop(key)
