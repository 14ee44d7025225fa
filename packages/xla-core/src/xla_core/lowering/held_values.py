"""What holds a device's memory: the largest values of live tensors, their names, and the lines that made them.

Computed when memory runs out, and for xla-debug; nothing is recorded for it while steps run.
"""

from __future__ import annotations

import contextlib
import gc
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

import torch

from xla_core.contract.device_protocol import Buffer
from xla_core.recording.storage import Storage
from xla_core.recording.xla_tensor import XLATensor
from xla_core.support.counters import render_bytes

MOST_GROUPS: Final = 8

MSG_HELD: Final = (
    "Tensors hold {count} values in device memory, {total} in all; the largest of them:\n{groups}"
)
MSG_GROUP: Final = "  {size} {count} x {meta}{what}{place}"
MSG_MORE: Final = "  and {count} more, {size}"
MSG_LINES: Final = "XLA_TRACK_MEMORY=1 (of xla-debug) names the lines that made them."


class HeldValue(NamedTuple):
    """The value of ``storage`` in device memory, its ``buffer``, and how many tensors show it."""

    storage: Storage
    buffer: Buffer
    tensors: int


class _Origins:
    line_of: Callable[[object], str] | None = None


def tell_lines(line_of: Callable[[object], str] | None) -> None:
    """Set the function that finds the line that made a buffer ("" if unknown); None: no line is known."""
    _Origins.line_of = line_of


def held_values() -> list[HeldValue]:
    """Every value in device memory that a tensor shows, or that the pending step of a device reads."""
    storages: dict[int, Storage] = {}
    tensors: defaultdict[int, int] = defaultdict(int)
    for candidate in gc.get_objects():
        if issubclass(type(candidate), XLATensor):
            storages[id(candidate._s)] = candidate._s
            tensors[id(candidate._s)] += 1
    traces = {id(s.trace): s.trace for s in storages.values()}.values()
    # a storage that the pending step changes holds no buffer until that step has run: its inputs hold it
    read: dict[int, Buffer] = {}
    for trace in traces:
        for buffer, position in zip(trace.inputs, trace.input_storages, strict=False):
            read[id(trace.touched[position])] = buffer
    held = []
    for key, storage in storages.items():
        buffer = storage.buffer if storage.buffer is not None else read.get(key)
        if buffer is not None:
            held.append(HeldValue(storage, buffer, tensors[key]))
    return held


def text() -> str:
    """Totals, and the largest groups of values with the same shape, dtype and line; "" if there are none."""
    values = [value for value in held_values() if not _has_failed(value)]
    if not values:
        return ""
    names = _names()
    groups: defaultdict[tuple[str, str], list[HeldValue]] = defaultdict(list)
    for value in values:
        place = _Origins.line_of(value.buffer) if _Origins.line_of is not None else ""
        groups[f"{value.storage.meta}", place].append(value)
    ordered = sorted(groups.items(), key=lambda group: -_size(group[1]))
    lines = [
        MSG_GROUP.format(
            size=render_bytes(_size(members)), count=len(members), meta=meta, what=_what(members, names),
            place=f" at {place}" if place else "",
        )
        for (meta, place), members in ordered[:MOST_GROUPS]
    ]  # fmt: skip
    rest = [value for _, members in ordered[MOST_GROUPS:] for value in members]
    if rest:
        lines.append(MSG_MORE.format(count=len(rest), size=render_bytes(_size(rest))))
    if _Origins.line_of is None:
        lines.append(MSG_LINES)
    return MSG_HELD.format(
        count=len(values), total=render_bytes(_size(values)), groups="\n".join(lines)
    )


def _has_failed(value: HeldValue) -> bool:
    """Whether the program that computes a value has failed, so that it takes no memory. Does not wait for it."""
    is_ready = getattr(value.buffer, "is_ready", None)
    if is_ready is None or not is_ready():
        return False
    try:
        value.storage.trace.backend.client.wait([value.buffer])
    except RuntimeError:
        return True
    return False


def _size(values: Iterable[HeldValue]) -> int:
    return sum(value.storage.meta.nbytes for value in values)


def _what(members: list[HeldValue], names: dict[int, str]) -> str:
    """The names of a group's values in modules and optimizers, as far as they are known."""
    known = [names[id(value.storage)] for value in members if id(value.storage) in names]
    if not known:
        return ""
    more = f" and {len(known) - 1} more" if len(known) > 1 else ""
    return f" ({min(known)}{more})"


def _names() -> dict[int, str]:
    """The names that modules and optimizers have for the storages that they hold, by the storages' ids."""
    objects = gc.get_objects()
    names: dict[int, str] = {}
    # by type(): ``isinstance`` asks a weakref proxy for its class, which raises if its object is gone
    modules = [each for each in objects if issubclass(type(each), torch.nn.Module)]
    inner = {id(child) for module in modules for child in vars(module).get("_modules", {}).values()}
    for module in modules:
        if id(module) not in inner:
            with contextlib.suppress(AttributeError):  # from a module whose __init__ has not run
                names.update(_of_module(module))
    for optimizer in objects:
        if issubclass(type(optimizer), torch.optim.Optimizer):
            for parameter, state in optimizer.state.items():
                of = names.get(_key(parameter), "a parameter")
                for key, value in state.items():
                    if isinstance(value, XLATensor):
                        names.setdefault(_key(value), f"{key} of {of}")
    return names


def _of_module(module: torch.nn.Module) -> Iterator[tuple[int, str]]:
    for kind, named in (
        ("parameter", module.named_parameters()),
        ("buffer", module.named_buffers()),
    ):
        for name, tensor in named:
            if isinstance(tensor, XLATensor):
                yield _key(tensor), f"{kind} {name}"
            if isinstance(tensor.grad, XLATensor):
                yield _key(tensor.grad), f"gradient of {name}"


def _key(tensor: object) -> int:
    return id(tensor._s) if isinstance(tensor, XLATensor) else 0
