"""The hooks by which xla-core calls this package."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from xla_core.contract.device_protocol import DeviceClient
from xla_core.contract.hookspecs import OperatorRegistry, hookimpl
from xla_core.extension_api import runtime
from xla_core.support import counters
from xla_spmd import __version__
from xla_spmd.lowering import annotation_ops
from xla_spmd.lowering.mesh_backend import MeshBackend
from xla_spmd.reports import flight_collectives
from xla_spmd.sharding.mesh import Mesh
from xla_spmd.sharding.partition_spec import Spec
from xla_spmd.tensors.annotated_copies import keep_annotations
from xla_spmd.tensors.manual_sharding import over_parts


@hookimpl
def xla_core_make_backends(client: DeviceClient) -> Sequence[MeshBackend] | None:
    """In SPMD mode, make one backend for all devices of the job; else None."""
    if not runtime.is_spmd():
        return None
    counters.increment("VirtualDeviceUsage")
    keep_annotations()
    flight_collectives.begin()
    return [MeshBackend(client)]


@hookimpl
def xla_core_register_operators(registry: OperatorRegistry) -> None:
    """Register the operators that annotate values and those of manual sharding."""
    annotation_ops.register(registry)


@hookimpl
def xla_core_over_parts(
    function: Callable[..., Sequence[torch.Tensor]],
    tensors: Sequence[torch.Tensor | None],
    specs: Sequence[Spec],
    results: Sequence[tuple[Spec, tuple[int, ...]]],
    mesh: Mesh | str | None,
) -> tuple[torch.Tensor, ...] | None:
    """Call ``function`` under manual sharding; None outside SPMD mode."""
    if not runtime.is_spmd():
        return None
    device_mesh = Mesh.from_str(mesh) if isinstance(mesh, str) else mesh
    return over_parts(function, tensors, specs, results, device_mesh)


@hookimpl
def xla_core_cache_key_entries() -> Mapping[str, bytes]:
    """The package's version: another one may lower annotations otherwise (edited sources are noticed anyway)."""
    return {"xla-spmd": __version__.encode()}
