"""``Mesh``: the devices of a job as a grid with named axes."""

from __future__ import annotations

import ast
import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

import numpy as np

from xla_core.extension_api import runtime
from xla_core.support import counters
from xla_spmd.sharding import job_devices as job
from xla_spmd.sharding.hlo_sharding import Sharding
from xla_spmd.sharding.partition_spec import Spec, sharding_of

MSG_SIZE: Final = (
    "Number of device IDs ({count}) must match mesh size ({size}): a mesh of shape {shape} has "
    "{size} places; with {count} devices shapes such as {fitting} fit"
)
MSG_NAMES: Final = (
    "Number of axis names ({count}) must match mesh dimensions ({rank}): {names} for shape {shape}"
)
MSG_SAME_NAME: Final = "Axis names must be unique, got {names}: rename one of the two {name!r}"
MSG_DEVICES_TWICE: Final = "Device IDs must be unique, got {ids}: device {twice} occurs twice"
MSG_DEVICES_BEYOND: Final = (
    "Device IDs must be less than mesh size ({size}), got {ids}: a mesh has all devices of the job, "
    "0 to {last}"
)
MSG_NOT_A_MESH: Final = (
    "{text!r} is not a mesh; expected what str(mesh) gives, such as \"{{'device_ids': [0, 1], "
    "'mesh_shape': (2,), 'axis_names': ('data',)}}\""
)
MSG_JAX_DEVICES: Final = (
    "get_jax_mesh() lays this mesh of {size} devices over jax's own devices, of which there are "
    "{count} in this process. For CPU devices call jax.config.update('jax_num_cpu_devices', {size}) "
    "before jax starts"
)


class Mesh:
    """A grid of devices.

    ``device_ids`` lists all devices of the job (``0 .. xr.global_runtime_device_count() - 1``) in
    the order in which they fill ``mesh_shape``, the last axis first; ``axis_names`` names the axes.
    Raises AssertionError when counts do not match or something comes twice.
    """

    def __init__(
        self,
        device_ids: np.ndarray | Sequence[int],
        mesh_shape: Sequence[int],
        axis_names: Sequence[str] | None = None,
    ) -> None:
        self.device_ids: np.ndarray = np.asarray(device_ids).reshape(-1)
        self.mesh_shape: tuple[int, ...] = tuple(int(n) for n in mesh_shape)
        self.axis_names: tuple[str, ...] | None = tuple(axis_names) if axis_names else None
        _check(self.device_ids, self.mesh_shape, self.axis_names)
        # as torch.compile takes them into a graph: numpy arrays would end it
        self.listed_ids: list[int] = self.device_ids.tolist()
        self.names_text: str = repr(self.axis_names)

    def size(self) -> int:
        """The number of devices."""
        return math.prod(self.mesh_shape)

    def shape(self) -> OrderedDict[str | int, int]:
        """The axes' sizes by name, or by number where they have no names."""
        names = self.axis_names or range(len(self.mesh_shape))
        return OrderedDict(zip(names, self.mesh_shape, strict=True))

    def get_logical_mesh(self) -> np.ndarray:
        """The device ids as an array of the mesh's shape."""
        return self.device_ids.reshape(self.mesh_shape)

    def get_axis_name_idx(self, name: str) -> int | None:
        """The number of the axis called ``name``, or None."""
        names = self.axis_names or ()
        return names.index(name) if name in names else None

    def get_op_sharding(self, partition_spec: Spec) -> Sharding:
        """The sharding of a value whose dimensions lie on the axes that ``partition_spec`` names.

        Raises PartitionSpecError for an axis that the mesh lacks or that comes twice.
        """
        counters.increment("CreateOpSharding")
        return sharding_of(partition_spec, self.get_logical_mesh(), self.axis_names)

    def get_jax_mesh(self) -> object:
        """The same grid as a ``jax.sharding.Mesh`` over jax's own devices; starts jax's backend.

        Raises RuntimeError when jax has fewer devices than the mesh.
        """
        return jax_mesh(self)

    @classmethod
    def from_str(cls, text: str) -> Mesh:
        """The mesh that ``str(mesh)`` wrote. Raises ValueError for another text."""
        try:
            fields = ast.literal_eval(text)
            return Mesh(fields["device_ids"], fields["mesh_shape"], fields["axis_names"])
        except (SyntaxError, TypeError, KeyError, ValueError):
            raise ValueError(MSG_NOT_A_MESH.format(text=text)) from None

    def __str__(self) -> str:
        fields = {
            "device_ids": self.device_ids.tolist(),
            "mesh_shape": self.mesh_shape,
            "axis_names": self.axis_names,
        }
        return str(fields)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mesh) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))


