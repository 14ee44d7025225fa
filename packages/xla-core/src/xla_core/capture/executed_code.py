"""Notes which Python code a step runs, as only the names in it can affect the recording, and whether it prints.

Of the user's code and of libraries such as accelerate the lines are noted, so that what a branch names that no call
has taken does not count: whatever decides about the branch is on a line that was run.

It also answers the libraries that ask whether a step is being captured.
"""

from __future__ import annotations

import builtins
import dis
import functools
import itertools
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from threading import get_ident
from typing import Final, TypeAlias

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from xla_core.capture import errors
from xla_core.capture.errors import refuse
from xla_core.recording import source_location
from xla_core.recording.trace import Trace
from xla_core.support import indivisible
from xla_core.torch_bridge.operands import Operand, Tree

_OF_GLOBALS: Final = frozenset({
    "LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "STORE_GLOBAL", "DELETE_GLOBAL",
})  # fmt: skip
"""Instructions of Python 3.11 to 3.13 that read or change a global."""
FOREIGN: Final = frozenset({
    "torch", "torch_xla", "xla_core", "xla_dist", "xla_spmd", "xla_debug", "numpy", "jax", "jaxlib",
}) | sys.stdlib_module_names  # fmt: skip
"""Packages whose code reads the user's state through arguments only, so that it is not searched."""
_LOOK_UPS: Final = frozenset({"getattr", "vars", "__dict__", "__getattribute__", "attrgetter"})
"""What looks attributes up whose names are not in the code."""
_OF_TEXTS: Final = frozenset({"format", "join", "startswith", "endswith"})
_PLACEHOLDERS: Final = re.compile(r"%\w|\{[^}]*\}")


Lines: TypeAlias = Mapping[types.CodeType, Set[int]]
"""The numbers of the lines that were run; of code that is not among the keys, all count."""


def root(module: str | None) -> str:
    """The outermost package of a module."""
    return (module or "").partition(".")[0]


def names_in(code: types.CodeType, lines: Lines) -> set[str]:
    """The names in a code object, with strings that it may pass to ``getattr``."""
    names: set[str] = set()
    for one in _instructions(code, lines):
        if one.opcode in dis.hasname:
            names.add(one.argval)
        elif one.opcode in dis.hasconst:
            constants = one.argval if isinstance(one.argval, tuple) else (one.argval,)
            names.update(constant for constant in constants if isinstance(constant, str))
    return names


def globals_in(code: types.CodeType, lines: Lines) -> set[str]:
    """The names in a code object that stand for globals, not for attributes; all if it calls ``globals``."""
    names = {one.argval for one in _instructions(code, lines) if one.opname in _OF_GLOBALS}
    return names_in(code, lines) if "globals" in names else names


def imports_in(code: types.CodeType, package: str, lines: Lines) -> set[str]:
    """The modules that code of a ``package`` may import where it runs: as they are named, and relative to it."""
    names = {one.argval for one in _instructions(code, lines) if one.opname == "IMPORT_NAME"}
    outer = [package.rsplit(".", level)[0] for level in range(package.count(".") + 1)]
    relative = {f"{one}.{name}".strip(".") for one in outer for name in names}
    return names | relative | set(map(root, names))


def looks_up(code: types.CodeType, lines: Lines) -> bool:
    """Whether code may look up attributes whose names it computes."""
    return any(map(_looks_up, _instructions(code, lines)))


def _looks_up(instruction: dis.Instruction) -> bool:
    return instruction.opname.startswith("LOAD") and instruction.argval in _LOOK_UPS


def parts_in(code: types.CodeType, lines: Lines) -> tuple[set[str], set[str]]:
    """Texts from which code may build names of attributes, or with which it compares them: beginnings and ends."""
    beginnings: set[str] = set()
    ends: set[str] = set()
    for _, group in itertools.groupby(_instructions(code, lines), _line):
        line = list(group)
        names = {one.argval for one in line if one.opcode in dis.hasname}
        is_either = not names.isdisjoint(_OF_TEXTS)
        if (
            is_either
            or any(map(_is_f_string, line))
            or (any(map(_joins, line)) and not any(map(_looks_up, line)))
        ):
            for one, after in zip(line, (*line[1:], line[0]), strict=True):
                if one.opcode in dis.hasconst and isinstance(one.argval, str):
                    parts = _PLACEHOLDERS.split(one.argval)
                    is_end = _is_f_string(after) or _joins(after)
                    ends.update(parts if is_end or is_either else ())
                    beginnings.update(parts if not is_end or is_either else ())
    return set(filter(_is_of_name, beginnings)), set(filter(_is_of_name, ends))


