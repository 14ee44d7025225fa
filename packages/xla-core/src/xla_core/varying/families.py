"""Which steps differ in their sizes only, and the programs for a bound that serve them.

Steps that have one skeleton and return the same values are a *family*. Its first steps are compiled for their own
sizes, and a formula is fitted to their numbers. From then on, a step whose numbers are all as the fit predicts runs
a program for a bound, and any other step is compiled as usual. All this happens only for steps that have no program
yet.
"""

from __future__ import annotations

import functools
import gc
import itertools
import logging
import math
import operator
import threading
import time
import weakref
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import numpy as np
import torch

from xla_core.compilation import build_program, progress_line
from xla_core.compilation.program_identity import ProgramIdentity
from xla_core.compilation.program_table import StepProgram, drop, hold, make_room
from xla_core.jax_bridge import symbolic_sizes
from xla_core.lowering.program_failures import largest_values
from xla_core.lowering.step_program import input_specs
from xla_core.lowering.step_verifier import verify
from xla_core.recording.entry import operations_of
from xla_core.recording.evictable import Table
from xla_core.recording.trace import Trace
from xla_core.support import caches, counters, flags, flight_ring
from xla_core.varying import bound_program, skeletons
from xla_core.varying.bound_program import BoundProgram, Range, Recorded, VaryingExecutable
from xla_core.varying.fit import Fit, fit
from xla_core.varying.limits import LEAST, candidates, suffices, wanted
from xla_core.varying.padded import NotCoveredError

logger = logging.getLogger(__name__)

SERVED: Final = "VaryingShapesServed"
"""Counts steps of new sizes that needed no compilation: a program for a bound runs them."""
PROGRAMS: Final = "VaryingShapesPrograms"
"""Counts programs that were compiled, or loaded from the persistent cache, for all lengths up to a bound."""
KEPT_OUT: Final = "VaryingShapesKeptOut"
"""Counts families of steps without a program for a bound, because an operator lets no length vary."""
PADDING: Final = "VaryingShapesPadding"
"""Metric: how much of a program's varying lengths is padding, in percent, at each step of new lengths."""

# How many steps of a family are compiled for their own sizes before the next one gets a program for a bound; one
# is enough if the next step is longer by one, as caches are.
_COMPILED_FIRST: Final = 2
_GROWN_FIRST: Final = 1
# If the user has not asked for it, only steps of at least this many entries share programs soon: after this many
# lengths were compiled. A program for a bound takes as long to compile as two or three others.
_LEAST_ENTRIES: Final = 64
_COMPILED_FIRST_UNASKED: Final = 3
# One such operation stands for as many as there are time steps.
_LONG: Final = frozenset({"xla.recurrent_layer.default", "xla.recurrent_layer_backward.default"})
# Smaller steps compile quickly, so this many lengths are compiled first. Few scripts have more; those that reduce
# the mask of each batch do.
_COMPILED_FIRST_SMALL: Final = 16
# The same number if gradients are off and each step was longer by one than the one before, as between two tokens
# of text generation.
_GROWN_FIRST_SMALL: Final = 4
# A fit of small steps is attempted at most this many times.
_MOST_SEARCHES_SMALL: Final = 4
# Lengths that use less of a program than _WORTH get a program of their own after _MANY_RUNS runs, if these are at
# least one in _PART_OF_RUNS of their family's runs.
_MANY_RUNS: Final = 100
_PART_OF_RUNS: Final = 8
_WORTH: Final = 0.9
_MOST_TALLIES: Final = 4096
_MOST_SAMPLES: Final = 6
# Numbers beyond these are never lengths; steps that have one are compiled as usual.
_NO_MARKS: Final[Mapping[int, int | None]] = MappingProxyType({})
_LEAST_NUMBER: Final = -(2**63)
_MOST_NUMBER: Final = 2**63 - 1

MSG_KEPT_OUT: Final = "this step is compiled for each of its lengths: %s"
MSG_DEVICES: Final = "a program of several devices has fixed sizes"


