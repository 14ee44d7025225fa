"""Notes which Python code a step runs, as only the names in it can affect the recording, and whether it prints.

It also answers the libraries that ask whether a step is being captured.
"""

from __future__ import annotations

import builtins
import dis
import functools
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Final

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


def names_in(code: types.CodeType) -> set[str]:
    """The names in a code object, with strings that it may pass to ``getattr``."""
    names = {*code.co_names, *(one for one in code.co_consts if isinstance(one, str))}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= names_in(constant)
    return names


def globals_in(code: types.CodeType) -> set[str]:
    """The names in a code object that stand for globals, not for attributes; all if it calls ``globals``."""
    if "globals" in code.co_names:
        return names_in(code)
    names = {one.argval for one in dis.get_instructions(code) if one.opname in _OF_GLOBALS}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= globals_in(constant)
    return names


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
        self._is_beside_profiler = False
        self.is_noting = False

    @contextmanager
    def noting(self, trace: Trace) -> Iterator[None]:
        """A block in which profile functions (``sys.setprofile``) note the code that its threads run.

        A thread gets one when it takes its turn at ``trace``. If the user runs a profiler, it stays, nothing is
        noted, and all code counts as executed.
        """
        outer = sys.getprofile()
        self.threads = {get_ident()}
        if outer is not None and not isinstance(outer, _Profile):
            self.ran.clear()
            yield
            return
        self._is_beside_profiler = False
        self.is_noting = True
        ending = map(sys.setprofile, (outer,)), indivisible.storing(self, ("is_noting",), (False,))
        try:
            with trace.lock:
                trace.turns.subscribe(self.note_thread)
            sys.setprofile(_Profile(self, outer))
            yield
        finally:
            indivisible.do(*ending)
            with trace.lock:
                trace.turns.unsubscribe(self.note_thread)
            if self._is_beside_profiler:
                self.ran.clear()

    def note_thread(self) -> None:
        """Begin to note the code of the calling thread, unless that has been done."""
        if not self.is_noting or get_ident() in self.threads:
            return
        self.threads.add(get_ident())
        frame: types.FrameType | None = sys._getframe()
        while frame is not None:
            self.elsewhere.add(frame.f_code)
            frame = frame.f_back
        outer = sys.getprofile()
        if outer is not None and not isinstance(outer, _Profile):
            self._is_beside_profiler = True
        else:
            sys.setprofile(_Profile(self, outer))


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
