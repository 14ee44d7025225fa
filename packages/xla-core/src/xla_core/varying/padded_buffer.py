"""A value of varying size in device memory: the first places of a buffer as large as it may become.

Results of programs for a bound stay as they are computed, and the next such program whose bound is equal takes
them so. Whoever knows nothing of padding asks for the exact buffer (``exact_buffer``), and gets it cut on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from xla_core.contract.device_protocol import DeviceClient, Placement
from xla_core.support import counters

PADDED_ON_HOST: Final = "VaryingShapesPaddedOnHost"
"""Counts inputs that were fetched, padded on the host and sent again: they lay in no buffer of the bound's size."""
CUT_ON_HOST: Final = "VaryingShapesCutOnHost"
"""Counts padded values that were fetched, cut on the host and sent again, for who wants the exact buffer."""

# The ids of padded values, which tell quickly that there are none (the usual case). A set, because several
# threads make and drop them: adding to one and removing from it are indivisible.
_living: Final[set[int]] = set()


class PaddedBuffer:
    """In place of a buffer: a value of ``shape`` in the first places of ``array``, a buffer of the client's.

    ``array`` is None until the run has begun that computes it. What it has in common with a buffer serves those
    who only look at it.
    """

    __slots__ = ("__weakref__", "_client", "_exact", "_placement", "array", "shape")

    def __init__(
        self, shape: tuple[int, ...], client: DeviceClient, placement: Placement, array: Any = None
    ) -> None:
        _living.add(id(self))
        self.array = array
        self.shape = shape
        self._client = client
        self._placement = placement
        self._exact: object = None

    def __del__(self) -> None:
        _living.discard(id(self))

    @property
    def sharding(self) -> Any:
        """Where the array lies."""
        return self.array.sharding

    def is_deleted(self) -> bool:
        """Whether a program has taken the memory."""
        return self.array is None or bool(self.array.is_deleted())

    def cut(self, array: np.ndarray) -> np.ndarray:
        """The part of ``array``, the whole on the host, that is the value."""
        return np.ascontiguousarray(array[tuple(map(slice, self.shape))])

    def on_host(self) -> np.ndarray:
        """The value on the host, which waits for it."""
        return self.cut(np.asarray(self._client.get(self.array)))

    def exact(self, taken: bool = False) -> object:
        """A buffer with the value and nothing else, made at the first call.

        With ``taken`` (default: False) it is the caller's, and another one is made at the next call.
        """
        exact = self._exact
        if exact is None:
            exact = self._client.put(self.on_host(), self._placement)
            counters.increment(CUT_ON_HOST)
        self._exact = None if taken else exact
        return exact

    def copied(self) -> PaddedBuffer:
        """The same value in another buffer of the same size."""
        array = self._client.copy(self.array, self._placement)
        return PaddedBuffer(self.shape, self._client, self._placement, array)


def any_padded() -> bool:
    """Whether there are padded values."""
    return bool(_living)


def exact_buffer(buffer: object) -> Any:
    """``buffer``, cut where it is padded."""
    return buffer.exact() if type(buffer) is PaddedBuffer else buffer


def whole_buffer(buffer: Any) -> Any:
    """The client's buffer that a value is in, with its padding."""
    return buffer.array if type(buffer) is PaddedBuffer else buffer


def arguments_for(executable: Any, arguments: list[Any], donated: Sequence[int]) -> list[Any]:
    """``arguments`` as ``executable`` takes them: cut where they are padded, unless it knows of padding.

    ``donated`` are the positions of those whose memory it takes.
    """
    if getattr(executable, "takes_padded", False):
        return arguments
    return exact_arguments(arguments, donated)


def exact_arguments(
    arguments: Sequence[Any], donated: Sequence[int], shapes: Sequence[object] = ()
) -> list[Any]:
    """``arguments``, cut where they are padded, but for those that have one of the ``shapes``, which may stay so.

    A shape is None for an argument that is to be cut; ``donated`` are the positions of those whose memory is taken.
    """
    kept = {slot for slot, shape in enumerate(shapes) if shape is not None}
    return [
        a.exact(taken=slot in donated) if type(a) is PaddedBuffer and slot not in kept else a
        for slot, a in enumerate(arguments)
    ]


def with_padding(array: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """An array in the first places of one of zeros."""
    whole = np.zeros(shape, array.dtype)
    whole[tuple(map(slice, array.shape))] = array
    return whole