class _Family:
    """Steps that have one skeleton and return the same values: the numbers of some of them, and their programs.

    ``lock`` is held while a thread examines the family or compiles for it; steps of other families do not wait.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.samples: list[np.ndarray] = []
        self.seen = 0
        self.searches = 0
        self.fit: Fit | None = None
        # by the range of lengths; a program that the process evicts is gone from here, too
        self.programs = Table()
        self.largest: list[int] = []
        self.smallest: list[int] = []
        self.growing = False
        self.expected: int | None = None
        self.failed: dict[Range, object] = {}
        self.covered = False
        self.refused = False
        self.hints: dict[int, int | None] = {}
        self.runs: Counter[tuple[int, ...]] = Counter()
        self.own: set[tuple[int, ...]] = set()

    def lengths_of(
        self, numbers: np.ndarray, sizes: Sequence[int], first: int, grown_first: int
    ) -> tuple[int, ...] | None:
        """The lengths of a step with these numbers; None if too few steps were seen, or no fit was found.

        ``first`` is how many steps are compiled for their own sizes before there is a program for others,
        ``grown_first`` how many if each is longer by one, or the user has marked a size.
        """
        if self.fit is not None:
            lengths = self.fit.lengths_of(numbers)
            if lengths is not None:
                if self.expected is not None:
                    self.growing = lengths[0] == self.expected
                    self.expected = None
                return lengths
        if not any(np.array_equal(numbers, known) for known in self.samples):
            self.samples = [*self.samples, numbers][-_MOST_SAMPLES:]
            self.seen += 1
        fitted = self._fitted(sizes, first, grown_first)
        if fitted is None:
            return None
        seen = np.stack([known[list(fitted.lengths)] for known in self.samples])
        growing = len(fitted.lengths) == 1 and bool((np.diff(seen[:, 0]) == 1).all())
        if self.seen <= first and not (growing or self.hints):
            return None
        if growing and len(self.samples) == 2 and min(fitted.predicted((LEAST,))[sizes]) < 0:
            return None  # a line goes through any two points, but this one has negative sizes
        # two successive lengths may differ by one by chance; the third will tell
        self.growing = growing
        self.expected = int(seen[-1, 0]) + 1 if growing and len(self.samples) == 2 else None
        # a program is valid only for the fit that it was made with
        for program in list(self.programs.values()):
            drop(program)
        self.fit, self.programs, self.covered, self.refused = fitted, Table(), False, False
        self.failed, self.own = {}, set()
        self.runs.clear()
        self.largest, self.smallest = seen.max(axis=0).tolist(), seen.min(axis=0).tolist()
        return fitted.lengths_of(numbers)

    def _fitted(self, sizes: Sequence[int], first: int, grown_first: int) -> Fit | None:
        """A fit of the steps so far; None if they are too few, or have none."""
        if self.seen <= grown_first:
            return None
        if grown_first == _GROWN_FIRST:
            return fit(self.samples, sizes)
        if self.seen <= first:
            return fit(self.samples, sizes, 1)  # a growing step has one length
        self.searches += 1  # a search may take longer than compiling a small step
        return fit(self.samples, sizes, 2) if self.searches <= _MOST_SEARCHES_SMALL else None

    def program(self, lengths: Sequence[int]) -> BoundProgram | None:
        """The smallest existing program for these lengths, or None."""
        # another thread may evict one meanwhile
        fitting: list[BoundProgram] = [p for p in list(self.programs.values()) if p.serves(lengths)]
        return min(fitting, key=lambda p: p.limits, default=None)

    def note_run(self, lengths: tuple[int, ...], step: weakref.ref[StepProgram]) -> None:
        """Count one more run of ``step``, which has these lengths; frequent lengths get a program of their own."""
        if len(self.runs) > _MOST_TALLIES:
            self.runs.clear()
        self.runs[lengths] += 1
        count = self.runs[lengths]
        if count >= _MANY_RUNS and count * _PART_OF_RUNS >= self.runs.total():
            self.own.add(lengths)
            program = step()
            if program is not None:
                drop(program)


_families: caches.Bounded[Hashable, _Family] = caches.Bounded("steps of varying sizes", 256)
# Kept apart, so that these do not displace the families above, which took longer to compile.
_small_families: caches.Bounded[Hashable, _Family] = caches.Bounded("small steps that may grow", 64)
_reasons: caches.Bounded[str, int] = caches.Bounded("reasons against varying sizes", 64)
_numbers = itertools.count(1)
_lock = threading.Lock()


def kept_out() -> dict[str, int]:
    """Why steps have no program for a bound (operator, line and reason), each with its number of families."""
    with _lock:
        return dict(_reasons)


def is_padded(program: StepProgram) -> bool:
    """Whether a step's program is one for several lengths."""
    return program.is_made() and isinstance(program.executable, VaryingExecutable)


