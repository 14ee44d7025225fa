"""Every private name of torch.distributed that the project uses, in one place. Seen in torch 2.11 to 2.15."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from xla_core.torch_bridge.operands import Operand


def process_group(given: Operand) -> Any:
    """The process group that functional collectives mean by ``given``: a group, or the name of one."""
    if not isinstance(given, str):
        return given
    return torch.distributed.distributed_c10d._resolve_process_group(given)  # torch 2.13


def give_meshes_groups(wanted: Callable[[int], bool]) -> None:
    """Let ``DeviceMesh("xla", ...)`` make process groups if ``wanted(its size)`` says so, as others do."""
    mesh_class = torch.distributed.device_mesh.DeviceMesh
    init = mesh_class.__init__

    @functools.wraps(init)
    def __init__(self: Any, device_type: str, mesh: Any = None, **named: Any) -> None:
        layout = named.get("_layout")
        size = torch.as_tensor(mesh, device="cpu").numel() if layout is None else layout.numel()
        if device_type != "xla" or not wanted(size):
            init(self, device_type, mesh, **named)
            return
        # torch 2.13: the type decides whether there are groups, and which device this process is on
        init(self, "cpu", mesh, **named)
        self._device_type = device_type

    mesh_class.__init__ = __init__  # type: ignore[method-assign]


def record_nothing_of(backend: str) -> None:
    """Let torch's flight recorder leave groups of ``backend`` alone: it fails for those that Python defines."""
    # torch 2.15: attached to every new group, unless its backend records for itself
    recording = getattr(torch.distributed.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", None)
    if recording is not None:
        recording.add(backend)


def group_names(mesh: Any) -> Sequence[str]:
    """The names of the process groups of a ``DeviceMesh``; none of a mesh of devices of one program."""
    names: Sequence[str] = getattr(mesh, "_dim_group_names", ())  # torch 2.13
    return names


def draw_for_dtensors_with(tracker: Any) -> None:
    """Let operators that draw numbers for DTensors do so inside ``tracker._distribute_region(spec)``.

    Unless they have a tracker already. torch's own sets offsets inside of CUDA's random states.
    """
    module: Any = importlib.import_module("torch.distributed.tensor._random")  # torch 2.13
    if module._rng_tracker is None:
        module._rng_tracker = tracker
