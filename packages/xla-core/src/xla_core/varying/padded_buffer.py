"""A value of varying size in device memory: it occupies the first places of a buffer of its largest size.

Results of programs for a bound stay padded, and the next program with an equal bound takes them as they are. Code
that knows nothing of padding asks for the exact buffer (``exact_buffer``), which is cut on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from jax import Array

from xla_core.contract.device_protocol import Buffer, DeviceClient, Executable, Placement
from xla_core.jax_bridge.traced_values import JaxObject
from xla_core.support import counters

PADDED_ON_HOST: Final = "VaryingShapesPaddedOnHost"
"""Counts inputs that were fetched, padded on the host and sent back: not in a buffer of the bound's size."""
CUT_ON_HOST: Final = "VaryingShapesCutOnHost"
"""Counts padded values that were fetched, cut on the host and sent back, because the exact buffer was needed."""

# The ids of padded values, so that one can quickly see that there are none (the usual case). A set, because
# several threads create and drop them, and its additions and removals are atomic.
_living: Final[set[int]] = set()


class PaddedBuffer:
    """Stands for a buffer: a value of ``shape`` in the first places of ``array``, one of the client's buffers.

    ``array`` is None until the run that computes it has begun. The members that buffers also have serve code that
    only inspects them.
    """

    __slots__ = ("__weakref__", "_client", "_exact", "_placement", "array", "shape")

    def __init__(
        self,
        shape: tuple[int, ...],
        client: DeviceClient,
        placement: Placement,
        array: Array | None = None,
    ) -> None:
        _living.add(id(self))
        self.array: Array = array
        self.shape = shape
        self._client = client
        self._placement = placement
        self._exact: Buffer | None = None

    def __del__(self) -> None:
        _living.discard(id(self))

    @property
    def sharding(self) -> JaxObject:
        """Where the array lies."""
        return self.array.sharding

    def is_deleted(self) -> bool:
        """Whether a program has taken over the memory."""
        return self.array is None or bool(self.array.is_deleted())

    def cut(self, array: np.ndarray) -> np.ndarray:
        """The value's part of ``array``, which is the whole buffer on the host."""
        return np.ascontiguousarray(array[tuple(map(slice, self.shape))])

    def on_host(self) -> np.ndarray:
        """The value on the host; waits until it is computed."""
        return self.cut(np.asarray(self._client.get(self.array)))

    def exact(self, taken: bool = False) -> Buffer:
        """A buffer of the value without padding, made at the first call.

        If ``taken`` (default: False), the caller owns it, and the next call makes another one.
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


def exact_buffer(buffer: Array) -> Buffer:
    """``buffer``, without padding."""
    return buffer.exact() if type(buffer) is PaddedBuffer else buffer


def whole_buffer(buffer: Array) -> Array:
    """The client's buffer that contains the value, with its padding."""
    return buffer.array if type(buffer) is PaddedBuffer else buffer


def arguments_for(
    executable: Executable, arguments: list[Buffer], donated: Sequence[int]
) -> list[Buffer]:
    """``arguments`` as ``executable`` takes them: without padding, unless it accepts padded ones.

    ``donated`` are the positions of those whose memory it takes.
    """
    if getattr(executable, "takes_padded", False):
        return arguments
    return exact_arguments(arguments, donated)


def exact_arguments(
    arguments: Sequence[Array], donated: Sequence[int], shapes: Sequence[object] = ()
) -> list[Array]:
    """``arguments`` without padding, except those with a shape in ``shapes``, which may stay padded.

    The shape is None for an argument that must be cut. ``donated`` are the positions of those whose memory is
    taken.
    """
    kept = {slot for slot, shape in enumerate(shapes) if shape is not None}
    return [
        a.exact(taken=slot in donated) if type(a) is PaddedBuffer and slot not in kept else a
        for slot, a in enumerate(arguments)
    ]


def with_padding(array: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """``array``, padded with zeros to ``shape``."""
    whole = np.zeros(shape, array.dtype)
    whole[tuple(map(slice, array.shape))] = array
    return whole
