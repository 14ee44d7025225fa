"""What xla-core calls: the hooks of this package."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from xla_core import spmd_mode
from xla_core.hookspecs import hookimpl
from xla_core.protocol import DeviceClient
from xla_spmd import __version__, operators
from xla_spmd.backend import MeshBackend
from xla_spmd.manual import over_parts
from xla_spmd.mesh import Mesh


@hookimpl
def xla_core_make_backends(client: DeviceClient) -> Sequence[MeshBackend] | None:
    """In SPMD mode one device: all of the job."""
    return [MeshBackend(client)] if spmd_mode.is_spmd() else None


@hookimpl
def xla_core_register_operators(registry: Any) -> None:
    """The operators that carry annotations."""
    operators.register(registry)


@hookimpl
def xla_core_over_parts(
    function: Callable[..., Any],
    tensors: Sequence[Any],
    specs: Sequence[Any],
    results: Sequence[tuple[Any, tuple[int, ...]]],
    mesh: Any,
) -> Any:
    """Manual sharding around the call."""
    if not spmd_mode.is_spmd():
        return None
    found = Mesh.from_str(mesh) if isinstance(mesh, str) else mesh
    return over_parts(function, tensors, specs, results, found)


@hookimpl
def xla_core_cache_key_entries() -> Mapping[str, bytes]:
    """Annotations are lowered here: another version may lower them otherwise (edits count by themselves)."""
    return {"xla-spmd": __version__.encode()}
