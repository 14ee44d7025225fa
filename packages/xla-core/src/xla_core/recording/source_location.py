"""Where in the user's program an operation was recorded, for packages that explain programs.

By default this is not recorded. With a locator, each entry that is new in the trace's tree is located once,
when it is made, so a repeated step costs nothing. ``detail`` says how much of it is written into programs.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable
from types import FrameType
from typing import Final, NamedTuple

from xla_core.support import caches
from xla_core.support.own_packages import IMPORT_NAMES


class Frame(NamedTuple):
    """One line of a Python stack."""

    function: str
    filename: str
    line: int


class SourceLocation:
    """The place in the user's program that recorded an operation.

    ``frames`` are the innermost frames of the stack outside PyTorch and this project, innermost
    first; ``inner`` is the innermost frame of all, which may be in PyTorch. ``scope`` names the modules
    around it (``encoder/layers.0/fc1``). ``optimizer`` is True inside an optimizer's step, and
    ``backward`` for an operation of the backward pass, whose frames are those of the forward
    operation.
    """

    __slots__ = ("frames", "inner", "scope", "optimizer", "backward")

    def __init__(
        self,
        frames: tuple[Frame, ...],
        inner: Frame | None,
        scope: str,
        optimizer: bool,
        backward: bool,
    ) -> None:
        self.frames = frames
        self.inner = inner
        self.scope = scope
        self.optimizer = optimizer
        self.backward = backward


class Detail(enum.Enum):
    """The metadata about their origin that operations of programs carry: none, scopes, or lines as well."""

    NONE = 0
    SCOPES = 1
    LINES = 2


class _Settings:
    detail = Detail.NONE


locate: Callable[[], SourceLocation | None] | None = None
"""Called for every new entry of a trace; None (the default) locates none."""

_INSIDE: Final = frozenset({*IMPORT_NAMES, "torch", "contextlib"})


def set_locator(locator: Callable[[], SourceLocation | None] | None) -> None:
    """Have new entries located by ``locator``; None locates none."""
    global locate
    locate = locator


def set_detail(detail: Detail) -> None:
    """Set what programs that are lowered from now on carry as metadata."""
    _Settings.detail = detail


def detail() -> Detail:
    """What programs carry as metadata, see ``set_detail``."""
    return _Settings.detail


def is_users(frame: FrameType) -> bool:
    """Whether a frame is outside torch and this project."""
    module = frame.f_globals.get("__name__", "")
    # code that torch.fx and torch.compile generate belongs to no module
    return bool(module) and module.partition(".")[0] not in _INSIDE


def _outside(frame: FrameType | None) -> FrameType | None:
    """The innermost frame, starting from this one, that is neither torch's nor this project's."""
    while frame is not None and not is_users(frame):
        frame = frame.f_back
    return frame


def user_frame() -> Frame | None:
    """The innermost frame outside torch and this project."""
    frame = _outside(sys._getframe(1))
    return Frame(frame.f_code.co_name, frame.f_code.co_filename, frame.f_lineno) if frame else None


def user_line() -> tuple[str, int]:
    """File and line of the innermost frame outside torch and this project."""
    frame = user_frame()
    return (frame.filename, frame.line) if frame is not None else ("<unknown>", 0)


_places: caches.Bounded[tuple[str, int], tuple[str, int]] = caches.Bounded("lines of entries")
"""One object for each line, however many entries were recorded there."""


def recording_line() -> tuple[str, int] | None:
    """File and line of the innermost frame outside torch and this project; None if there is none.

    Called once per entry that is new in a trace's tree.
    """
    frame = _outside(sys._getframe(1))
    if frame is None:
        return None
    place = frame.f_code.co_filename, frame.f_lineno
    return _places.get(place) or _places.keep(place, place)
