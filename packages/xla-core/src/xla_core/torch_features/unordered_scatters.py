"""Refuses scatter operators under deterministic algorithms on devices that add values in any order (GPUs)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch._ops import OpOverload

from xla_core.contract.device_protocol import DeviceClient, capabilities_of
from xla_core.execution import runtime
from xla_core.recording.xla_tensor import Handler, handler_of, set_handler
from xla_core.torch_bridge.operands import NamedOperands, Operand, Operands

MSG_UNORDERED: Final = (
    "{name} does not have a deterministic implementation on this device, but you set "
    "'torch.use_deterministic_algorithms(True)'. You can turn off determinism just for this operation, or you can "
    "use the 'warn_only=True' option, if that's acceptable for your application"
)

_ADD: Final = (
    "index_add", "scatter_add", "embedding_dense_backward", "grid_sampler_2d_backward",
    "grid_sampler_3d_backward", "max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward",
    "adaptive_max_pool2d_backward", "adaptive_max_pool3d_backward", "fractional_max_pool2d_backward",
    "fractional_max_pool3d_backward", "upsample_linear1d_backward", "upsample_bilinear2d_backward",
    "upsample_bicubic2d_backward", "upsample_trilinear3d_backward", "reflection_pad1d_backward",
    "reflection_pad2d_backward", "reflection_pad3d_backward", "replication_pad1d_backward",
    "replication_pad2d_backward", "replication_pad3d_backward",
)  # fmt: skip
_ACCUMULATE: Final = ("index_put", "_index_put_impl", "put")
_REDUCE: Final = ("scatter_reduce", "index_reduce")
_ORDERED: Final = ("amax", "amin")


def install() -> None:
    """Call ``attend`` once the client runs."""
    runtime.when_started(attend)


def attend(client: DeviceClient) -> None:
    """If ``client`` adds in any order, make those operators check PyTorch's setting at each call."""
    if not capabilities_of(client).unordered_scatter:
        return
    for names, adds in ((_ADD, _always), (_ACCUMULATE, _accumulates), (_REDUCE, _reduces)):
        for name in names:
            for packet in (name, f"{name}_"):
                for overload in _overloads(packet):
                    set_handler(overload, _checked(overload, adds, handler_of(overload)))
    for overload in _overloads("bincount"):
        set_handler(overload, _checked(overload, _weighted, handler_of(overload)))


def _overloads(packet: str) -> list[object]:
    operator = getattr(torch.ops.aten, packet, None)
    names = operator.overloads() if operator is not None else []
    # hacked_twin belongs to TorchScript and is not an operator of the dispatcher
    return [getattr(operator, name) for name in names if name != "hacked_twin"]


def _always(_arguments: Mapping[str, Operand]) -> bool:
    return True


def _accumulates(arguments: Mapping[str, Operand]) -> bool:
    return bool(arguments.get("accumulate"))


def _reduces(arguments: Mapping[str, Operand]) -> bool:
    return arguments.get("reduce") not in _ORDERED


def _weighted(arguments: Mapping[str, Operand]) -> bool:
    return arguments.get("weights") is not None


def _checked(
    overload: OpOverload, adds: Callable[[Mapping[str, object]], bool], handler: Handler
) -> Handler:
    """A handler that checks the setting first; ``adds(arguments)`` is whether a call adds values in any order."""
    names = [argument.name for argument in overload._schema.arguments]

    def checked(args: Operands, kwargs: NamedOperands | None) -> Operand:
        if torch.are_deterministic_algorithms_enabled():
            arguments = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
            if adds(arguments):
                _alert(overload.overloadpacket.__name__)
        return handler(args, kwargs)

    return checked


def _alert(name: str) -> None:
    text = MSG_UNORDERED.format(name=name)
    if not torch.is_deterministic_algorithms_warn_only_enabled():
        raise RuntimeError(text)
    warnings.warn(text, UserWarning, stacklevel=2)
