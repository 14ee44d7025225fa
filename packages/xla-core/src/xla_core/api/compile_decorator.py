"""``torch_xla.compile``: runs a function, or a block, as one program."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable
from threading import get_ident
from typing import Final, NamedTuple, TypeVar

from xla_core.api import hlo_text_names, xla_model
from xla_core.contract.foreign_values import AnyFunction, ForeignObject
from xla_core.execution import eager_mode, runtime
from xla_core.lowering import compile_settings
from xla_core.recording.entry import Entry, operations_of
from xla_core.recording.step_record import RegionState
from xla_core.recording.trace import Trace
from xla_core.support import counters, indivisible
from xla_core.torch_bridge.operands import Tree

MSG_UNEXPECTED: Final = (
    "Unexpected execution happens inside the compiled function, exiting. With full_graph=True nothing "
    "inside may read a value (print, .item(), .cpu(), a Python condition on a tensor) or sync"
)
MSG_GRAPHS: Final = (
    "Maximum number of different graphs allowed per function exceeded: {limit}\n"
    "Got: {got}\nExpected: {expected}\n"
)
MSG_NOT_CALLABLE: Final = "torch_xla.compile takes a function or a module, got {kind}"
MSG_LIMIT: Final = "max_different_graphs is {got!r}; give a whole number of at least 1"
F = TypeVar("F", bound=Callable[..., object])
END_OF_GRAPH: Final = "[] the end of the function"


class Inside(NamedTuple):
    """What a trace knows of the region that it records; not the region itself, which ends when it is dropped."""

    full_graph: bool


class _Region(contextlib.ContextDecorator):
    """One use of ``compile``, as a context manager or around each call of a function."""

    _former: RegionState | None = None

    def __init__(
        self,
        full_graph: bool,
        name: str | None,
        limit: int | None,
        known: list[Entry],
        options: dict[str, object] | None,
    ) -> None:
        self.full_graph = full_graph
        self.name = name
        self.limit = limit
        self.known = known
        self.options = options
        self._undo = contextlib.ExitStack()
        self._thread = 0

    def _recreate_cm(self) -> _Region:
        return _Region(self.full_graph, self.name, self.limit, self.known, self.options)

    def __call__(self, func: F) -> F:
        """Wrap ``func`` in a region of its own, which knows the graphs that ``func`` has recorded before."""
        name = self.name or getattr(func, "__name__", None) or type(func).__name__
        region = _Region(self.full_graph, name, self.limit, _graphs_of(func), self.options)
        decorate: AnyFunction = contextlib.ContextDecorator.__call__
        compiled: F = decorate(region, _as_function(func))
        return compiled

    def __enter__(self) -> None:
        self._leave()  # in case an exception interrupted the end of the last use
        trace = self.trace = runtime.trace_of(None)
        self._thread = get_ident()
        try:
            with trace.lock:
                former = trace.region_state()
                indivisible.do(indivisible.storing(self, ("_former",), (former,)))
                self.outermost = trace.region is None
                if self.outermost:
                    self._clear_pending(trace)
                name = self.name or former.graph_name
                forbidden = MSG_UNEXPECTED if self.full_graph else former.forbidden
                inside = RegionState(Inside(self.full_graph), name, forbidden)
                indivisible.do(trace.entering(inside))
            self._undo.enter_context(eager_mode.mode(False))
            if self.options is not None:
                self._undo.enter_context(compile_settings.compile_options(self.options))
        except BaseException:
            self._leave()
            raise

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            try:
                trace = self.trace
                with trace.lock:
                    if self.limit is not None and error is None:
                        check_graphs(trace, self.known, self.limit)
                    if self.outermost:
                        trace.forbid(None)
                if self.outermost:
                    xla_model.sync()
            finally:
                self._leave()
        finally:
            self._leave()  # again, in case an exception interrupted the line above

    def __del__(self) -> None:
        # An exception such as Ctrl-C can occur before the first line of ``__exit__``.
        if self._former is not None and self._thread == get_ident():
            self._leave()

    def _leave(self) -> None:
        """Restore the state from before the block, unless that has been done."""
        if self._former is not None:
            with self.trace.lock:
                restored = self.trace.entering(self._former)
                indivisible.do(restored, indivisible.storing(self, ("_former",), (None,)))
        self._undo.close()

    def _clear_pending(self, trace: Trace) -> None:
        """Run the operations recorded before the block as a step of their own."""
        former = trace.graph_name
        try:
            trace.name_graph(f"{self.name}_clear_pending" if self.name else former)
            runtime.sync(trace.device)
        finally:
            trace.name_graph(former)
        counters.increment("MarkStep")


def check_graphs(trace: Trace, graphs: list[Entry], limit: int) -> None:
    """Add the pending graph to ``graphs`` if it is a new one.

    Raises RuntimeError if there are ``limit`` graphs already; the graph stays pending then.
    """
    last = trace.cur
    if any(last is one or _keys(last) == _keys(one) for one in graphs):
        return
    if len(graphs) >= limit:
        got, expected = _difference(last, graphs)
        raise RuntimeError(MSG_GRAPHS.format(limit=limit, got=got, expected=expected))
    graphs.append(last)


# For each owner (a function, a module, an object) and its method (or None), the last entries of the graphs.
_known: weakref.WeakKeyDictionary[object, dict[object, list[Entry]]] = weakref.WeakKeyDictionary()


def _graphs_of(func: object) -> list[Entry]:
    """The list of graphs that ``func`` has recorded in any region with a limit; one list for each function."""
    owner, method = getattr(func, "__self__", func), getattr(func, "__func__", None)
    try:
        return _known.setdefault(owner, {}).setdefault(method, [])
    except TypeError:  # no hash or no weak references: each wrapper counts separately
        return []


def _keys(last: Entry) -> list[object]:
    return [entry.key for entry in last.path()]


def _difference(last: Entry, graphs: list[Entry]) -> tuple[str, str]:
    """Texts of the first operation that differs from the most similar known graph, and of the one there."""
    path = last.path()
    nearest: list[Entry] = []
    shared = -1
    for other in (entry.path() for entry in graphs):
        common = _common(path, other)
        if common > shared:
            nearest, shared = other, common
    return _operation_from(path, shared), _operation_from(nearest, shared)


def _operation_from(path: list[Entry], position: int) -> str:
    """A text of the first operation at ``position`` or after it; inputs are skipped."""
    following = operations_of(path[position:])
    return hlo_text_names.node_text(following[0]) if following else END_OF_GRAPH


def _common(path: list[Entry], other: list[Entry]) -> int:
    for count, (a, b) in enumerate(zip(path, other, strict=False)):
        if a.key != b.key:
            return count
    return min(len(path), len(other))


def compile(
    f: Callable[..., object] | None = None,
    full_graph: bool = False,
    name: str | None = None,
    max_different_graphs: int | None = None,
    custom_compile_options: dict[str, object] | None = None,
) -> ForeignObject:
    """Run a function (or a block) as one program; operations that are pending before it run separately.

    Three uses: ``step = torch_xla.compile(step)``, the decorator ``@torch_xla.compile`` or
    ``@torch_xla.compile(full_graph=True)``, and ``with torch_xla.compile():``. Eager mode is off inside.

    ``full_graph`` (default: False): raise RuntimeError if something inside needs a value before the end.
    ``name`` (default: the function's) is the program's name in debug output.
    ``max_different_graphs`` (default: no limit): raise RuntimeError, naming the first operation that differs, if
    the function records more different graphs than that; the new graph does not run. Graphs that the same function
    recorded in another wrapper count, too; those of a block count for the block.
    ``custom_compile_options``: compiler options, by the compiler's own names, for the programs of this function.
    Raises ValueError for a limit below 1, TypeError if ``f`` is not callable.
    """
    if f is not None and not callable(f):
        raise TypeError(MSG_NOT_CALLABLE.format(kind=type(f).__name__))
    if max_different_graphs is not None and (
        not isinstance(max_different_graphs, int) or max_different_graphs < 1
    ):
        raise ValueError(MSG_LIMIT.format(got=max_different_graphs))
    region = _Region(full_graph, name, max_different_graphs, [], custom_compile_options)
    return region if f is None else region(f)


def step() -> ForeignObject:
    """A block that runs as one program: ``with torch_xla.step():``, also as a decorator."""
    return compile()


def _as_function(f: Callable[..., object]) -> Callable[..., object]:
    """``f``, or a function that calls it if it is a callable object, such as a module."""
    if hasattr(f, "__name__"):
        return f

    @functools.wraps(f, updated=())
    def call(*args: object, **kwargs: object) -> Tree:
        return f(*args, **kwargs)

    return call