def serve(trace: Trace, key: ProgramIdentity) -> StepProgram | None:
    """A program for the pending step that serves all lengths up to a bound; it is compiled if there is none yet.

    ``key`` is the step's identity. None if the step must be compiled for its own sizes: it is the first of
    its kind, the fit does not predict its sizes, or an operator lets no length vary.
    """
    chosen = flags.VARYING_SHAPES.get()
    marks = _marks(trace)
    if chosen is False or trace.eager_flush or key.layouts is not None:
        return None
    small = chosen is None and not marks and _is_small(trace)
    if trace.backend.shapes_only or trace.backend.shard_count() > 1:
        return None
    started = time.perf_counter()
    wiped = skeletons.wiped(trace.cur.path())
    if not all(_LEAST_NUMBER <= n <= _MOST_NUMBER for n in wiped.numbers):
        return None
    family = _family(_small_families if small else _families, (wiped.skeleton, key))
    with family.lock:
        inputs = list(trace.input_vids) if marks else []
        family.hints = {wiped.values[inputs[slot]][dim]: most for slot, dim, most in marks}
        numbers = np.array(wiped.numbers, dtype=np.int64)
        lengths = family.lengths_of(numbers, wiped.sizes, *_compiled_first(chosen, small))
        bound = None if lengths is None else _bound_for(trace, key, wiped, family, lengths)
    if bound is None or (key.what.taken and len(bound.aliases) < len(key.what.donations)):
        return None
    assert lengths is not None
    program = _installed(trace, key, bound, lengths, wiped.flags, started)
    if not trace.backend.has_room(program.memory_needed()):
        return None  # without the padding there may be room
    used = math.prod(n / limit for n, limit in zip(lengths, bound.limits, strict=True))
    if used < _WORTH:
        executable = program.executable
        assert isinstance(executable, VaryingExecutable)
        executable.ran = functools.partial(family.note_run, lengths, weakref.ref(program))
    counters.increment(SERVED)
    counters.sample(PADDING, 100 * (1 - used), counters.render_number)
    return program


def _is_small(trace: Trace) -> bool:
    """Whether a step has few operations, and none of them loops over a sequence."""
    if trace.cur.depth >= _LEAST_ENTRIES:
        return False
    operations = operations_of(trace.cur.path())
    return not any(operation.plan.name in _LONG for operation in operations)


def _compiled_first(chosen: bool | None, small: bool) -> tuple[int, int]:
    """How many steps are compiled for their own sizes first: in general, and if each is longer by one."""
    if not small:
        return _COMPILED_FIRST if chosen else _COMPILED_FIRST_UNASKED, _GROWN_FIRST
    grown = _COMPILED_FIRST_SMALL if torch.is_grad_enabled() else _GROWN_FIRST_SMALL
    return _COMPILED_FIRST_SMALL, grown


def _marks(trace: Trace) -> list[tuple[int, int, int | None]]:
    """Dimensions of the step's inputs that the user marked: slot, dimension, largest size."""
    return [
        (slot, dim, most)
        for slot, position in enumerate(trace.input_storages)
        for dim, most in getattr(trace.touched[position], "varying", _NO_MARKS).items()
    ]


def _bound_for(
    trace: Trace,
    key: ProgramIdentity,
    wiped: skeletons.Wiped,
    family: _Family,
    lengths: tuple[int, ...],
) -> BoundProgram | None:
    """The program of a family for a step of these lengths; None if the step is to have its own."""
    if family.refused or lengths in family.own or min(lengths) < LEAST:
        return None
    family.largest = list(map(max, family.largest, lengths))
    family.smallest = list(map(min, family.smallest, lengths))
    bound = family.program(lengths)
    assert family.fit is not None
    room = family.fit.room(_outside(trace, key, wiped))
    limits = wanted(lengths, family.largest, family.growing, room)
    if limits is None:
        return None
    limits = family.fit.at_most(family.hints, limits)
    if any(map(operator.gt, lengths, limits)):
        return None
    if bound is None or not suffices(bound.limits, limits):
        bound = _built(family, recorded(trace, key), wiped, lengths, limits, room) or bound
    return bound


def _outside(trace: Trace, key: ProgramIdentity, wiped: skeletons.Wiped) -> Iterator[int]:
    """The positions of the sizes of a step's inputs and results."""
    values = (*trace.input_vids, *key.what.outputs)
    return itertools.chain.from_iterable(map(wiped.values.__getitem__, values))


def _family(known: caches.Bounded[Hashable, _Family], key: Hashable) -> _Family:
    """The family with this key, the most recently used last."""
    with _lock:
        family = known.pop(key, None)
        return known.keep(key, _Family() if family is None else family)