def _check(ids: np.ndarray, shape: tuple[int, ...], names: tuple[str, ...] | None) -> None:
    size = math.prod(shape)
    if ids.size != size:
        fitting = " and ".join(map(str, _grids(ids.size)))
        raise AssertionError(
            MSG_SIZE.format(count=ids.size, size=size, shape=shape, fitting=fitting)
        )
    listed = ids.tolist()
    twice = next((i for i in listed if listed.count(i) > 1), None)
    if twice is not None:
        raise AssertionError(MSG_DEVICES_TWICE.format(ids=listed, twice=twice))
    if any(not 0 <= i < size for i in listed):
        raise AssertionError(MSG_DEVICES_BEYOND.format(size=size, ids=listed, last=size - 1))
    if names is None:
        return
    if len(names) != len(shape):
        raise AssertionError(
            MSG_NAMES.format(count=len(names), rank=len(shape), names=names, shape=shape)
        )
    for name in names:
        if names.count(name) > 1:
            raise AssertionError(MSG_SAME_NAME.format(names=names, name=name))


def _grids(count: int) -> list[tuple[int, ...]]:
    """Mesh shapes that ``count`` devices fill: one axis, and two that are nearly equal."""
    small = max(n for n in range(1, math.isqrt(count) + 1) if count % n == 0)
    return [(count,), (count // small, small)] if small > 1 else [(count,)]


def jax_mesh(mesh: Mesh) -> object:
    """``mesh`` over jax's own devices."""
    import jax

    known = sorted(jax.devices(), key=lambda d: d.id)
    if len(known) < mesh.size():
        raise RuntimeError(MSG_JAX_DEVICES.format(size=mesh.size(), count=len(known)))
    chosen = np.array(known, object)[mesh.device_ids].reshape(mesh.mesh_shape)
    names = mesh.axis_names or tuple(map(str, range(chosen.ndim)))
    # jax 0.12.0 makes axes explicit by default; here, as in torch_xla, the compiler propagates shardings
    axis_types = (jax.sharding.AxisType.Auto,) * len(names)
    return jax.sharding.Mesh(chosen, names, axis_types=axis_types)


class HybridMesh(Mesh):
    """A mesh over devices in groups: fast links (ICI) within a group, slow ones (DCN) between them.

    Axis ``i`` has ``ici_mesh_shape[i]`` devices of a group for each of its ``dcn_mesh_shape[i]``
    groups; axes go from those that communicate least to those that communicate most. ``axis_names`` are their
    names, as in ``Mesh``. Without ``dcn_mesh_shape`` all devices are one group. A group is a
    TPU slice, or else a process; the devices of a single CPU process are cut into equal groups, to
    try out what runs elsewhere. Raises ValueError when the devices are not so many groups of
    so many devices.
    """

    def __init__(
        self,
        ici_mesh_shape: Sequence[int],
        dcn_mesh_shape: Sequence[int] | None = None,
        axis_names: Sequence[str] | None = None,
    ) -> None:
        self.ici_mesh_shape = tuple(ici_mesh_shape)
        self.dcn_mesh_shape = tuple(dcn_mesh_shape or [1] * len(self.ici_mesh_shape))
        ids = job.hybrid_grid(self.ici_mesh_shape, self.dcn_mesh_shape)
        super().__init__(ids, ids.shape, axis_names)


class _Global:
    mesh: Mesh | None = None


def set_global_mesh(mesh: Mesh) -> None:
    """Make ``mesh`` the one that functions use which are given none."""
    _Global.mesh = mesh


def get_global_mesh() -> Mesh | None:
    """The mesh given to ``set_global_mesh``, or None."""
    return _Global.mesh


def get_1d_mesh(axis_name: str | None = None) -> Mesh:
    """All devices of the job along one axis."""
    count = len(runtime.client().devices())
    return Mesh(np.arange(count), (count,), None if axis_name is None else (axis_name,))