def _is_of_name(text: str) -> bool:
    return text.isidentifier() and bool(text.strip("_"))


def _joins(instruction: dis.Instruction) -> bool:
    return instruction.opname == "BINARY_OP" and instruction.argrepr in ("+", "%")


def _is_f_string(instruction: dis.Instruction) -> bool:
    return instruction.opname == "BUILD_STRING"


def _line(instruction: dis.Instruction) -> int | None:
    return None if instruction.positions is None else instruction.positions.lineno


def _instructions(code: types.CodeType, lines: Lines) -> Iterator[dis.Instruction]:
    """The instructions on lines that were run, and those of no line; then those of functions that they define."""
    ran = lines.get(code)
    inner = []
    for one in dis.get_instructions(code):
        line = _line(one)
        if ran is None or line is None or line in ran:
            yield one
            if isinstance(one.argval, types.CodeType):
                inner.append(one.argval)
    for defined in inner:
        yield from _instructions(defined, lines)


def function_of(member: object) -> types.FunctionType | None:
    """The function of a class's member: a method of any kind, or a property."""
    for kind, name in (
        ((staticmethod, classmethod), "__func__"),
        (property, "fget"),
        (functools.cached_property, "func"),
    ):
        if isinstance(member, kind):
            member = getattr(member, name)
    return member if isinstance(member, types.FunctionType) else None


class ExecutedCode:
    """The code objects that the calls of one step have run so far.

    ``ran`` are those that the calling thread ran, and those that other threads (such as autograd's) called after
    their first operation on the device. ``elsewhere`` are those on the other threads' stacks at that operation;
    what these had called before is not known. ``threads`` are the numbers of the threads of the present block.
    """

    def __init__(self) -> None:
        self.ran: set[types.CodeType] = set()
        self.elsewhere: set[types.CodeType] = set()
        self.threads: set[int] = set()
        self._lines: dict[types.CodeType, set[int]] = {}
        self._knows_lines = True
        self._is_disturbed = False
        self.is_noting = False

    @property
    def lines(self) -> Lines:
        """The lines that were run of code that is not foreign; empty if those of some code are not known."""
        return self._lines if self._knows_lines else {}

    def count_lines(self) -> int:
        """How many lines are known to have been run."""
        return sum(map(len, self.lines.values()))

    @contextmanager
    def noting(self, trace: Trace) -> Iterator[None]:
        """A block in which trace functions (``sys.settrace``) note the code that its threads run.

        A thread gets one when it takes its turn at ``trace``. Beside a debugger it is a profile function
        (``sys.setprofile``), which cannot note lines. Beside a debugger and a profiler nothing is noted, and all
        code counts as executed.
        """
        self.threads = {get_ident()}
        self._is_disturbed = False
        self.is_noting = True
        mine = tracing = sys.gettrace()
        latest: list[object] = []
        # what traces now, as a debugger may have begun in the block
        looking = map(latest.append, itertools.islice(iter(sys.gettrace, self), 1))
        ending = [looking, indivisible.storing(self, ("is_noting",), (False,))]
        if tracing is None or isinstance(tracing, _Tracer):
            ending.append(map(sys.settrace, (tracing,)))
        elif (profiling := sys.getprofile()) is None or isinstance(profiling, _Profile):
            ending.append(map(sys.setprofile, (profiling,)))
        try:
            with trace.lock:
                trace.turns.subscribe(self.note_thread)
            self._begin()
            mine = sys.gettrace()
            yield
        finally:
            indivisible.do(*ending)
            with trace.lock:
                trace.turns.unsubscribe(self.note_thread)
            if latest[0] is not mine:
                self._is_disturbed = True
                sys.settrace(latest[0])  # type: ignore[arg-type]
            if self._is_disturbed:
                self.ran.clear()

    def note_thread(self) -> None:
        """Begin to note the code of the calling thread, unless that has been done."""
        if not self.is_noting or get_ident() in self.threads:
            return
        self.threads.add(get_ident())
        frame: types.FrameType | None = sys._getframe()
        while frame is not None:
            self.elsewhere.add(frame.f_code)
            self._knows_lines &= _is_foreign(frame)
            frame = frame.f_back
        self._begin()

    def _begin(self) -> None:
        """Begin to note the calling thread's code, beside what traces or profiles it for others."""
        tracing, profiling = sys.gettrace(), sys.getprofile()
        if tracing is None or isinstance(tracing, _Tracer):
            sys.settrace(_Tracer(self, self._lines, tracing))
            return
        self._knows_lines = False
        if profiling is None or isinstance(profiling, _Profile):
            sys.setprofile(_Profile(self, profiling))
        else:
            self._is_disturbed = True


