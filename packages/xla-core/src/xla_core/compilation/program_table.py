"""The table of the process's compiled programs, and the eviction of old ones.

Every executable that a table of this process holds is registered here. There are at most
``XLA_COMPILATION_CACHE_SIZE`` of them, and fewer if the process comes close to the number of memory
mappings that Linux allows: the least recently used are evicted first. Eviction only removes a program
from its tables. A run that is in progress keeps it until it has finished, and the next look-up
compiles it again, or loads it from the persistent cache.
"""

from __future__ import annotations

import gc
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Final

from xla_core.compilation import memory_mappings
from xla_core.contract import events
from xla_core.contract.device_protocol import ArraySpec, Buffer, Executable, Program
from xla_core.contract.foreign_values import Attribute
from xla_core.lowering.program_failures import Value
from xla_core.recording.evictable import Kept
from xla_core.recording.storage import Backend
from xla_core.support import caches, counters, flags
from xla_core.torch_bridge.torch_private import release_free_memory

logger = logging.getLogger(__name__)

EVICTED: Final = "ProgramEvicted"
"""The counter of programs that were evicted to make room for others."""
GIVEN_BACK_AFTER: Final = 64
"""Evicted programs leave free memory between others; it is returned to the system after this many evictions."""
# Free mappings that one more program requires, in addition to one for each of its operations: the
# compiler's threads and the allocator use them temporarily.
_SPARE_MAPPINGS: Final = 512
# The most mappings that a program keeps, in addition to one for each of its operations.
_EACH_MAPPINGS: Final = 32
# Seconds for which a count is valid at most.
_LONGEST_PAUSE: Final = 1.0

MSG_EVICTED: Final = (
    "this process has %d of the %d memory mappings that Linux allows it (vm.max_map_count); compiled "
    "programs that have not been used for long are dropped, and compiled again when they are needed. "
    "Raise the limit (sysctl -w vm.max_map_count=1048576), or lower XLA_COMPILATION_CACHE_SIZE"
)
MSG_NO_MAPPINGS: Final = (
    "a program of {operations} operations cannot be compiled: this process has {count} of the {limit} "
    "memory mappings that Linux allows it (vm.max_map_count), and no compiled program is left that could "
    "be dropped. Without free mappings, the compiler would abort the process. Raise the limit (sysctl -w "
    "vm.max_map_count=1048576), or reduce other mappings (memory-mapped files, other libraries)"
)


class TooManyMappingsError(RuntimeError):
    """The process is too close to its limit of memory mappings to compile anything."""


def execution(
    executable: Executable, arguments: list[Buffer], results: list[Buffer], checked: bool = False
) -> Iterable[object]:
    """For ``indivisible.do``: one run of ``executable``, which appends its results to ``results``.

    With ``checked`` (default: False), the arguments need no check, and their list may be filled as late as when the
    run begins.
    """
    deferred = getattr(executable, "deferred", None)
    if deferred is not None:
        return deferred(arguments, results, checked)  # type: ignore[no-any-return]
    return map(results.extend, map(executable.execute, (arguments,)))


class Making:
    """The state of a program that another thread compiles.

    ``future`` is done when the compilation has ended. ``tell()`` notifies listeners of the program.
    """

    __slots__ = ("future", "tell")

    def __init__(self, future: Future[None], tell: Callable[[], None]) -> None:
        self.future = future
        self.tell = tell


