"""Which Python code a step runs: what other code names cannot have changed its recording."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock, get_ident
from typing import Any, Final

from xla_core.recording.xla_tensor import XLATensor
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
        self.is_noting = False

    @contextmanager
    def noting(self) -> Iterator[None]:
        """A block whose code is noted by profile functions of its threads (``sys.setprofile``).

        Beside the user's own profiler, which is left alone, nothing is noted, and nothing excluded.
        """
        outer = sys.getprofile()
        if outer is not None and not isinstance(outer, _Profile):
            self.ran.clear()
            yield
            return
        self._profiled = {get_ident()}
        self.is_noting = True
        ending = map(sys.setprofile, (outer,)), indivisible.storing(self, ("is_noting",), (False,))
        try:
            _noting.add(self)
            sys.setprofile(_Profile(self, outer))
            yield
        finally:
            indivisible.do(*ending)
            _noting.end()

    def profile(self, frame: types.FrameType) -> bool:
        """Note a call, and say whether to go on."""
        if self.is_noting:
            self.ran.add(frame.f_code)
        return self.is_noting

    def note_thread(self) -> None:
        """Note what the thread that calls this runs, if it is none of those that are profiled."""
        if get_ident() in self._profiled:
            return
        frame: types.FrameType | None = sys._getframe()
        while frame is not None:
            self.elsewhere.add(frame.f_code)
            frame = frame.f_back
        if sys.getprofile() is None:
            self._profiled.add(get_ident())
            sys.setprofile(_Profile(self, None))


class _Profile:
    """A profile function that notes the code of calls, also for the block around it (``outer``)."""

    def __init__(self, code: ExecutedCode, outer: _Profile | None) -> None:
        self._code = code
        self._outer = outer

    def __call__(self, frame: types.FrameType, event: str, arg: Operand) -> None:
        if event != "call":
            return
        if not self._code.profile(frame) and sys.getprofile() is self:
            sys.setprofile(None)  # the block has ended: only its own thread could end this one
        if self._outer is not None:
            self._outer(frame, event, arg)


class _Noting:
    """Whose threads are noted: each operation on the device tells them of its thread meanwhile."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._codes: tuple[ExecutedCode, ...] = ()
        self._dispatch: Any = None

    def add(self, code: ExecutedCode) -> None:
        """Tell ``code`` of threads."""
        with self._lock:
            if not self._codes:
                self._dispatch = XLATensor.__torch_dispatch__
                XLATensor.__torch_dispatch__ = staticmethod(self._noting_dispatch)  # type: ignore[method-assign,assignment]
            self._codes = (*self._codes, code)

    def end(self) -> None:
        """End this for those whose block has ended."""
        with self._lock:
            before = self._codes
            self._codes = tuple(one for one in before if one.is_noting)
            if before and not self._codes:
                XLATensor.__torch_dispatch__ = staticmethod(self._dispatch)  # type: ignore[method-assign]

    def _noting_dispatch(
        self,
        func: object,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> Any:
        for code in self._codes:
            code.note_thread()
        return self._dispatch(func, types, args, kwargs)


_noting: Final = _Noting()
