"""Random numbers of DTensors on ``xla``: different for each shard, equal for the copies of a shard.

At the first random operator of a mesh all its processes take over the random state of the first process, and then
advance it alike. The numbers of a shard follow from that state and the shard's number. So results do not depend on
the number of copies. They do depend on how the tensor is split, and differ from those of one device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from xla_core.execution import runtime
from xla_core.execution.generator import of_cpu
from xla_core.recording import random_state
from xla_core.torch_bridge.operands import TorchObject


class ShardedNumbers:
    """The random number tracker that PyTorch calls around each random operator on a DTensor."""

    def __init__(self) -> None:
        self.distribute_region_enabled = True
        self._alike: set[object] = set()  # the meshes whose processes have the same state

    @contextlib.contextmanager
    def _distribute_region(
        self, spec: TorchObject, generator: torch.Generator | None = None
    ) -> Iterator[None]:
        """A block that draws the numbers of this process's shard; it advances the state of each process by one."""
        if spec.mesh.device_type != "xla" or not self.distribute_region_enabled:
            yield
            return
        device = runtime.trace_of(None).device.index
        kept = random_state.get_state(device)
        if generator is not None:
            drawn = torch.randint(2**62, (), generator=of_cpu(generator))
            random_state.set_state(int(drawn), device)
        elif spec.mesh not in self._alike:
            self._alike.add(spec.mesh)
            random_state.set_state(_of_the_first(spec.mesh, kept), device)
        seed = random_state.next_seed(device)
        after = kept if generator is not None else random_state.get_state(device)
        random_state.set_state(random_state.derived_seed(seed + _shard(spec)), device)
        try:
            yield
        finally:
            random_state.set_state(after, device)


def _of_the_first(mesh: torch.distributed.DeviceMesh, state: int) -> int:
    """The random state of the first process of ``mesh``, where this process's is ``state``."""
    shared = torch.tensor([state])
    for dim in range(mesh.ndim):
        group = mesh.get_group(dim)
        torch.distributed.broadcast(shared, torch.distributed.get_global_rank(group, 0), group)
    return int(shared)


def _shard(spec: TorchObject) -> int:
    """The number of this process's shard among the different shards of a DTensor."""
    number = 0
    for dim, placement in enumerate(spec.placements):
        if placement.is_shard():
            number = number * spec.mesh.size(dim) + spec.mesh.get_local_rank(dim)
    return number
