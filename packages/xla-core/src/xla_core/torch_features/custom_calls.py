"""Calls by name in the lowered program, of code that the device's own compiler or runtime knows.

``stablehlo_custom_call`` records one; ``place_to_host`` and ``place_to_device`` are those that say in
which memory a value is kept. Exported models hold them too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from xla_core.recording.xla_tensor import XLATensor, handler_of
from xla_core.torch_bridge.op_library import XLA_LIB

MSG_NOT_XLA: Final = (
    "{name}: a custom call is part of a program for an xla device, and got a tensor on {device}; move "
    "it there first: .to('xla')"
)
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
    """The result of ``stablehlo.custom_call @call_target``, or the list of them if there are several.

    The results have the given shapes and dtypes, and no history. ``api_version`` is StableHLO's
    (0 unspecified, 4 XLA's typed FFI, whose ``backend_config`` is an MLIR dictionary). A call whose
    results nobody reads is not made, even one with a side effect. Whether the target exists is known
    when the program is compiled. Raises ValueError unless there is one dtype per shape, RuntimeError
    for a tensor that is not on an ``xla`` device.
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
    """``stablehlo_custom_call`` that always gives a list."""
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
    found: list[torch.Tensor]
    if not inputs:  # no tensor says which device is meant: it is the current one
        found = handler_of(_FULL)(recorded, None)
        return found
    found = _FULL(*recorded)
    return found


def result_specs(
    sizes: Sequence[Any], ranks: Sequence[int], dtypes: str
) -> list[tuple[tuple[Any, ...], torch.dtype]]:
    """Shapes and dtypes of a call's results, from the operator's arguments."""
    remaining = iter(sizes)
    shapes = [tuple(next(remaining) for _ in range(rank)) for rank in ranks]
    kinds = [getattr(torch, name) for name in dtypes.split(",") if name]
    return list(zip(shapes, kinds, strict=True))


def results_of(
    args: list[torch.Tensor], target: str, sizes: Any, ranks: Any, dtypes: str, *_: Any
) -> list[torch.Tensor]:
    """Meta tensors like the results of a recorded call."""
    specs = result_specs(sizes, ranks, dtypes)
    return [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in specs]


def _elsewhere(args: list[torch.Tensor], target: str, *_: Any) -> Any:
    device = next(a.device for a in args if not isinstance(a, XLATensor))
    raise RuntimeError(MSG_NOT_XLA.format(name=target, device=device))


XLA_LIB.impl("custom_call", results_of, "Meta")
XLA_LIB.impl("custom_call", _elsewhere, "CPU")


# -- memories ---------------------------------------------------------------------------------------


def place_to_host(t: torch.Tensor | None) -> torch.Tensor | None:
    """``t``, kept in the host's memory from here on; differentiable. None stays None.

    On a device whose compiler moves no values between memories (a CPU's) nothing happens.
    """
    return None if t is None else torch.ops.xla.place_to_host(t)


def place_to_device(t: torch.Tensor | None) -> torch.Tensor | None:
    """``t``, back in the device's memory; see ``place_to_host``."""
    return None if t is None else torch.ops.xla.place_to_device(t)


def _same_gradient(_context: Any, gradient: torch.Tensor) -> torch.Tensor:
    return gradient


def _register(name: str) -> None:
    def elsewhere(t: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(MSG_NOT_XLA.format(name=name, device=t.device))

    XLA_LIB.impl(name, torch.empty_like, "Meta")
    XLA_LIB.impl(name, elsewhere, "CPU")
    torch.library.register_autograd(f"xla::{name}", _same_gradient, lib=XLA_LIB)


_register("place_to_host")
_register("place_to_device")
