"""Operators without a lowering: computed by PyTorch on the CPU, counted, and warned about once.

Operators of other libraries whose kernel calls PyTorch are recorded by what the kernel calls, unless it
asks for memory (``.numpy()``): it was written for the CPU, and runs there.
"""

from __future__ import annotations

import time
import warnings
from typing import Final

import torch
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from xla_core.contract import events
from xla_core.contract.foreign_values import AnyFunction
from xla_core.dispatch import layouts
from xla_core.dispatch.functional import find_trace
from xla_core.dispatch.transfers import read, upload
from xla_core.operators.schema import Signature
from xla_core.recording import source_location
from xla_core.recording.trace import Trace
from xla_core.recording.xla_tensor import Handler, XLATensor
from xla_core.support import counters, flags
from xla_core.torch_bridge.error_texts import is_numpy_of_device
from xla_core.torch_bridge.operands import NamedOperands, Operand, Operands

MSG_FALLBACK: Final = (
    "{operator} has no XLA lowering and runs on the CPU: what was pending was executed, its operands were "
    "copied to the host and its result back. First called at {where}. Counter: {operator}"
)
_warned: set[str] = set()


class FallbackWarning(UserWarning):
    """An operator ran on the CPU because the ``xla`` device has no lowering for it."""


def counter_name(overload: OpOverload) -> str:
    """The name that fallbacks of ``overload`` are counted under, ``aten::op``."""
    return str(overload._schema.name)


def fallback_handler(overload: OpOverload, signature: Signature) -> Handler:
    """A handler that fetches the operands, runs the operator on the CPU and uploads its results."""

    def on_cpu(args: Operands, kwargs: NamedOperands | None) -> Operand:
        trace = find_trace(args, kwargs)
        named = kwargs or {}
        hosts: dict[int, torch.Tensor] = {}
        name = counter_name(overload)
        began = time.perf_counter_ns()
        try:
            host_args, host_named = _on_host(args, named, hosts)
            note_fallback(name)
            result = overload(*host_args, **host_named)
            _write_back(args, named, signature, hosts)
            originals = {
                id(hosts[id(t)]): t for t in _tensors((*args, *named.values())) if id(t) in hosts
            }
            return _to_device(result, trace, originals)
        finally:
            if events.listening(events.Fallback):
                _tell(name, time.perf_counter_ns() - began)

    return on_cpu


def refuse(overload: OpOverload, args: Operands, kwargs: NamedOperands) -> None:
    """Raise what the CPU raises for the values of these operands, if it does."""
    host_args, host_named = _on_host(args, kwargs, {})
    overload(*host_args, **host_named)


def _on_host(
    args: Operands, kwargs: NamedOperands, hosts: dict[int, torch.Tensor]
) -> tuple[list[Operand], dict[str, Operand]]:
    named = {
        name: torch.device("cpu") if name == "device" else _to_host(value, hosts)
        for name, value in kwargs.items()
    }
    return [_to_host(a, hosts) for a in args], named


def note_fallback(name: str) -> None:
    """Count one fallback of ``name`` and warn the first time, at the user's line."""
    counters.increment(name)
    if name in _warned or flags.QUIET.get():
        return
    filename, line = source_location.user_line()
    _warned.add(name)
    warnings.warn_explicit(
        MSG_FALLBACK.format(operator=name, where=f"{filename}:{line}"),
        FallbackWarning,
        filename,
        line,
    )


def _tell(name: str, nanoseconds: int) -> None:
    filename, line = source_location.user_line()
    event = events.Fallback(operator=name, filename=filename, line=line, nanoseconds=nanoseconds)
    events.emit(event)


def _to_host(a: Operand, hosts: dict[int, torch.Tensor]) -> Operand:
    if isinstance(a, XLATensor):
        if id(a) not in hosts:
            hosts[id(a)] = read(a)
        return hosts[id(a)]
    if isinstance(a, layouts.SparseXLATensor):
        return hosts.setdefault(id(a), a.cpu())
    if isinstance(a, (list, tuple)):
        return [_to_host(item, hosts) for item in a]
    return a


def _tensors(items: Operand) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []
    for a in items:
        if isinstance(a, (XLATensor, layouts.SparseXLATensor)):
            tensors.append(a)
        elif isinstance(a, (list, tuple)):
            tensors.extend(_tensors(a))
    return tensors


def _write_back(
    args: Operands,
    named: NamedOperands,
    signature: Signature,
    hosts: dict[int, torch.Tensor],
) -> None:
    for position in signature.written:
        target = args[position] if position < len(args) else named.get(signature.names[position])
        for tensor in _tensors([target]):
            if isinstance(tensor, layouts.SparseXLATensor):
                layouts.replace(tensor, hosts[id(tensor)].to(tensor.device))
            else:
                tensor.copy_(hosts[id(tensor)])


def _to_device(result: Operand, trace: Trace, originals: dict[int, torch.Tensor]) -> Operand:
    if isinstance(result, torch.Tensor):
        if id(result) in originals:
            return originals[id(result)]
        return _sparse_on_device(result, trace) if result.is_sparse else upload(result, trace)
    if isinstance(result, (list, tuple)):
        return type(result)(_to_device(item, trace, originals) for item in result)
    return result


def _sparse_on_device(host: torch.Tensor, trace: Trace) -> Operand:
    indices, values = upload(host._indices(), trace), upload(host._values(), trace)
    return layouts.make(indices, values, tuple(host.shape), host.is_coalesced())


# -- kernels of other libraries ------------------------------------------------------------------


def outside_handler(overload: OpOverload, kernel: AnyFunction, facts: Signature) -> Handler:
    """A handler that calls ``kernel``, which others registered for ``overload`` on every device."""
    on_cpu = fallback_handler(overload, facts)
    reads_memory = False

    def record(args: Operands, kwargs: NamedOperands | None) -> Operand:
        nonlocal reads_memory
        if reads_memory:
            return on_cpu(args, kwargs)
        former = _former_values(args, kwargs, facts)
        try:
            results = kernel(*args, **(kwargs or {}))
        except TypeError as error:
            if not is_numpy_of_device(error):
                raise
        else:
            return _on_device(results, args, kwargs)
        reads_memory = True
        for written, value in former:
            written.copy_(value)
        return on_cpu(args, kwargs)

    return record


def _former_values(
    args: Operands, kwargs: NamedOperands | None, facts: Signature
) -> list[tuple[XLATensor, torch.Tensor]]:
    """What the kernel may write to, with its value before: a program computes it only where it is needed."""
    if not facts.written:
        return []
    named = kwargs or {}
    written = [
        args[position] if position < len(args) else named.get(facts.names[position])
        for position in facts.written
    ]
    return [(t, t.clone()) for t in pytree.tree_leaves(written) if isinstance(t, XLATensor)]


def _on_device(results: Operand, args: Operands, kwargs: NamedOperands | None) -> Operand:
    """``results``, with tensors that the kernel left on the CPU where its operands are."""
    if isinstance(results, XLATensor) or results is None:
        return results
    leaves = pytree.tree_leaves(results)
    if not any(_is_on_cpu(leaf) for leaf in leaves):
        return results
    trace = find_trace(args, kwargs)
    return pytree.tree_map(lambda leaf: upload(leaf, trace) if _is_on_cpu(leaf) else leaf, results)


def _is_on_cpu(value: Operand) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "cpu"