def recorded(trace: Trace, key: ProgramIdentity) -> Recorded:
    """The pending step, whose identity is ``key``, in the form from which a program for a bound is made."""
    outputs, donations = key.what.outputs, key.what.donations
    entries = trace.cur.path()
    index = {vid: i for i, vid in enumerate(outputs)}
    aliases = tuple((slot, index[vid]) for slot, vid in donations)
    verify(entries, outputs, aliases)
    layout = trace.backend.layout(trace, entries, outputs, aliases)
    return Recorded(trace, entries, outputs, layout)


def _built(
    family: _Family,
    step: Recorded,
    wiped: skeletons.Wiped,
    lengths: tuple[int, ...],
    limits: tuple[int, ...],
    room: tuple[int, ...],
) -> BoundProgram | None:
    """A new program of a family for lengths up to ``limits``; None if none can be made, or none for ``lengths``."""
    fitted = family.fit
    assert fitted is not None
    fixed = [wiped.numbers[position] for position in wiped.sizes if position not in fitted.terms]
    reason = MSG_DEVICES
    layout = step.layout
    if layout.num_replicas == layout.num_partitions == 1:
        tries = candidates(limits, lengths, family.smallest, fixed, fitted.multiples())
        while tries:
            tried = tries.pop(0)
            if tried in family.programs:
                return None  # that program does not serve these lengths
            if tried in family.failed:
                tries[:0] = _narrowed(tried, lengths, family.failed[tried])
                continue
            try:
                bound = _compiled(step, fitted, wiped, tried, room)
            except (
                Exception
            ) as error:  # the step is compiled for its own sizes, where errors are raised
                # keep only the comparison: the error's frames would keep the step's values alive
                family.failed[tried] = undecided = symbolic_sizes.undecided(error)
                tries[:0] = _narrowed(tried, lengths, undecided)
                reason = str(error) if isinstance(error, NotCoveredError) else repr(error)
                continue
            family.covered = True
            bound.keep(family.programs, tried)
            hold(bound)
            return bound if bound.serves(lengths) else None
    if not family.covered:
        family.refused = True
        counters.increment(KEPT_OUT)
    _keep_out(reason)
    return None


def _narrowed(between: Range, lengths: Sequence[int], difference: object) -> list[Range]:
    """What to try next if an undecided comparison has failed: the lengths around these for which it is decided."""
    part = bound_program.narrowed(between, lengths, difference)
    return [] if part is None or part == between else [part]


def _compiled(
    step: Recorded, fitted: Fit, wiped: skeletons.Wiped, between: Range, room: Sequence[int]
) -> BoundProgram:
    name = f"varying_{next(_numbers)}_to_{'_'.join(map(str, between[1]))}"
    make_room(len(step.entries))
    started = time.perf_counter()
    record = flight_ring.begin(flight_ring.COMPILE, name, len(step.entries))
    try:
        with progress_line.watching(name, len(step.entries)):
            bound = bound_program.build(
                step, fitted, wiped.sizes, between, name, room, len(wiped.flags)
            )
    finally:
        flight_ring.end(record)
        # Where jax examines a symbolic size, it leaves an error in a cycle with its frame. That keeps all calling
        # frames alive, and the step's values with them. All those cycles are young.
        gc.collect(0)
    counters.sample("CompileTime", (time.perf_counter() - started) * 1e9)
    if bound.from_cache:
        counters.increment("PersistentCacheHit")
    else:
        counters.increment("UncachedCompile")
        counters.increment("CreateCompileHandles")
    counters.increment(PROGRAMS)
    return bound


def _keep_out(reason: str) -> None:
    with _lock:
        _reasons.keep(reason, _reasons.get(reason, 0) + 1)
    logger.info(MSG_KEPT_OUT, reason)


def _installed(
    trace: Trace,
    key: ProgramIdentity,
    bound: BoundProgram,
    lengths: tuple[int, ...],
    flags: Sequence[bool],
    started: float,
) -> StepProgram:
    """The step's program: a run of ``bound``."""
    entries, outputs = trace.cur.path(), key.what.outputs
    return StepProgram(
        name=bound.program.name,
        executable=VaryingExecutable(bound, lengths, flags, trace.backend),
        program=bound.program,
        inputs=input_specs(trace.backend, entries),
        output_index={vid: i for i, vid in enumerate(outputs)},
        aliases=bound.aliases,
        histogram=Counter(e.plan.name for e in operations_of(entries)),
        compile_seconds=time.perf_counter() - started,
        from_cache=True,
        output_bytes=build_program.output_bytes(entries, outputs),
        backend=trace.backend,
        largest=largest_values(entries),
    )
