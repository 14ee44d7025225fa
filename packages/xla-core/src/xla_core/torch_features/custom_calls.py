"""Custom calls: calls by name, in the lowered program, of code in the device's compiler or runtime.

``stablehlo_custom_call`` records one. ``place_to_host`` and ``place_to_device`` are custom calls that choose the
memory in which a value is kept. Exported models contain them, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch

import xla_core.torch_bridge.marking_ops  # noqa: F401 - PyTorch learns of the operators there
from xla_core.recording.xla_tensor import handler_of

MSG_RESULTS: Final = (
    "{name}: {shapes} output shapes and {dtypes} output dtypes; give one of each per result"
)

_FULL: Final = torch.ops.xla.custom_call.default


def stablehlo_custom_call(
    args: Sequence[torch.Tensor],
    call_target: str,
    output_shapes: Sequence[Sequence[int]],
    output_dtypes: Sequence[torch.dtype],
    has_side_effect: bool = False,
    backend_config: str = "",
    api_version: int = 0,
    frontend_attributes: Mapping[str, str] | None = None,
) -> torch.Tensor | list[torch.Tensor]:
    """Record ``stablehlo.custom_call @call_target``; returns its result, or a list if there are several.

    The results have the given shapes and dtypes, and no autograd history. ``api_version`` is StableHLO's (default:
    0, unspecified; 4 is XLA's typed FFI, whose ``backend_config`` is an MLIR dictionary). A call whose results are
    not used is dropped, even one with a side effect. A target that does not exist is an error when the program is
    compiled. Raises ValueError unless there is one dtype per shape, RuntimeError for a tensor that is not on an
    ``xla`` device.
    """
    results = custom_call(
        args, call_target, output_shapes, output_dtypes, has_side_effect, backend_config,
        api_version, frontend_attributes or {},
    )  # fmt: skip
    return results[0] if len(results) == 1 else results


def custom_call(
    inputs: Sequence[torch.Tensor],
    target: str,
    output_shapes: Sequence[Sequence[int]],
    output_dtypes: Sequence[torch.dtype],
    has_side_effect: bool,
    backend_config: str,
    api_version: int,
    frontend_attributes: Mapping[str, str],
) -> list[torch.Tensor]:
    """``stablehlo_custom_call`` that always returns a list."""
    if len(output_shapes) != len(output_dtypes):
        raise ValueError(
            MSG_RESULTS.format(name=target, shapes=len(output_shapes), dtypes=len(output_dtypes))
        )
    recorded = (
        list(inputs),
        target,
        [size for shape in output_shapes for size in shape],
        [len(shape) for shape in output_shapes],
        ",".join(str(dtype).removeprefix("torch.") for dtype in output_dtypes),
        has_side_effect,
        backend_config,
        api_version,
        [text for pair in sorted(frontend_attributes.items()) for text in pair],
    )
    results: list[torch.Tensor]
    if not inputs:  # no tensor decides the device, so it is the current one
        results = handler_of(_FULL)(recorded, None)
        return results
    results = _FULL(*recorded)
    return results


# -- memories ---------------------------------------------------------------------------------------


def place_to_host(t: torch.Tensor | None) -> torch.Tensor | None:
    """A copy of ``t`` that is kept in the host's memory; differentiable. None for None.

    It has no effect on a device whose compiler does not move values between memories, such as a CPU.
    """
    return None if t is None else torch.ops.xla.place_to_host(t)


def place_to_device(t: torch.Tensor | None) -> torch.Tensor | None:
    """A copy of ``t`` in the device's memory, see ``place_to_host``."""
    return None if t is None else torch.ops.xla.place_to_device(t)


def to_host_backward(ctx: object, grad: torch.Tensor) -> torch.Tensor | None:
    """The gradient of ``place_to_host``: it is placed in the host's memory, too."""
    del ctx
    return place_to_host(grad)


def to_device_backward(ctx: object, grad: torch.Tensor) -> torch.Tensor | None:
    """The gradient of ``place_to_device``: it is placed in the device's memory, too."""
    del ctx
    return place_to_device(grad)
