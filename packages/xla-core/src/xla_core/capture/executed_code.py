"""Which Python code a step runs: what other code names cannot have changed its recording."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident

from xla_core.recording.trace import Trace
from xla_core.support import indivisible
from xla_core.torch_bridge.operands import Operand


class ExecutedCode:
    """The code that the calls of one step have run so far.

    ``ran`` is all of the calling thread's, and what other threads called after their first operation on the device,
    as autograd's threads do in a backward. ``elsewhere`` is the code that was on their stacks at that operation:
    what it had called before is not known.
    """

    def __init__(self) -> None:
        self.ran: set[types.CodeType] = set()
        self.elsewhere: set[types.CodeType] = set()
        self._profiled: set[int] = set()
        self._is_beside_profiler = False
        self.is_noting = False

    @contextmanager
    def noting(self, trace: Trace) -> Iterator[None]:
        """A block whose code is noted by profile functions of its threads (``sys.setprofile``).

        Threads are met when they take their turn at ``trace``. Beside the user's own profiler, which is left
        alone, nothing is noted, and nothing excluded.
        """
        outer = sys.getprofile()
        if outer is not None and not isinstance(outer, _Profile):
            self.ran.clear()
            yield
            return
        self._profiled = {get_ident()}
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
        """Note what the thread that calls this runs, if it is none of those that are profiled."""
        if not self.is_noting or get_ident() in self._profiled:
            return
        self._profiled.add(get_ident())
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
            # the block has ended: only its own thread could end this one
            sys.setprofile(self._outer)
        if self._outer is not None:
            self._outer(frame, event, arg)
