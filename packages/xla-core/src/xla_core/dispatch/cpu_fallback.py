"""Operators without a lowering: computed by PyTorch on the CPU, counted, and warned about once."""

from __future__ import annotations

import time
import warnings
from typing import Any, Final

import torch

from xla_core.contract import events
from xla_core.dispatch.functional import find_trace
from xla_core.dispatch.transfers import read, upload
from xla_core.operators.schema import Signature
from xla_core.recording import source_location
from xla_core.recording.trace import Trace
from xla_core.recording.xla_tensor import Handler, XLATensor
from xla_core.support import counters, flags

MSG_FALLBACK: Final = (
    "{operator} has no XLA lowering and runs on the CPU: what was pending was executed, its operands were "
    "copied to the host and its result back. First called at {where}. Counter: {operator}"
)
_warned: set[str] = set()


class FallbackWarning(UserWarning):
    """An operator ran on the CPU because the ``xla`` device has no lowering for it."""


def counter_name(overload: Any) -> str:
    """The name that fallbacks of ``overload`` are counted under, ``aten::op``."""
    return str(overload._schema.name)


def fallback_handler(overload: Any, signature: Signature) -> Handler:
    """A handler that fetches the operands, runs the operator on the CPU and uploads its results."""

    def on_cpu(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
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


def refuse(overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise what the CPU raises for the values of these operands, if it does."""
    host_args, host_named = _on_host(args, kwargs, {})
    overload(*host_args, **host_named)


def _on_host(
    args: tuple[Any, ...], kwargs: dict[str, Any], hosts: dict[int, torch.Tensor]
) -> tuple[list[Any], dict[str, Any]]:
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


def _to_host(a: Any, hosts: dict[int, torch.Tensor]) -> Any:
    if isinstance(a, XLATensor):
        if id(a) not in hosts:
            hosts[id(a)] = read(a)
        return hosts[id(a)]
    if isinstance(a, (list, tuple)):
        return [_to_host(item, hosts) for item in a]
    return a


def _tensors(items: Any) -> list[XLATensor]:
    tensors: list[XLATensor] = []
    for a in items:
        if isinstance(a, XLATensor):
            tensors.append(a)
        elif isinstance(a, (list, tuple)):
            tensors.extend(_tensors(a))
    return tensors


def _write_back(
    args: tuple[Any, ...],
    named: dict[str, Any],
    signature: Signature,
    hosts: dict[int, torch.Tensor],
) -> None:
    for position in signature.written:
        target = args[position] if position < len(args) else named.get(signature.names[position])
        for tensor in _tensors([target]):
            tensor.copy_(hosts[id(tensor)])


def _to_device(result: Any, trace: Trace, originals: dict[int, XLATensor]) -> Any:
    if isinstance(result, torch.Tensor):
        return originals.get(id(result)) if id(result) in originals else upload(result, trace)
    if isinstance(result, (list, tuple)):
        return type(result)(_to_device(item, trace, originals) for item in result)
    return result
