"""Exceptions at every bytecode that a function of ours passes, as Ctrl-C's may come, for tests of what they leave.

``passed_by`` counts the bytecodes (or lines) of a step, ``Interrupt`` raises at one of them. ``Again`` raises
a second time, while the first exception is on its way.
"""

from __future__ import annotations

import dis
import functools
import linecache
import pathlib
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from types import CodeType, FrameType
from typing import Final, Self, TypeAlias

Place = tuple[CodeType, int, int]
"""A function's code, the offset of a bytecode, and the number of the time that it is passed."""
Tracer: TypeAlias = "Callable[[FrameType, str, object], Tracer | None]"
"""A trace function, which returns the one for what follows in the frame."""

# By folder: the core, and packages that a test names.
SOURCES: Final = (str(pathlib.Path(__file__).parents[1]),)
# of sys.monitoring's numbers for tools one that debuggers, profilers and coverage leave free
_TOOL: Final = 4
_OWN: Final = str(pathlib.Path(__file__).parent)


def _is_watched(code: CodeType, sources: tuple[str, ...]) -> bool:
    name = code.co_filename
    # what is raised in a ``__del__`` does not leave it: Python prints it
    return name.startswith(sources) and not name.startswith(_OWN) and code.co_name != "__del__"


class Interrupted(BaseException):
    """Stands for KeyboardInterrupt, or whatever a signal's handler raises."""


class _Traced:
    """A block whose calls of Python functions ``_call`` hears of."""

    def __enter__(self) -> Self:
        self._former = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._former)

    def _call(self, frame: FrameType, event: str, argument: object) -> Tracer | None:
        """What traces the inside of the function that is called, if anything."""
        raise NotImplementedError


class Passed(_Traced):
    """Counts how often a step passes each bytecode (or line) of this package's functions."""

    def __init__(self, lines: bool = False, sources: tuple[str, ...] = SOURCES) -> None:
        self.lines = lines
        self.sources = sources
        self.counts: Counter[tuple[CodeType, int]] = Counter()

    def _call(self, frame: FrameType, _event: str, _argument: object) -> Tracer | None:
        if not _is_watched(frame.f_code, self.sources):
            return None
        frame.f_trace_opcodes = not self.lines
        return self._local

    def _local(self, frame: FrameType, event: str, _argument: object) -> Tracer:
        wanted = event == ("line" if self.lines else "opcode")
        if wanted and frame.f_lasti not in left_out(frame.f_code):
            self.counts[frame.f_code, frame.f_lasti] += 1
        return self._local

    def places(self, times: Sequence[str] = ("first", "last")) -> list[Place]:
        """Each place with the numbers of the first and the last time that it is passed."""
        places: list[Place] = []
        for place, count in self.counts.items():
            numbers = {"first": 1, "last": count}
            places += [(*place, n) for n in {numbers[time] for time in times}]
        return places


def passed_by(
    step: Callable[[], object], lines: bool = False, sources: tuple[str, ...] = SOURCES
) -> Passed:
    """What ``step`` passes, which is run twice.

    Python 3.12 and newer report a function's bytecodes from its second call under a trace function on.
    """
    passed = Passed(lines, sources)
    for _ in range(2):
        passed.counts.clear()
        with passed:
            step()
    return passed


