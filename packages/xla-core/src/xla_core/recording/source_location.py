"""Where in the user's program an operation was recorded, for packages that explain programs.

Nobody asks by default. With a locator, each entry that is new to the trace's tree is located once,
when it is made: a step that repeats itself never is. ``detail`` says what of it programs carry.
"""

from __future__ import annotations

import enum
import posixpath
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from xla_core.recording.trace import Entry


class Frame(NamedTuple):
    """One line of a Python stack."""

    function: str
    filename: str
    line: int


class Where:
    """The place that recorded an operation.

    ``frames`` are the innermost frames of the stack outside PyTorch and this project, innermost
    first; ``inner`` is the innermost one of all, in PyTorch perhaps. ``scope`` names the modules
    around it (``encoder/layers.0/fc1``), ``optimizer`` is set inside an optimizer's step, and
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
    """What programs say of where their operations come from: nothing, scopes, or lines as well."""

    NONE = 0
    SCOPES = 1
    LINES = 2


class _Settings:
    detail = Detail.NONE


locate: Callable[[], Where | None] | None = None
"""Called for every new entry of a trace; None (the default): nobody asks."""

MARK: Final = "@"
_MARKED: Final = re.compile(MARK + r"(\d+)(?=/|$)")
_INSIDE: Final = frozenset({"xla_core", "xla_dist", "torch", "torch_xla", "contextlib"})
OPTIMIZER_SCOPE: Final = "optimizer"
"""Stands for the modules of what an optimizer's step records, outside of any."""
_INDICES: Final = re.compile(r"\.\d+(?=[./]|$)")
_NOT_IN_NAMES: Final = re.compile(r"\W+", re.ASCII)


def set_locator(locator: Callable[[], Where | None] | None) -> None:
    """Have new entries located by ``locator``, or by nobody."""
    global locate
    locate = locator


def set_detail(detail: Detail) -> None:
    """Say what the programs that are lowered from now on carry as metadata."""
    _Settings.detail = detail


def detail() -> Detail:
    """What programs carry as metadata."""
    return _Settings.detail


def scope_name(entry: Entry) -> str:
    """The name that an entry's operations get in the lowered program."""
    plan = entry.plan
    assert plan is not None
    found: Where | None = entry.where
    name = plan.name
    if _Settings.detail is Detail.LINES:
        name = f"{name}{MARK}{entry.depth}"
    return f"{found.scope}/{name}" if found is not None and found.scope else name


def common_scope(entries: Iterable[Entry]) -> str:
    """The modules that operations have in common, as a name: ``Net_blocks``; empty where nobody looked.

    Indices of modules in a list are left out: operations that repeat are those of one of many.
    """
    places = (entry.where for entry in entries if entry.where is not None)
    scopes = [p.scope or (OPTIMIZER_SCOPE if p.optimizer else "") for p in places]
    if not scopes:
        return ""
    common = posixpath.commonpath([_INDICES.sub("", scope).strip("/") for scope in scopes])
    return _NOT_IN_NAMES.sub("_", common)


def relocation(
    entries: Sequence[Entry],
) -> Callable[[str], tuple[str, str, int] | None] | None:
    """What turns the name of a lowered operation into name, file and line; None without detail.

    The function gives None for operations whose line is not known. An operation in the body of a
    computation has the line of the computation, whose mark comes first.
    """
    if _Settings.detail is Detail.NONE:
        return None

    def place(name: str) -> tuple[str, str, int] | None:
        first = _MARKED.search(name)
        if first is None:
            return None
        found: Where | None = entries[int(first[1]) - 1].where
        clean = _MARKED.sub("", name)
        if found is None or not found.frames:
            return clean, "", 0
        return clean, found.frames[0].filename, found.frames[0].line

    return place


def user_frame() -> Frame | None:
    """The innermost frame outside torch and this project."""
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        module = frame.f_globals.get("__name__", "")
        if module and module.partition(".")[0] not in _INSIDE:
            return Frame(frame.f_code.co_name, frame.f_code.co_filename, line)
    return None


def user_line() -> tuple[str, int]:
    """File and line of the innermost frame outside torch and this project."""
    found = user_frame()
    return (found.filename, found.line) if found is not None else ("<unknown>", 0)


def locate_here(entry: Entry) -> None:
    """Remember the user's line that records ``entry``, if nobody has located it."""
    if entry.where is None:
        found = user_frame()
        entry.where = Where((found,) if found is not None else (), found, "", False, False)


_places: dict[tuple[str, int], tuple[str, int]] = {}
"""One object for each line, however many entries were recorded there."""


def recording_line() -> tuple[str, int] | None:
    """File and line of the innermost frame outside torch and this project; None if there is none.

    Called once per entry that is new to a trace's tree.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        # what torch.fx and torch.compile generate is of no module
        if module and module.partition(".")[0] not in _INSIDE:
            place = frame.f_code.co_filename, frame.f_lineno
            return _places.setdefault(place, place)
        frame = frame.f_back
    return None