class StepProgram(Kept):
    """One compiled program of a step, ``name``, on the devices of ``backend``.

    ``output_index`` maps value numbers to positions among the results; ``aliases`` pairs inputs with the
    results that reuse their memory. ``histogram`` counts the operators recorded in it. ``output_bytes`` has sizes
    by value number, ``largest`` the largest values that the step computes. ``from_cache`` says that it was loaded
    instead of compiled.

    While another thread compiles it, ``making`` is set, and reading ``executable``, ``program``
    or ``compile_seconds`` waits for the end of the compilation, and raises its error if it failed.
    """

    __slots__ = (
        "name", "program", "inputs", "output_index", "aliases", "donated", "operations", "histogram",
        "runs", "tally", "copied_donations", "compile_seconds", "from_cache", "output_bytes",
        "backend", "largest", "making", "_needed",
    )  # fmt: skip
    executable: Executable
    program: Program | None
    compile_seconds: float

    def __init__(
        self,
        name: str,
        executable: Executable,
        program: Program | None,
        inputs: tuple[ArraySpec, ...],
        output_index: dict[int, int],
        aliases: tuple[tuple[int, int], ...],
        histogram: Counter[str],
        compile_seconds: float,
        from_cache: bool,
        output_bytes: dict[int, int],
        backend: Backend,
        largest: tuple[Value, ...] = (),
    ) -> None:
        super().__init__(executable)
        self.name = name
        self.program = program
        self.inputs = inputs
        self.output_index = output_index
        self.aliases = aliases
        self.donated = tuple(slot for slot, _ in aliases)
        self.operations = histogram.total()
        self.histogram = histogram
        self.tally = counters.Tally(
            (("CreateDataHandles", len(output_index)), (backend.runs_counter, 1))
        )
        self.runs = 0
        self.copied_donations = 0
        self.compile_seconds = compile_seconds
        self.from_cache = from_cache
        self.output_bytes = output_bytes
        self.backend = backend
        self.largest = largest
        self.making: Making | None = None
        self._needed: int | None = None

    def await_making(self, making: Making) -> None:
        """Have no executable until ``made`` is called by the thread of ``making``."""
        self.making = making
        del self.executable, self.program, self.compile_seconds

    def made(self, executable: Executable, program: Program | None, seconds: float) -> None:
        """Receive ``executable`` and its ``program``, which took ``seconds`` to make."""
        self.program, self.compile_seconds = program, seconds
        self.executable = executable

    def is_made(self) -> bool:
        """Whether the compilation has ended, so that using the program does not wait."""
        making = self.making
        return making is None or making.future.done()

    def has_failed(self) -> bool:
        """Whether it could not be compiled."""
        making = self.making
        return making is not None and making.future.done() and making.future.exception() is not None

    def wait_until_made(self) -> None:
        """Wait for the executable. Raises the error of a failed compilation."""
        making = self.making
        if making is not None:
            making.future.result()

    def __getattr__(self, name: str) -> Attribute:
        # called only for attributes that are not set, such as those that ``await_making`` deleted
        if name not in ("executable", "program", "compile_seconds"):
            raise AttributeError(name)
        self.wait_until_made()
        return object.__getattribute__(self, name)

    def memory_needed(self) -> int:
        """Bytes that a run needs in addition to its arguments; 0 if the compiler does not report them."""
        if self._needed is None:
            try:
                figures = self.executable.memory_analysis()
            except (NotImplementedError, RuntimeError):
                figures = {}
            grown = figures.get("outputs", 0) - figures.get("aliased", 0)
            self._needed = max(0, figures.get("temporaries", 0) + grown)
        return self._needed

    def count_run(self) -> None:
        """Count one run of the program."""
        self.runs += 1
        self.mark_used()
        self.tally.count()

    def wasteful(self, wanted: set[int]) -> bool:
        """Whether unused results take more memory than the wanted ones, and more than a MiB."""
        extra = sum(size for vid, size in self.output_bytes.items() if vid not in wanted)
        useful = sum(size for vid, size in self.output_bytes.items() if vid in wanted)
        return extra > max(useful, 1 << 20)


_programs: list[Kept] = []
_lock = threading.RLock()
_told = threading.Event()


def register(program: StepProgram) -> None:
    """Register a program for reports; evicts the least recently used ones if there are too many."""
    if not program.from_cache:
        counters.increment("CreateCompileHandles")
    hold(program)


def hold(kept: Kept) -> None:
    """Register an executable that the process keeps, unless it is registered already."""
    with _lock:
        if kept not in _programs:
            _programs.append(kept)
        excess = len(_programs) - flags.COMPILATION_CACHE_SIZE.get()
        old = sorted(_programs, key=_last_use)[:excess] if excess > 0 else []
    _evict(old)
    del old
    _Evicted.give_back()


def drop(program: Kept) -> None:
    """Remove a program that could not be compiled, or that nothing can use any more."""
    with _lock:
        if program in _programs:
            _programs.remove(program)
    program.leave()


