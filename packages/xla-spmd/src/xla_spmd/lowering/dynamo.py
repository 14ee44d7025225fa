"""``torch.ops.xla.dynamo_mark_sharding``: an annotation as an operator of ``torch.compile``'s graphs.

The operator returns the annotated value and has no side effect, so that every graph transformation stays valid.
A compiled function must therefore use the returned tensor.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Final

import torch
from torch.autograd.function import FunctionCtx

from xla_core.support import caches
from xla_spmd.sharding.mesh import Mesh
from xla_spmd.sharding.partition_spec import Spec, check_rank

_library: Final = torch.library.Library("xla", "FRAGMENT")
_library.define(
    "dynamo_mark_sharding(Tensor input, int[] device_ids, int[] mesh_shape, str axis_names, "
    "str partition_spec) -> Tensor"
)
MARK: Final = torch.ops.xla.dynamo_mark_sharding.default


def _meta(input: torch.Tensor, *_description: object) -> torch.Tensor:
    return torch.empty_like(input)


def _backward(
    _ctx: FunctionCtx, gradient: torch.Tensor
) -> tuple[torch.Tensor, None, None, None, None]:
    return gradient, None, None, None, None


_library.impl("dynamo_mark_sharding", _meta, "Meta")
torch.library.register_autograd("xla::dynamo_mark_sharding", _backward, lib=_library)


def mark_in_graph(tensor: torch.Tensor, mesh: Mesh, partition_spec: Spec) -> torch.Tensor:
    """Annotate ``tensor`` by the operator, which ``torch.compile`` can trace, and return the annotated tensor."""
    return torch.ops.xla.dynamo_mark_sharding(
        tensor,
        mesh.listed_ids,
        list(mesh.mesh_shape),
        mesh.names_text,
        str(tuple(partition_spec)),
    )


def dynamo_mark_sharding(
    input: torch.Tensor,
    device_ids: Sequence[int],
    mesh_shape: Sequence[int],
    axis_names: str,
    partition_spec: str,
) -> torch.Tensor:
    """The value of ``input``, split by ``partition_spec`` over the mesh that the other arguments describe.

    ``axis_names`` and ``partition_spec`` are tuples in Python's notation, for example ``"('data', 'model')"`` and
    ``"('data', None)"``. ``axis_names`` may be ``"None"``.
    """
    annotated: torch.Tensor = torch.ops.xla.dynamo_mark_sharding(
        input, list(device_ids), list(mesh_shape), axis_names, partition_spec
    )
    return annotated


dynamo_mark_sharding_xla = dynamo_mark_sharding


def sharding_text(
    shape: Sequence[int],
    device_ids: Sequence[int],
    mesh_shape: Sequence[int],
    axis_names: str,
    partition_spec: str,
) -> str:
    """The HLO sharding that the operator's arguments describe, for a value of ``shape``.

    Raises PartitionSpecError if the partition spec does not fit the mesh or ``shape``.
    """
    return _sharding_text(
        tuple(shape), tuple(device_ids), tuple(mesh_shape), axis_names, partition_spec
    )


@caches.memoized("shardings of marks in graphs")
def _sharding_text(
    shape: tuple[int, ...], ids: tuple[int, ...], grid: tuple[int, ...], names: str, spec: str
) -> str:
    mesh = Mesh(ids, grid, ast.literal_eval(names))
    partition_spec = ast.literal_eval(spec)
    check_rank(partition_spec, shape)
    return mesh.get_op_sharding(partition_spec).text
