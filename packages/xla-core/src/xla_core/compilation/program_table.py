"""The compiled programs of the process: what is known about each, and how many are kept.

Every executable that a table of this process holds is registered here. There are at most
``XLA_COMPILATION_CACHE_SIZE`` of them, and fewer when the process comes near the number of memory
mappings that Linux allows it: those that were not used for longest go first. Evicting takes a program
out of its tables, no more: whoever runs it keeps it until the run is over, and the next one who looks
for it finds nothing and compiles it again, or loads it from the persistent cache.
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
from typing import Any, Final

from xla_core.contract import events
from xla_core.contract.device_protocol import ArraySpec, Buffer, Executable
from xla_core.lowering.program_failures import Value
from xla_core.recording.evictable import Kept
from xla_core.support import caches, counters, flags, memory_mappings
from xla_core.torch_bridge.torch_private import release_free_memory

logger = logging.getLogger(__name__)

EVICTED: Final = "ProgramEvicted"
"""Counts programs that were forgotten to make room for others."""
GIVEN_BACK_AFTER: Final = 64
"""Evicted programs leave free blocks between those that stay: after so many they are given back to the system."""
# Mappings that there must be for one more program, beside one for each of its operations: what the
# compiler's threads and the allocator take meanwhile.
_SPARE_MAPPINGS: Final = 512
# What a program takes itself at most, beside one for each of its operations.
_EACH_MAPPINGS: Final = 32

MSG_EVICTED: Final = (
    "this process has %d of the %d memory mappings that Linux allows it (vm.max_map_count); compiled "
    "programs that were not used for long are forgotten, and compiled again when they are met again. "
    "Raise the limit (sysctl -w vm.max_map_count=1048576), or lower XLA_COMPILATION_CACHE_SIZE"
)
MSG_NO_MAPPINGS: Final = (
    "a program of {operations} operations cannot be compiled: this process has {count} of the {limit} "
    "memory mappings that Linux allows it (vm.max_map_count), none of them a compiled program's that could "
    "be forgotten, and the compiler ends the process where it gets no more. Raise the limit (sysctl -w "
    "vm.max_map_count=1048576), or let whatever else makes mappings (memory-mapped files, other "
    "libraries) make fewer"
)


class TooManyMappingsError(RuntimeError):
    """The process has nearly all the memory mappings that it may have: nothing can be compiled."""


def execution(
    executable: Executable, arguments: list[Buffer], results: list[Buffer], checked: bool = False
) -> Iterable[object]:
    """For ``indivisible.do``: one run of ``executable``, whose results ``results`` is extended by.

    With ``checked`` the arguments need no check, and are in their list only when the run begins.
    """
    deferred = getattr(executable, "deferred", None)
    if deferred is not None:
        return deferred(arguments, results, checked)  # type: ignore[no-any-return]
    return map(results.extend, map(executable.execute, (arguments,)))


class Making:
    """How the making of a program goes that another thread compiles.

    ``future`` is done when that has ended. ``tell()`` lets listeners know of the program.
    """

    __slots__ = ("future", "tell")

    def __init__(self, future: Future[None], tell: Callable[[], None]) -> None:
        self.future = future
        self.tell = tell


class StepProgram(Kept):
    """One compiled program of a step, ``name``, on the devices of ``backend``.

    ``output_index`` maps value numbers to positions among the results; ``aliases`` pairs inputs with the
    results that take over their memory. ``histogram`` counts the operators recorded in it. ``output_bytes`` are
    by value number, ``largest`` the largest values that the step works on; ``from_cache``: it was not compiled
    here.

    While another thread compiles it, ``making`` is how that goes, and whoever asks for ``executable``, ``program``
    or ``compile_seconds`` waits; they raise what compiling has failed with.
    """

    __slots__ = (
        "name", "program", "inputs", "output_index", "aliases", "donated", "operations", "histogram",
        "runs", "tally", "copied_donations", "compile_seconds", "from_cache", "output_bytes",
        "backend", "largest", "making", "_needed",
    )  # fmt: skip
    executable: Executable
    program: Any
    compile_seconds: float

    def __init__(
        self,
        name: str,
        executable: Executable,
        program: object,
        inputs: tuple[ArraySpec, ...],
        output_index: dict[int, int],
        aliases: tuple[tuple[int, int], ...],
        histogram: Counter[str],
        compile_seconds: float,
        from_cache: bool,
        output_bytes: dict[int, int],
        backend: Any,
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
        """Have no executable until ``making`` has given one, see ``made``."""
        self.making = making
        del self.executable, self.program, self.compile_seconds

    def made(self, executable: Executable, program: object, seconds: float) -> None:
        """Have ``executable`` and its ``program`` from now on, which took ``seconds`` to make."""
        self.program, self.compile_seconds = program, seconds
        self.executable = executable

    def is_made(self) -> bool:
        """Whether there is an executable already, so that using the program does not wait."""
        making = self.making
        return making is None or making.future.done()

    def has_failed(self) -> bool:
        """Whether it could not be compiled."""
        making = self.making
        return making is not None and making.future.done() and making.future.exception() is not None

    def wait_until_made(self) -> None:
        """Wait for the executable. Raises what compiling has failed with."""
        making = self.making
        if making is not None:
            making.future.result()

    def __getattr__(self, name: str) -> Any:
        # only what is not set comes here: what ``await_making`` took away
        if name not in ("executable", "program", "compile_seconds"):
            raise AttributeError(name)
        self.wait_until_made()
        return object.__getattribute__(self, name)

    def memory_needed(self) -> int:
        """Bytes that a run takes in addition to its arguments; 0 if the compiler does not say."""
        if self._needed is None:
            try:
                figures = self.executable.memory_analysis()
            except (NotImplementedError, RuntimeError):
                figures = {}
            grown = figures.get("outputs", 0) - figures.get("aliased", 0)
            self._needed = max(0, figures.get("temporaries", 0) + grown)
        return self._needed

    def count_run(self) -> None:
        """One more run of the program."""
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
    """Remember a program for reports; those used least recently go when there are too many."""
    if not program.from_cache:
        counters.increment("CreateCompileHandles")
    hold(program)


def hold(kept: Kept) -> None:
    """Count an executable among those that the process keeps, if it is not among them."""
    with _lock:
        if kept not in _programs:
            _programs.append(kept)
        excess = len(_programs) - flags.COMPILATION_CACHE_SIZE.get()
        old = sorted(_programs, key=_last_use)[:excess] if excess > 0 else []
    _evict(old)
    del old
    _Evicted.give_back()


def drop(program: StepProgram) -> None:
    """Forget a program that could not be compiled."""
    with _lock:
        if program in _programs:
            _programs.remove(program)
    program.leave()


class _Room:
    """How many mappings there were room for when they were last counted, and what was given away since.

    Counting takes 1.5 microseconds for each mapping: 30 ms where there are 20,000, as long as three small
    programs take. It is done a twentieth of the time at most, unless many were given away.
    """

    given = left = 0
    counted = -math.inf
    pause = 0.0

    @classmethod
    def suffices(cls, operations: int) -> bool:
        """Whether there certainly is room for a program of this number of operations; if so, the room is reserved.

        Others make mappings, too: no more than an eighth of the room is given away between two counts,
        which follow each other soon; making as many as a process may have takes longer.
        """
        wanted = cls.given + _SPARE_MAPPINGS + operations
        if wanted > cls.left // 8 or time.monotonic() - cls.counted > cls.pause:
            return False
        # the spare ones are there for all programs together: by far most of them stay
        cls.given += _EACH_MAPPINGS + operations
        return True

    @classmethod
    def count(cls, limit: int) -> int | None:
        """Count the mappings, of which there may be ``limit``; None where the system does not tell."""
        began = time.monotonic()
        count = memory_mappings.count()
        if count is not None:
            cls.given, cls.left, cls.counted = 0, limit - count, time.monotonic()
            cls.pause = max(0.1, 20 * (cls.counted - began))
        return count


class _Evicted:
    """How many programs were evicted since what they took was given back to the system."""

    count = 0

    @classmethod
    def give_back(cls) -> None:
        """Give it back, if there are enough: that takes milliseconds, as long as one program takes to be made."""
        if cls.count >= GIVEN_BACK_AFTER:
            cls.count = 0
            release_free_memory()


def make_room(operations: int) -> None:
    """Make sure that the process may map the code of one more program with this number of operations.

    Called before something is compiled or loaded. Raises TooManyMappingsError when the process is too
    near to its limit and evicting all programs does not help.
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
    """Evict programs until ``count``, the number of mappings, is ``wanted``; what it is at last."""
    if not _told.is_set():
        _told.set()
        logger.warning(MSG_EVICTED, count, limit)
    while count > wanted:
        with _lock:
            old = sorted(_programs, key=_last_use)[: max(16, len(_programs) // 4)]
        last = not old
        if last:
            gc.collect()  # what reference cycles still hold
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
    """Forget all programs; what they ran so far stays counted."""
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
    """Every program compiled or loaded in this process that is still kept, oldest first."""
    with _lock:
        return [kept for kept in _programs if isinstance(kept, StepProgram)]
