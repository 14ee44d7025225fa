"""The costs of a partitioned program: its collectives, and the bytes of live tensors on each device."""

from __future__ import annotations

import collections
import dataclasses
import gc
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np
import torch

from xla_core.contract.device_protocol import Buffer
from xla_core.contract.foreign_values import ForeignObject
from xla_core.extension_api import programs
from xla_core.extension_api.backends import Storage
from xla_core.extension_api.tensors import XLATensor, storage_of
from xla_core.support.counters import render_bytes
from xla_spmd.lowering.mesh_backend import HostValue, MeshBackend
from xla_spmd.sharding.hlo_sharding import parse

KINDS: Final = (
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute",
    "collective-broadcast", "ragged-all-to-all",
)  # fmt: skip
"""HLO's names of collectives."""

# "%name = shapes kind("; an asynchronous operation is counted at its start, not at its "-done".
_INSTRUCTION: Final = re.compile(
    r"^\s*(?:ROOT )?%?(?P<name>[\w.-]+) = (?P<shapes>.*?) "
    rf"(?P<kind>{'|'.join(KINDS)})(?P<start>-start)?\((?P<rest>.*)$",
    re.MULTILINE,
)
# TPU compilers divide a collective into pieces that run inside fusions with other work. The pieces look like the
# whole collective, and share its channel and this number of their chain.
_PIECE: Final = re.compile(r'channel_id=(?P<channel>\d+).*?chain_id="(?P<chain>\d+)"')
_BRACKETS: Final = re.compile(r"[(){}\[\],]")
_SHAPE: Final = re.compile(r"(?P<type>[a-z]+\d*\w*)\[(?P<sizes>[\d,]*)\]")
_BITS: Final = re.compile(r"\d+")


@dataclasses.dataclass(frozen=True, slots=True)
class Collective:
    """One collective: HLO's ``kind`` and ``name``, and the ``bytes`` of its result on one device."""

    kind: str
    name: str
    bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class LiveTensor:
    """One live tensor.

    ``name`` is that of the parameter or buffer, or empty. ``sharding`` is the HLO text. ``bytes`` is the size of
    the whole value, ``device_bytes`` the size of the part on each device of this process, by the device's number.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    sharding: str
    bytes: int
    device_bytes: Mapping[int, int]


def collectives(program: programs.StepProgram | None = None) -> list[Collective]:
    """The collectives of a compiled program (default: of the one that ran most often).

    Raises RuntimeError if no program has run yet.
    """
    if program is None:
        known = programs.all_programs()
        if not known:
            raise RuntimeError("no program has run yet; train at least one step first")
        program = max(known, key=lambda p: p.runs)
    return collectives_in(program.executable.optimized_hlo())


def collectives_in(hlo: str) -> list[Collective]:
    """The collectives in the text of an optimised HLO module, each once, even if it was divided into pieces."""
    by_piece: dict[tuple[str, ...], Collective] = {}
    for match in _INSTRUCTION.finditer(hlo):
        piece = _PIECE.search(match["rest"])
        key = (match["name"],) if piece is None else (match["kind"], *piece.groups())
        by_piece.setdefault(key, Collective(match["kind"], match["name"], _result_bytes(match)))
    return list(by_piece.values())


def _result_bytes(instruction: re.Match[str]) -> int:
    shapes = instruction["shapes"]
    # The start of an asynchronous collective has a tuple: operands, results, and on TPUs numbers for the hardware.
    # That of an all-reduce has its results only.
    if instruction["start"] and instruction["kind"] != "all-reduce" and shapes.startswith("("):
        members = _tuple_members(shapes)
        shapes = members[1] if len(members) > 1 else shapes
    return sum(_bytes(match["type"], match["sizes"]) for match in _SHAPE.finditer(shapes))


def _tuple_members(shapes: str) -> list[str]:
    """The members of a tuple of shapes, which may be tuples themselves."""
    members, depth, begin = [], 0, 1
    for bracket in _BRACKETS.finditer(shapes):
        depth += (bracket[0] in "({[") - (bracket[0] in ")}]")
        if (bracket[0] == "," and depth == 1) or depth == 0:
            members.append(shapes[begin : bracket.start()])
            begin = bracket.end()
    return members


def _bytes(kind: str, sizes: str) -> int:
    bits = _BITS.search(kind)
    width = int(bits[0]) if bits else 8  # pred
    count = math.prod(int(n) for n in sizes.split(",") if n)
    return math.ceil(count * width / 8)


def live_tensors(named: torch.nn.Module | None = None) -> list[LiveTensor]:
    """All tensors that have a value on the devices, largest first. Tensors that share a storage count once.

    The names of the tensors are those of the parameters and buffers of ``named`` (default: no names). Pending
    tensors are left out; nothing is run.
    """
    names = _names(named)
    live = []
    for storage in _storages():
        backend = storage.trace.backend
        buffer = storage.buffer
        if buffer is None or not isinstance(backend, MeshBackend):
            continue
        parts = _part_bytes(backend, buffer)
        sharding = parse(backend.sharding_of(buffer)).text
        meta = storage.meta
        live.append(
            LiveTensor(
                names.get(id(storage), ""), meta.shape, meta.dtype, sharding, meta.nbytes, parts
            )
        )
    return sorted(live, key=lambda t: -t.bytes)


def _part_bytes(backend: MeshBackend, buffer: Buffer) -> dict[int, int]:
    """Bytes of the parts that this process holds, by the device's number; empty for a value on the host."""
    if type(buffer) is HostValue:
        buffer = buffer.placed
    if buffer is None:
        return {}
    parts: Sequence[tuple[int, ForeignObject]] = backend.client.shards(buffer)
    return {
        backend.devices.index(device): math.prod(part.shape) * np.dtype(part.dtype).itemsize
        for device, part in parts
    }