class Interrupt(_Traced):
    """Raises where a place is passed for the nth time; only its function is traced."""

    def __init__(self, code: CodeType, position: int, time: int, lines: bool) -> None:
        self.code = code
        self.position = position
        self.left = time
        self.lines = lines
        self.raised = False

    def __enter__(self) -> Self:
        if self.lines or not hasattr(sys, "monitoring"):
            return super().__enter__()
        # a trace function would hear of the bytecodes from the function's second call on
        sys.monitoring.use_tool_id(_TOOL, __name__)
        events = sys.monitoring.events.INSTRUCTION
        sys.monitoring.register_callback(_TOOL, events, self._passed)
        sys.monitoring.set_local_events(_TOOL, self.code, events)
        return self

    def __exit__(self, *raised: object) -> None:
        if self.lines or not hasattr(sys, "monitoring"):
            super().__exit__(*raised)
        else:
            sys.monitoring.set_local_events(_TOOL, self.code, 0)
            sys.monitoring.free_tool_id(_TOOL)

    def _passed(self, _code: CodeType, position: int) -> None:
        if position == self.position:
            self.left -= 1
            if self.left == 0:
                self.raised = True
                line = next(
                    at for start, end, at in self.code.co_lines() if start <= position < end
                )
                raise Interrupted(f"{self.code.co_qualname}:{line}+{position}")

    def _call(self, frame: FrameType, _event: str, _argument: object) -> Tracer | None:
        if frame.f_code is not self.code:
            return None
        frame.f_trace_opcodes = not self.lines
        return self._local

    def _local(self, frame: FrameType, event: str, _argument: object) -> Tracer:
        if event == ("line" if self.lines else "opcode"):
            self._passed(frame.f_code, frame.f_lasti)
        return self._local


class Again:
    """Raises once more, at a bytecode that is passed for the first time by a block in this object's life.

    What is passed after ``first`` has raised is what repairs its consequences. Python stops tracing where a
    trace function raises; from the next call or return on, this one traces again.
    """

    def __init__(self, sources: tuple[str, ...] = SOURCES) -> None:
        self.sources = sources
        self.done: set[tuple[CodeType, int]] = set()
        self.where = ""
        self._first: Interrupt | None = None
        self._began = False

    def after(self, first: Interrupt) -> Again:
        """A block in which ``first`` raises."""
        self._first, self._began, self.where = first, False, ""
        return self

    def __enter__(self) -> Again:
        self._former = sys.getprofile()
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(self._former)
        sys.settrace(None)

    def _profile(self, frame: FrameType | None, _event: str, _argument: object) -> None:
        assert self._first is not None
        if not self._first.raised or self._began:
            return
        self._began = True
        sys.settrace(self._call)
        while frame is not None:
            if self._call(frame, "call", None) is not None:
                frame.f_trace = self._local
            frame = frame.f_back

    def _call(self, frame: FrameType, _event: str, _argument: object) -> Tracer | None:
        if not _is_watched(frame.f_code, self.sources):
            return None
        frame.f_trace_opcodes = True
        return self._local

    def _local(self, frame: FrameType, event: str, _argument: object) -> Tracer:
        place = frame.f_code, frame.f_lasti
        if event == "opcode" and not self.where and place not in self.done:
            self.done.add(place)
            if frame.f_lasti not in left_out(frame.f_code):
                self.where = f"{frame.f_code.co_qualname}:{frame.f_lineno}+{frame.f_lasti}"
                raise Interrupted(self.where)
        return self._local


@functools.cache
def left_out(code: CodeType) -> frozenset[int]:
    """The bytecodes between the end of a ``with`` block and the call that releases its lock.

    CPython delivers no signal there, and none at a NOP or where nothing but the return is left. CPython
    3.13.0 leaves ``with`` blocks without calling their ``__exit__`` if a trace function raises where a
    comprehension inside jumps back.
    """
    lines = linecache.getlines(code.co_filename)

    def is_left_out(one: dis.Instruction, following: dis.Instruction) -> bool:
        line = one.positions.lineno if one.positions is not None else None
        if line is None or one.opname == "NOP" or one.opname.startswith("RETURN_"):
            return True
        if one.opname == "JUMP_BACKWARD" and sys.version_info >= (3, 13):
            return True
        returns = one.opname == "LOAD_CONST" and following.opname.startswith("RETURN_")
        return returns or lines[line - 1].lstrip().startswith("with ")

    instructions = list(dis.get_instructions(code))
    pairs = zip(instructions, [*instructions[1:], instructions[-1]], strict=True)
    return frozenset(one.offset for one, following in pairs if is_left_out(one, following))
