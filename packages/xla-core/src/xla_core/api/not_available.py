"""Functions of torch_xla that depend on its C++ runtime: each raises an error that says what to use instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NoReturn

MSG_NOT_AVAILABLE: Final = (
    "{name} needs torch_xla's C++ runtime, which this project does not have; use {instead}"
)


def _without(name: str, instead: str) -> Callable[..., NoReturn]:
    def raises(*_args: object, **_kwargs: object) -> NoReturn:
        raise NotImplementedError(MSG_NOT_AVAILABLE.format(name=name, instead=instead))

    raises.__name__ = raises.__qualname__ = name.rpartition(".")[2]
    raises.__doc__ = f"Raises NotImplementedError: use {instead}."
    return raises


broadcast_xla: Final = _without(
    "torch_xla._internal.c10d_registration.broadcast_xla",
    "torch.distributed.broadcast(tensor, src) in a process group of backend 'xla', or "
    "xm.collective_broadcast([tensor], root_ordinal)",
)
_META_MODELS: Final = (
    "XlaFullyShardedDataParallel(module, param_init_fn=fn), for modules on the meta device"
)
get_orig_params: Final = _without(
    "torch_xla.distributed.fsdp._init_utils._get_orig_params", "module.parameters()"
)
materialize_module: Final = _without(
    "torch_xla.distributed.fsdp._init_utils._materialize_module", _META_MODELS
)
_LOCATIONS: Final = (
    "StableHLOExportOptions(export_node_metadata=True): operations then have their module, source line and "
    "FX node as location"
)
write_mlir_debuginfo: Final = _without(
    "torch_xla.experimental.xla_mlir_debuginfo.write_mlir_debuginfo", _LOCATIONS
)
