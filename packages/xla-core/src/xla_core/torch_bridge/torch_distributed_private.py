"""Every private name of torch.distributed that the project uses, in one place. Seen in torch 2.11 to 2.15."""

from __future__ import annotations

import functools
import importlib
import json
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from xla_core.torch_bridge.operands import Operand


def process_group(given: Operand) -> object:
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


def recorded_calls(most: int) -> list[dict[str, object]]:
    """The last ``most`` collectives on process groups (gloo's and others), the oldest first, from torch's recorder.

    Each has its ``group``, its ``number`` in it, ``what`` it is with dtypes and shapes, and its ``time`` of day.
    Empty where no group was made, or torch records none.
    """
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return []
    # torch 2.13: on by default, for 2,000 calls
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    if dump is None:
        return []
    entries = json.loads(dump(includeCollectives=True, onlyActive=False)).get("entries", ())
    calls = [entry for entry in entries if not entry["is_p2p"]]
    return [
        {
            "group": " ".join(entry["process_group"]),
            "number": entry["collective_seq_id"],
            "what": _call_text(entry),
            "time": entry["time_created_ns"] / 1e9,
        }
        for entry in sorted(calls, key=lambda entry: entry["time_created_ns"])[-most:]
    ]


def _call_text(entry: dict[str, Any]) -> str:
    """Such as ``all_reduce of Float[4]``."""
    name = entry["profiling_name"].rpartition(":")[2]
    values = zip(entry["input_dtypes"], entry["input_sizes"], strict=False)
    operands = ", ".join(f"{dtype}{sizes}" for dtype, sizes in values)
    return f"{name} of {operands}" if operands else name


def group_names(mesh: object) -> Sequence[str]:
    """The names of the process groups of a ``DeviceMesh``; none of a mesh of devices of one program."""
    names: Sequence[str] = getattr(mesh, "_dim_group_names", ())  # torch 2.13
    return names


def draw_for_dtensors_with(tracker: object) -> None:
    """Let operators that draw numbers for DTensors do so inside ``tracker._distribute_region(spec)``.

    Unless they have a tracker already. torch's own sets offsets inside of CUDA's random states.
    """
    module: Any = importlib.import_module("torch.distributed.tensor._random")  # torch 2.13
    if module._rng_tracker is None:
        module._rng_tracker = tracker


def finished_work(result: Operand) -> object:
    """The handle of a collective that needs no waiting, with ``result`` in its future."""
    future: torch.futures.Future[object] = torch.futures.Future()
    future.set_result(result)
    # torch 2.11 to 2.15: how a process group in Python makes what C++ takes for a Work
    return torch._C._distributed_c10d._create_work_from_future(future)


# -- checkpoints -------------------------------------------------------------------------------------


class _AfterImport:
    """Finds one module as the other finders do, and has ``prepare(module)`` called once it was run."""

    def __init__(self, name: str, prepare: Callable[[Any], None]) -> None:
        self._name, self._prepare = name, prepare

    def find_spec(self, name: str, path: Any = None, target: Operand = None) -> Any:
        """What the other finders find, None for all other modules."""
        if name != self._name:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next((one for one in specs if one is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self._prepare(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_to_be_imported: set[str] = set()


def _when_imported(name: str, prepare: Callable[[object], None]) -> None:
    """Call ``prepare(module)`` once: now, or at the first import of a module that few programs need."""
    if name in _to_be_imported:
        return
    _to_be_imported.add(name)
    if name in sys.modules:
        prepare(sys.modules[name])
    else:
        sys.meta_path.insert(0, _AfterImport(name, prepare))


# Gives a storage on the CPU another place: in memory that processes share, or that is pinned.
Place = Callable[[torch.UntypedStorage], torch.UntypedStorage]


def stage_with(tensor_class: type, copy: Callable[[Any, Any, Place | None], torch.Tensor]) -> None:
    """Let ``torch.distributed.checkpoint.async_save`` take tensors of a class to the CPU by ``copy``.

    ``copy(tensor, memo, place)``: ``memo`` is the same dictionary for all tensors of one state dict.
    torch's own way copies the bytes of their storages, and takes the ``id()`` of the object that
    ``untyped_storage()`` returns for the storage's own.
    """

    def prepare(module: Any) -> None:
        stager = module.StateDictStager  # torch 2.13 and 2.15
        offload = stager._offload_tensor

        @functools.wraps(offload)
        def _offload_tensor(self: Any, x: Any, memo: Any, non_blocking: bool = False) -> Any:
            if not isinstance(x, tensor_class):
                return offload(self, x, memo, non_blocking=non_blocking)
            elsewhere = self.share_memory or self.pin_memory
            copied = memo[id(x)] = copy(x, memo, self._stage_untyped_storage if elsewhere else None)
            for name, value in x.__dict__.items():
                if name != "_is_param":  # nn.Parameter's own mark
                    value = self.deepcopy_with_tensor_offload(
                        value, memo, non_blocking=non_blocking
                    )
                    setattr(copied, name, value)
            return copied

        stager._offload_tensor = _offload_tensor

    _when_imported("torch.distributed.checkpoint._state_dict_stager", prepare)


def fsspec_writer(path: str, threads: int) -> object:
    """A writer of checkpoints at an address that fsspec knows; files on this machine are synced to the disk."""
    writer = _fsspec_module().FsspecWriter
    # Elsewhere closing a file stores it: torch 2.13 would sync all disks of this machine instead, torch 2.15 warn.
    return writer(path, sync_files=_is_local(path), thread_count=threads, per_thread_copy_ahead=0)


def fsspec_reader(path: str) -> object:
    """A reader of checkpoints at an address that fsspec knows."""
    return _fsspec_module().FsspecReader(path)


def _fsspec_module() -> ModuleType:
    """Torch's module of these readers and writers: public since torch 2.15, whose private name of it warns."""
    folder = "torch.distributed.checkpoint"
    try:
        return importlib.import_module(f"{folder}.fsspec_filesystem")
    except ModuleNotFoundError:
        return importlib.import_module(f"{folder}._fsspec_filesystem")  # torch 2.11, 2.13


def _is_local(path: str) -> bool:
    """Whether an address is of files of this machine: ``file://``, or none of fsspec's protocols."""
    # fsspec comes with torch, and is needed by the few programs only that save checkpoints elsewhere
    from fsspec.core import url_to_fs
    from fsspec.implementations.local import LocalFileSystem

    return isinstance(url_to_fs(path)[0], LocalFileSystem)