def _storages() -> Iterable[Storage]:
    return [o for o in gc.get_objects() if issubclass(type(o), Storage)]


def _names(module: torch.nn.Module | None) -> dict[int, str]:
    if module is None:
        return {}
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return {id(storage_of(t)): name for name, t in tensors if isinstance(t, XLATensor)}


def bytes_per_device(tensors: Iterable[LiveTensor] | None = None) -> dict[int, int]:
    """Bytes of ``tensors`` (default: all live ones) on each device of this process, by the device's number."""
    total: collections.Counter[int] = collections.Counter()
    for tensor in live_tensors() if tensors is None else tensors:
        total.update(tensor.device_bytes)
    return dict(sorted(total.items()))


def sharding_report(named: torch.nn.Module | None = None, largest: int = 20) -> str:
    """A text with the collectives of the program that ran most often, bytes per device, and the largest tensors.

    ``named`` is as for ``live_tensors``; ``largest`` (default: 20) is the number of tensors listed.
    """
    lines: list[str] = []
    by_kind: dict[str, list[int]] = {}
    for collective in collectives() if programs.all_programs() else []:
        by_kind.setdefault(collective.kind, []).append(collective.bytes)
    lines.append("Collectives of the program that ran most often, with bytes on each device:")
    lines += [
        f"  {kind:<20} {len(sizes):>5} x  {render_bytes(sum(sizes)):>10}"
        for kind, sizes in sorted(by_kind.items())
    ] or ["  none"]
    tensors = live_tensors(named)
    lines.append("Live tensors, bytes on each device:")
    lines += [f"  {n:>4} {render_bytes(size):>10}" for n, size in bytes_per_device(tensors).items()]
    lines.append(f"The largest of {len(tensors)}:")
    lines += [_line(tensor) for tensor in tensors[:largest]]
    return "\n".join(lines) + "\n"


def _line(tensor: LiveTensor) -> str:
    share = render_bytes(max(tensor.device_bytes.values(), default=0))
    kind = str(tensor.dtype).removeprefix("torch.")
    shape = f"{kind}{list(tensor.shape)}"
    return f"  {render_bytes(tensor.bytes):>10} {share:>10} {shape:<24} {tensor.sharding} {tensor.name}".rstrip()


def parameter_shares(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, dict[int, int]]:
    """The bytes of a module's ``parameters``, ``gradients`` and optimizer ``state`` on each device, by number."""
    state = optimizer.state if optimizer is not None else {}
    groups = {
        "parameters": list(module.parameters()),
        "gradients": [p.grad for p in module.parameters() if p.grad is not None],
        "state": [v for s in state.values() for v in s.values() if isinstance(v, XLATensor)],
    }
    return {name: _bytes_of(tensors) for name, tensors in groups.items()}


def _bytes_of(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    storage_ids = {id(storage_of(t)) for t in tensors if isinstance(t, XLATensor)}
    total: collections.Counter[int] = collections.Counter()
    for storage in _storages():
        if id(storage) in storage_ids and storage.buffer is not None:
            backend = storage.trace.backend
            assert isinstance(backend, MeshBackend)
            total.update(_part_bytes(backend, storage.buffer))
    return dict(sorted(total.items()))
