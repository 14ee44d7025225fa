"""Names of torch_xla's C++ module ``_XLAC`` that Python code calls directly: steps, tensor ids, donation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from xla_core.api import xla_model
from xla_core.api.device_info import device_kind as _xla_device_kind
from xla_core.api.varying_hints import mark_dynamic
from xla_core.api.xla_model import wait_device_ops as _xla_wait_device_ops
from xla_core.builder.hlo import XlaComputation
from xla_core.compilation import program_table
from xla_core.dispatch.transfers import materialise
from xla_core.execution import deferred_steps, runtime
from xla_core.launching import buffer_donation
from xla_core.lowering.compile_settings import get_mat_mul_precision as _xla_get_mat_mul_precision
from xla_core.lowering.compile_settings import set_mat_mul_precision as _xla_set_mat_mul_precision
from xla_core.recording.storage import PLACEHOLDER
from xla_core.recording.xla_tensor import XLATensor
from xla_core.support import counters

MSG_VIEW: Final = "a view has no memory of its own; take the pointer of its clone()"
MSG_POINTER: Final = "the device {device} does not report the addresses of its buffers"
MSG_NOT_XLA: Final = "Input tensor is not an XLA tensor: {type}"


def _on_xla(tensor: torch.Tensor) -> XLATensor:
    if not isinstance(tensor, XLATensor):
        raise RuntimeError(MSG_NOT_XLA.format(type=torch.Tensor.type(tensor)))
    return tensor


def _xla_metrics_report() -> str:
    """The metrics report, as ``torch_xla.debug.metrics.metrics_report()`` gives it."""
    return counters.report()


def _xla_get_default_device() -> str:
    """The calling thread's current device, as text."""
    return str(xla_model.device())


def _xla_get_tensor_id(tensor: torch.Tensor) -> int:
    """A number that is the same for all tensors on one storage, and different for other live tensors."""
    return id(_on_xla(tensor)._s)


def _xla_sync_multi(
    tensors: Sequence[torch.Tensor],
    devices: Sequence[str] = (),
    wait: bool = True,
    sync_xla_data: bool = True,
) -> None:
    """Run all pending operations on the devices of ``tensors``; with ``wait`` return when they have finished.

    ``devices`` and ``sync_xla_data`` are accepted and have no effect.
    """
    del devices, sync_xla_data
    for device in dict.fromkeys(_on_xla(t)._s.trace.device for t in tensors):
        runtime.sync(device, wait=wait)


def _xla_step_marker(
    device: str = "", devices: Sequence[str] = (), wait: bool = True, reset_scope: bool = True
) -> None:
    """End the step of one device (default: the current one), as ``torch_xla.sync()`` does."""
    del devices
    with runtime.current_device(int(runtime.trace_of(device or None).device.index)):
        xla_model.sync(wait, reset_scope)


def _xla_get_devices() -> list[str]:
    """The runtime's names of this process's devices: ``['CPU:0']``."""
    return [xla_model.real_name(d) for d in xla_model.devices()]


def _xla_real_devices(devices: Sequence[str] = ()) -> list[str]:
    """The runtime's names of ``xla`` devices (default: all), such as ``CPU:0``."""
    return [xla_model.real_name(d) for d in devices or xla_model.devices()]


def _xla_runtime_is_initialized() -> bool:
    """Whether the device client is running."""
    return runtime.started()


def _init_computation_client() -> None:
    """Start the device client, unless it is running."""
    runtime.client()


def _xla_computation_cache_is_initialized() -> bool:
    """Whether programs have been compiled or loaded; then it is too late for ``xr.initialize_cache``."""
    return bool(program_table.all_programs())


def _check_tensor_need_materialization(tensors: Sequence[torch.Tensor]) -> list[bool]:
    """For each tensor whether its value is recorded but not computed yet; False for tensors on other devices."""
    return [isinstance(t, XLATensor) and _pending(t) for t in tensors]


def _pending(tensor: XLATensor) -> bool:
    s = tensor._s
    return s.trace.is_pending(s)


def _xla_user_computation(
    name: str, tensors: Sequence[torch.Tensor], computation: XlaComputation
) -> list[torch.Tensor]:
    """Record a computation of ``xla_builder`` on ``tensors`` as one operation of the step; returns its results."""
    return computation.run(name, tensors)


def _is_placecholder(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no value (the spelling is torch_xla's).

    Either ``create_placeholder_tensor`` made it, or its buffer was donated and a program has reused the memory.
    """
    if not isinstance(tensor, XLATensor):
        return False
    return tensor._s.buffer is PLACEHOLDER or buffer_donation.is_gone(tensor._s)


def _set_buffer_donation(tensor: torch.Tensor, should_donate: bool) -> bool:
    """Mark a tensor's buffer as one to donate, see ``buffer_donation``; returns False for a pending tensor."""
    counters.increment("XlaSetBufferDonation")
    storage = _on_xla(tensor)._s
    deferred_steps.finish(storage.trace)
    return buffer_donation.mark(storage, bool(should_donate))


def _get_buffer_donation(tensor: torch.Tensor) -> bool:
    """Whether a tensor's buffer is marked as one to donate."""
    storage = _on_xla(tensor)._s
    deferred_steps.finish(storage.trace)
    return buffer_donation.is_marked(storage.buffer)


def _unsafe_buffer_pointer(tensor: torch.Tensor) -> int:
    """The address of a tensor's buffer in device memory; a pending value is computed first.

    The address is valid until the tensor gets another value. Raises RuntimeError for a view, which has no buffer of
    its own, and if the device does not report addresses.
    """
    s = _on_xla(tensor)._s
    if _on_xla(tensor)._v is not None:
        raise RuntimeError(MSG_VIEW)
    with s.trace.lock:
        buffer = materialise(s.trace, s)
        if buffer is None:  # it was never written to
            buffer = s.trace.backend.allocate(s.meta)
            s.bind(buffer)
    pointer = getattr(buffer, "unsafe_buffer_pointer", None)
    if pointer is None:
        raise RuntimeError(MSG_POINTER.format(device=tensor.device))
    return int(pointer())


def _xla_mark_dynamic(tensor: torch.Tensor, dim: int) -> None:
    """Declare that dimension ``dim`` varies from step to step, as ``torch_xla.experimental.mark_dynamic`` does.

    The tensor keeps its size; programs serve all sizes up to a bound (docs/shapes.md).
    """
    mark_dynamic(_on_xla(tensor), dim)


def _get_xla_tensor_dimension_size(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """The size of dimension ``dim`` as an int32 tensor of shape (), on the tensor's device."""
    return torch.full((), _on_xla(tensor).shape[dim], dtype=torch.int32, device=tensor.device)


__all__ = [
    "_check_tensor_need_materialization", "_get_buffer_donation", "_get_xla_tensor_dimension_size",
    "_init_computation_client", "_is_placecholder", "_set_buffer_donation",
    "_unsafe_buffer_pointer", "_xla_computation_cache_is_initialized", "_xla_device_kind",
    "_xla_get_default_device", "_xla_get_devices", "_xla_get_mat_mul_precision",
    "_xla_get_tensor_id", "_xla_mark_dynamic", "_xla_metrics_report", "_xla_real_devices",
    "_xla_runtime_is_initialized", "_xla_set_mat_mul_precision", "_xla_step_marker",
    "_xla_sync_multi", "_xla_user_computation", "_xla_wait_device_ops",
]  # fmt: skip