class _Room:
    """The number of free mappings at the last count, and how many have been reserved since.

    Counting takes 1.5 microseconds per mapping: 30 ms for 20,000, as long as compiling three small
    programs. At most a fiftieth of the time is spent on it, unless many mappings are reserved or a count takes
    longer than 20 ms.
    """

    given = left = 0
    counted = -math.inf
    pause = 0.0

    @classmethod
    def suffices(cls, operations: int) -> bool:
        """Whether there is certainly room for a program with this number of operations; if so, reserves it.

        Other code makes mappings as well, so at most an eighth of the room is reserved between two counts.
        These follow each other so soon that other code cannot use up the rest in between.
        """
        wanted = cls.given + _SPARE_MAPPINGS + operations
        if wanted > cls.left // 8 or time.monotonic() - cls.counted > cls.pause:
            return False
        # the spare mappings serve all programs, and most of them remain free: they are not reserved
        cls.given += _EACH_MAPPINGS + operations
        return True

    @classmethod
    def count(cls, limit: int) -> int | None:
        """Count the mappings, which ``limit`` bounds; returns None if the system does not tell."""
        began = time.monotonic()
        count = memory_mappings.count()
        if count is not None:
            cls.given, cls.left, cls.counted = 0, limit - count, time.monotonic()
            # a count that other processes delay must not be trusted for long
            cls.pause = min(max(0.1, 50 * (cls.counted - began)), _LONGEST_PAUSE)
        return count


class _Evicted:
    """The number of programs evicted since free memory was last returned to the system."""

    count = 0

    @classmethod
    def give_back(cls) -> None:
        """Return free memory to the system after enough evictions, because it takes as long as making a program."""
        if cls.count >= GIVEN_BACK_AFTER:
            cls.count = 0
            release_free_memory()


def make_room(operations: int) -> None:
    """Make sure that the process can map the code of one more program with this number of operations.

    Called before a program is compiled or loaded. Raises TooManyMappingsError if the process is too
    close to its limit and evicting all programs does not help.
    """
    if _Room.suffices(operations):
        return
    limit = memory_mappings.limit()
    count = None if limit is None else _Room.count(limit)
    if limit is None or count is None:
        return
    needed = _SPARE_MAPPINGS + operations
    if limit - count < 2 * needed:
        count = _evict_until(limit - 2 * needed, count, limit)
        if limit - count < needed:
            text = MSG_NO_MAPPINGS.format(operations=operations, count=count, limit=limit)
            raise TooManyMappingsError(text)


def _evict_until(wanted: int, count: int, limit: int) -> int:
    """Evict programs until ``count``, the number of mappings, is at most ``wanted``; returns the final number."""
    if not _told.is_set():
        _told.set()
        logger.warning(MSG_EVICTED, count, limit)
    while count > wanted:
        with _lock:
            old = sorted(_programs, key=_last_use)[: max(16, len(_programs) // 4)]
        last = not old
        if last:
            gc.collect()  # frees programs that reference cycles still hold
        _evict(old)
        del old
        _Evicted.give_back()
        count = memory_mappings.count() or 0
        if last:
            break
    return count


def _last_use(kept: Kept) -> int:
    return kept.used


def _evict(old: Iterable[Kept]) -> None:
    for kept in old:
        with _lock:
            if kept in _programs:
                _programs.remove(kept)
        kept.leave()
        counters.increment(EVICTED)
        _Evicted.count += 1
        if isinstance(kept, StepProgram):
            events.emit(events.ProgramEvicted(program=kept))


def clear() -> None:
    """Evict all programs; their runs remain counted."""
    with _lock:
        known = list(_programs)
        _programs.clear()
    for kept in known:
        kept.leave()


caches.register(
    "programs",
    bound=flags.COMPILATION_CACHE_SIZE.get,
    size=lambda: len(_programs),
    clear=clear,
)


def all_programs() -> list[StepProgram]:
    """All programs that this process compiled or loaded and still keeps, the oldest first."""
    with _lock:
        return [kept for kept in _programs if isinstance(kept, StepProgram)]
