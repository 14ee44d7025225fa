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
    "get_jax_mesh() needs {size} jax devices for this mesh, and jax has {count} in this process. "
    "For CPU devices call jax.config.update('jax_num_cpu_devices', {size}) before jax starts"
)


class Mesh:
    """A grid of devices.

    ``device_ids`` lists all devices of the job (``0 .. xr.global_runtime_device_count() - 1``) in
    the order in which they fill ``mesh_shape``: the last axis varies fastest. ``axis_names`` has a name for each
    axis; without it (default: None), axes are referred to by number. Raises AssertionError if the number of devices
    or names does not fit ``mesh_shape``, or if a device or name occurs twice.
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
        # constants that torch.compile can put into a graph: numpy arrays would break the graph
        self.listed_ids: list[int] = self.device_ids.tolist()
        self.names_text: str = repr(self.axis_names)

    def size(self) -> int:
        """The number of devices."""
        return math.prod(self.mesh_shape)

    def shape(self) -> OrderedDict[str | int, int]:
        """The size of each axis by its name, or by its number if the axes have no names."""
        names = self.axis_names or range(len(self.mesh_shape))
        return OrderedDict(zip(names, self.mesh_shape, strict=True))

    def get_logical_mesh(self) -> np.ndarray:
        """The device ids as an array of shape ``mesh_shape``."""
        return self.device_ids.reshape(self.mesh_shape)

    def get_axis_name_idx(self, name: str) -> int | None:
        """The number of the axis called ``name``, or None if there is no such axis."""
        names = self.axis_names or ()
        return names.index(name) if name in names else None

    def get_op_sharding(self, partition_spec: Spec) -> Sharding:
        """The sharding of a value whose dimensions are split over the axes that ``partition_spec`` names.

        Raises PartitionSpecError for an axis that the mesh does not have, or that occurs twice.
        """
        counters.increment("CreateOpSharding")
        return sharding_of(partition_spec, self.get_logical_mesh(), self.axis_names)

    def get_jax_mesh(self) -> object:
        """The ``jax.sharding.Mesh`` of the same shape over jax's own devices. Starts jax's backend.

        Raises RuntimeError if jax has fewer devices than the mesh.
        """
        return jax_mesh(self)

    @classmethod
    def from_str(cls, text: str) -> Mesh:
        """The mesh for which ``str(mesh)`` is ``text``. Raises ValueError if there is none."""
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
    """Mesh shapes that ``count`` devices fill: one axis, and two axes that are as equal as possible."""
    small = max((n for n in range(1, math.isqrt(count) + 1) if count % n == 0), default=1)
    return [(count,), (count // small, small)] if small > 1 else [(count,)]


def jax_mesh(mesh: Mesh) -> object:
    """``mesh`` as a ``jax.sharding.Mesh``; see ``Mesh.get_jax_mesh``."""
    import jax

    known = sorted(jax.devices(), key=lambda d: d.id)
    if len(known) < mesh.size():
        raise RuntimeError(MSG_JAX_DEVICES.format(size=mesh.size(), count=len(known)))
    chosen = np.array(known, object)[mesh.device_ids].reshape(mesh.mesh_shape)
    names = mesh.axis_names or tuple(map(str, range(chosen.ndim)))
    # jax 0.12.0 makes axes explicit by default; as in torch_xla, the compiler propagates shardings here
    axis_types = (jax.sharding.AxisType.Auto,) * len(names)
    return jax.sharding.Mesh(chosen, names, axis_types=axis_types)


class HybridMesh(Mesh):
    """A mesh over groups of devices, with fast links (ICI) within a group and slow ones (DCN) between groups.

    Axis ``i`` goes through ``dcn_mesh_shape[i]`` groups, and through ``ici_mesh_shape[i]`` devices of each. List
    the axes in order of communication, from the least to the most. ``axis_names`` are as in ``Mesh``. Without
    ``dcn_mesh_shape`` (default: None), all devices are one group.

    A group is a TPU slice, or else the devices of a process. The devices of a single CPU process are divided into
    equal groups, so that programs for several slices can be tried there. Raises ValueError unless the job's
    devices are ``prod(dcn_mesh_shape)`` groups of ``prod(ici_mesh_shape)`` devices.
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
    """Make ``mesh`` the default of functions that take a mesh."""
    _Global.mesh = mesh


def get_global_mesh() -> Mesh | None:
    """The mesh that was passed to ``set_global_mesh``, or None."""
    return _Global.mesh


def get_1d_mesh(axis_name: str | None = None) -> Mesh:
    """A mesh of all devices of the job along one axis, called ``axis_name`` (default: without a name)."""
    count = len(runtime.client().devices())
    return Mesh(np.arange(count), (count,), None if axis_name is None else (axis_name,))
