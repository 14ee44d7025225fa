"""What an ``xla`` tensor holds: a storage, and the chain of views through which it looks at it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

from xla_core.operators.tensor_meta import TensorMeta
from xla_core.support import indivisible

if TYPE_CHECKING:
    from xla_core.dispatch.meta_inference import Plan
    from xla_core.recording.trace import Trace


class Storage:
    """The current value of a tensor, shared by its views, ``detach()`` and ``.data``.

    A value is either pending or materialised. While ``epoch`` equals the trace's, ``vid`` is the
    number of the value in that trace. Otherwise ``buffer`` holds the value in device memory;
    None is a tensor that nobody has written to yet (``torch.empty``). ``version`` counts
    writes, so that views know whether what they read last is still true. ``annotation`` is not
    there unless an extension sets it: what it knows of this one tensor.
    """

    __slots__ = ("trace", "meta", "vid", "epoch", "buffer", "version", "annotation")
    annotation: Any

    def __init__(self, trace: Trace, meta: TensorMeta, vid: int, epoch: int) -> None:
        self.trace = trace
        self.meta = meta
        self.vid = vid
        self.epoch = epoch
        self.buffer: Any = None
        self.version = 0


MSG_LOST: Final = (
    "this tensor's value was never computed, because a step that it needs failed: {error}"
)


class Placeholder:
    """In place of the buffer of a tensor that has no value: it may be computed with, never read."""

    __slots__ = ()


MSG_PLACEHOLDER: Final = (
    "a placeholder tensor has no value: it stands for an argument while a computation is written "
    "down"
)
PLACEHOLDER: Final = Placeholder()


class NoValueError(RuntimeError):
    """A tensor has no value, and the message says why: it never had one here, or gave it away."""


class LostValue(int):
    """In place of the value number of a storage: the error that cost it its value."""

    error: Exception

    def __new__(cls, error: Exception) -> LostValue:
        """A value number that no value has."""
        made = super().__new__(cls, -1)
        made.error = error
        return made


# The epoch of a storage whose value is lost; no trace has it.
_NEVER: Final = -2


def losing(storage: Storage, error: Exception) -> Iterator[None]:
    """For ``indivisible.do``: what ``lose_value`` does."""
    values = (None, _NEVER, LostValue(error))
    return indivisible.storing(storage, ("buffer", "epoch", "vid"), values)


def lose_value(storage: Storage, error: Exception) -> None:
    """Let a storage have no value from now on; reading it raises ``error``, see ``check_lost``."""
    indivisible.do(losing(storage, error))


def check_lost(storage: Storage) -> None:
    """Raise RuntimeError when the value of a storage without a buffer is lost, not just unwritten."""
    if isinstance(storage.vid, LostValue):
        error = storage.vid.error
        if isinstance(error, NoValueError):
            raise NoValueError(str(error))
        raise RuntimeError(MSG_LOST.format(error=error)) from error


class View:
    """One view operation on a storage (``parent`` None) or on another view.

    ``tail`` holds the operation's arguments as they stand in a step key, ``args`` as the user
    gave them. ``vid`` is the value read last, valid while ``epoch`` and ``version`` both agree.
    """

    __slots__ = ("parent", "plan", "tail", "args", "meta", "vid", "epoch", "version")

    def __init__(
        self,
        parent: View | None,
        plan: Plan,
        tail: tuple[Any, ...],
        args: tuple[Any, ...],
        meta: TensorMeta,
        vid: int,
        epoch: int,
        version: int,
    ) -> None:
        self.parent = parent
        self.plan = plan
        self.tail = tail
        self.args = args
        self.meta = meta
        self.vid = vid
        self.epoch = epoch
        self.version = version


def chain(view: View | None) -> list[View]:
    """The views from the storage outwards, ending with ``view``."""
    views = []
    while view is not None:
        views.append(view)
        view = view.parent
    views.reverse()
    return views


def strides(whole: TensorMeta, view: View) -> tuple[tuple[int, ...], int]:
    """Strides and offset that ``view`` would have on a contiguous storage of ``whole``'s shape.

    Raises RuntimeError, PyTorch's own, where no strides describe it (a reshaped transpose).
    """
    seen = torch.empty(whole.shape, dtype=whole.dtype, device="meta")
    for one in chain(view):
        seen = one.plan.overload(seen, *one.args)
    return seen.stride(), seen.storage_offset()


class Aside(Protocol):
    """Who records the body of a computation, aside from the step."""

    def captures(self, s: Storage) -> None:
        """``s`` becomes an input of the body."""
        ...

    def made(self, s: Storage) -> None:
        """``s`` was made from a buffer while the body is recorded."""
        ...
