"""The order in which meshes place the job's devices: groups with fast links inside, and the torus of TPU chips."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from xla_core.contract.device_protocol import DeviceDescription
from xla_core.extension_api import runtime

MSG_RANKS: Final = (
    "ici_mesh_shape {ici} and dcn_mesh_shape {dcn} need one number per mesh axis each; write 1 "
    "for an axis that does not cross groups"
)
MSG_COUNT: Final = (
    "a hybrid mesh of {groups} groups (dcn_mesh_shape {dcn}) of {each} devices (ici_mesh_shape "
    "{ici}) needs {needed} devices; this job has {count} in {found} group(s)"
)


def hybrid_grid(ici: tuple[int, ...], dcn: tuple[int, ...]) -> np.ndarray:
    """Device numbers in a grid of shape ``ici * dcn``, in which each group of devices is one contiguous block.

    Raises ValueError unless the job's devices are ``prod(dcn)`` groups of ``prod(ici)`` devices.
    """
    if len(ici) != len(dcn):
        raise ValueError(MSG_RANKS.format(ici=ici, dcn=dcn))
    known = list(runtime.client().devices())
    groups = _groups(known, math.prod(dcn))
    each = math.prod(ici)
    if len(groups) != math.prod(dcn) or any(len(g) != each for g in groups):
        text = MSG_COUNT.format(
            groups=math.prod(dcn), dcn=dcn, each=each, ici=ici, needed=each * math.prod(dcn),
            count=len(known), found=len(groups),
        )  # fmt: skip
        raise ValueError(text)
    grids = [torus_grid([known[i] for i in group], group, ici) for group in groups]
    # arrange the groups' blocks along the slow axes, and merge each slow axis with the fast one of its number
    blocks = np.array(grids).reshape(*dcn, *ici)
    rank = len(ici)
    order = [axis for i in range(rank) for axis in (i, rank + i)]
    return blocks.transpose(order).reshape([d * i for d, i in zip(dcn, ici, strict=True)])


def _groups(known: Sequence[DeviceDescription], count: int) -> list[list[int]]:
    """Device numbers by TPU slice, else by process; in one group if ``count`` is 1.

    The devices of a single CPU process are divided into ``count`` groups.
    """
    by_slice: dict[int, list[int]] = {}
    for number, device in enumerate(known):
        index = int(device.attributes.get("slice_index", device.process_index))
        by_slice.setdefault(index, []).append(number)
    groups = [by_slice[index] for index in sorted(by_slice)]
    whole_job = count == 1 or (len(groups) == 1 and known[0].platform == "cpu")
    if whole_job and len(known) % count == 0:
        size = len(known) // count
        flat = [number for group in groups for number in group]
        return [flat[i : i + size] for i in range(0, len(flat), size)]
    return groups


def torus_grid(
    devices: Sequence[DeviceDescription], numbers: Sequence[int], shape: tuple[int, ...]
) -> np.ndarray:
    """``numbers`` in a grid of ``shape`` whose axes follow the torus in which ``devices`` are linked.

    ``numbers`` are the numbers of ``devices``, in the same order. If the sizes allow it, each mesh axis consists of
    whole axes of the torus, so that neighbours in the mesh are linked. Otherwise, or if the devices have no
    coordinates, they fill the grid in order.
    """
    torus = _torus(devices, numbers)
    axes = None if torus is None else _assign(torus.shape, shape)
    if torus is None or axes is None:
        return np.array(numbers).reshape(shape)
    return torus.transpose([axis for group in axes for axis in group]).reshape(shape)


def _torus(devices: Sequence[DeviceDescription], numbers: Sequence[int]) -> np.ndarray | None:
    """The numbers in an array indexed by coordinates and core, or None if the coordinates do not fill a box."""
    places = []
    for device in devices:
        coords = device.attributes.get("coords")
        if coords is None:
            return None
        places.append((*coords, int(device.attributes.get("core_on_chip", 0))))
    start = np.min(places, axis=0)
    sizes = np.max(places, axis=0) - start + 1
    if math.prod(sizes.tolist()) != len(numbers):
        return None
    torus = np.full(tuple(sizes), -1)
    for place, number in zip(places, numbers, strict=True):
        torus[tuple(np.array(place) - start)] = number
    return None if (torus < 0).any() else torus


def _assign(torus: tuple[int, ...], shape: tuple[int, ...]) -> list[tuple[int, ...]] | None:
    """The torus axes that each mesh axis consists of, or None if the sizes do not fit.

    The largest mesh axis is assigned first, and each takes as few torus axes as possible.
    """
    free = [i for i, size in enumerate(torus) if size > 1]
    chosen: dict[int, tuple[int, ...]] = {}
    for axis in sorted(range(len(shape)), key=lambda i: -shape[i]):
        for count in range(len(free) + 1):
            fitting = [
                group
                for group in itertools.combinations(free, count)
                if math.prod(torus[i] for i in group) == shape[axis]
            ]
            if fitting:
                chosen[axis] = fitting[0]
                free = [i for i in free if i not in fitting[0]]
                break
        else:
            return None
    if free:
        return None
    # torus axes of size 1 do not change the grid: add them to any mesh axis, since transpose() needs all axes
    groups = [chosen[axis] for axis in range(len(shape))]
    groups[-1] += tuple(i for i, size in enumerate(torus) if size == 1)
    return groups