class _Profile:
    """A profile function that notes the code of calls, also for the block around it (``outer``)."""

    def __init__(self, code: ExecutedCode, outer: _Profile | None) -> None:
        self._code = code
        self._outer = outer

    def __call__(self, frame: types.FrameType, event: str, arg: Operand) -> None:
        if event != "call":
            return
        if self._code.is_noting:
            self._code.ran.add(frame.f_code)
        elif sys.getprofile() is self:
            # the block has ended, and only its own thread can remove this function
            sys.setprofile(self._outer)
        if self._outer is not None:
            self._outer(frame, event, arg)


class _Tracer:
    """A trace function that notes calls, and lines of code that is not foreign, also for the block around it."""

    def __init__(
        self, code: ExecutedCode, lines: dict[types.CodeType, set[int]], outer: _Tracer | None
    ) -> None:
        self._code = code
        self._lines = lines
        self._outer = outer

    def __call__(self, frame: types.FrameType, event: str, arg: Operand) -> _Local | None:
        outer = None if self._outer is None else self._outer(frame, event, arg)
        if not self._code.is_noting:
            if sys.gettrace() is self:
                sys.settrace(self._outer)  # as for a profile function
            return outer
        self._code.ran.add(frame.f_code)
        if _is_foreign(frame):
            return None
        add = self._lines.setdefault(frame.f_code, set()).add

        def line(frame: types.FrameType, event: str, arg: Operand) -> _Local:
            add(frame.f_lineno)
            if outer is not None:
                outer(frame, event, arg)
            return line

        return line


_Local: TypeAlias = Callable[[types.FrameType, str, Operand], "_Local"]
"""A trace function of one frame."""


def _is_foreign(frame: types.FrameType) -> bool:
    return root(frame.f_globals.get("__name__")) in FOREIGN


class Noticed:
    """The first line of the user's program that printed."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.place: tuple[str, int] | None = None

    def check(self) -> None:
        """Raise CaptureError if something was printed."""
        if self.place is not None:
            raise refuse(errors.MSG_PRINTS, self.place, name=self._name)


@contextmanager
def noticing_prints(name: str) -> Iterator[Noticed]:
    """A block in which calls of ``print`` by the calling thread are noticed: a replay prints nothing."""
    noticed = Noticed(name)
    thread, former = get_ident(), builtins.print

    def noticing(*args: Operand, **kwargs: Tree) -> None:
        if get_ident() == thread and noticed.place is None:
            noticed.place = source_location.recording_line()
        former(*args, **kwargs)

    builtins.print = noticing
    try:
        yield noticed
    finally:
        if builtins.print is noticing:
            builtins.print = former


@contextmanager
def stream_capturing(code: ExecutedCode) -> Iterator[None]:
    """A block in which ``torch.cuda.is_current_stream_capturing()`` is True for the threads that run the step.

    It is what libraries ask before they read a value to choose a way (transformers, about attention masks). It is
    asked again inside the steps of optimizers, which before PyTorch 2.13 want ``capturable=True`` if it is True.
    """
    former, steps = torch.cuda.is_current_stream_capturing, 0

    def capturing() -> bool:
        return (steps == 0 and get_ident() in code.threads) or former()

    def begin(*_: Operand) -> None:
        nonlocal steps
        steps += 1

    def end(*_: Operand) -> None:
        nonlocal steps
        steps -= 1

    hooks = register_optimizer_step_pre_hook(begin), register_optimizer_step_post_hook(end)
    torch.cuda.is_current_stream_capturing = capturing
    try:
        yield
    finally:
        # another thread's block that began in this one, and ends after it, puts this block's function back
        code.threads.clear()
        if torch.cuda.is_current_stream_capturing is capturing:
            torch.cuda.is_current_stream_capturing = former
        for hook in hooks:
            hook.remove()
