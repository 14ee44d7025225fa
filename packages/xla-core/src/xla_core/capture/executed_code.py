"""Which Python code a step runs: what other code names cannot have changed its recording."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident

from xla_core.torch_bridge.operands import Operand


class ExecutedCode:
    """The code that the calls of one step have run so far.

    ``ran`` is all of the calling thread's. ``elsewhere`` may have run in another thread, as autograd's backward
    does for a device: the frames seen there, and functions that are defined inside code that ran. What they call
    is not known.
    """

    def __init__(self) -> None:
        self.ran: set[types.CodeType] = set()
        self.elsewhere: set[types.CodeType] = set()
        self._thread = get_ident()

    @contextmanager
    def noting(self) -> Iterator[None]:
        """A block whose code is noted by a profile function of the calling thread.

        Beside the user's own profiler, which is left alone, nothing is noted, and nothing excluded.
        """
        if sys.getprofile() is not None:
            self.ran.clear()
            yield
            return
        self._thread = get_ident()
        note = self.ran.add

        def profile(frame: types.FrameType, event: str, arg: Operand) -> None:
            if event == "call":
                note(frame.f_code)

        sys.setprofile(profile)
        try:
            yield
        finally:
            if sys.getprofile() is profile:
                sys.setprofile(None)
            for code in tuple(self.ran):
                self._note_inner(code)

    def note_thread(self) -> None:
        """Note the frames of the thread that calls this, unless it is the one whose block it is."""
        if get_ident() == self._thread:
            return
        frame: types.FrameType | None = sys._getframe()
        while frame is not None:
            self.elsewhere.add(frame.f_code)
            frame = frame.f_back

    def _note_inner(self, code: types.CodeType) -> None:
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType) and constant not in self.ran:
                self.elsewhere.add(constant)
                self._note_inner(constant)
