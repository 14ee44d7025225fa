"""A program for all lengths up to a bound, and its runs for steps of certain lengths."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import Array

from xla_core.compilation import disk_cache, program_identity, stored_programs
from xla_core.compilation.build_program import compile_program
from xla_core.compilation.disk_cache import CacheKey
from xla_core.compilation.program_table import execution
from xla_core.contract.device_protocol import ArraySpec, Buffer, Executable, Program
from xla_core.jax_bridge import symbolic_sizes
from xla_core.jax_bridge.traced_values import JaxObject, Size, TracedValue
from xla_core.lowering.replay import needed_entries
from xla_core.lowering.step_program import StepLowering, input_specs
from xla_core.operators.lowering_registry import Rule
from xla_core.operators.tensor_meta import TensorMeta
from xla_core.recording.entry import Entry, inputs_of, operations_of
from xla_core.recording.evictable import Kept
from xla_core.recording.program_layout import Layout
from xla_core.recording.storage import Backend
from xla_core.recording.trace import Trace
from xla_core.support import counters, indivisible
from xla_core.torch_bridge.op_library import MARK
from xla_core.varying import rules, skeletons
from xla_core.varying.fit import Fit
from xla_core.varying.limits import LEAST, NEAR
from xla_core.varying.padded import Frame, NotCoveredError, Padded, dim_of
from xla_core.varying.padded_buffer import (
    PADDED_ON_HOST,
    PaddedBuffer,
    exact_arguments,
    whole_buffer,
    with_padding,
)
from xla_core.varying.scope import VaryingScope

MSG_WHOLE: Final = "{operator} looks at the whole step"
MSG_STORE: Final = "steps of one length are not stored, but the program for their bound"

assert rules.MODULES


Range: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""The smallest lengths and the largest ones."""


class Recorded(NamedTuple):
    """A recorded step: its entries, and the numbers of the values that it returns."""

    trace: Trace
    entries: Sequence[Entry]
    outputs: tuple[int, ...]
    layout: Layout


@dataclasses.dataclass(eq=False)
class BoundProgram(Kept):
    """A compiled program for all lengths from ``lows`` up to ``limits``.

    ``inputs`` are the shapes that its varying inputs are padded to (None for those that do not vary), ``outputs``
    the sizes of its varying results (None for others). It is valid for lengths for which none of ``differences``
    is zero and all of ``sizes`` are at least ``LEAST``. ``from_cache`` says that it was loaded, not compiled.
    """

    executable: Executable
    program: Program
    lows: tuple[int, ...]
    limits: tuple[int, ...]
    inputs: tuple[tuple[int, ...] | None, ...]
    outputs: tuple[tuple[Size, ...] | None, ...]
    aliases: tuple[tuple[int, int], ...]
    differences: tuple[object, ...]
    sizes: tuple[Size, ...]
    from_cache: bool

    def __post_init__(self) -> None:
        Kept.__init__(self, self.executable)

    def serves(self, lengths: Sequence[int]) -> bool:
        """Whether it can run steps of these lengths."""
        known = named(lengths)
        return (
            all(map(_within, self.lows, lengths, self.limits))
            and all(_number(size, known) >= LEAST for size in self.sizes)
            and all(_number(difference, known) for difference in self.differences)
        )

    def output_shapes(self, lengths: Sequence[int]) -> tuple[tuple[int, ...] | None, ...]:
        """The shapes that its varying results are cut to."""
        known = named(lengths)
        return tuple(
            None if sizes is None else tuple(_number(size, known) for size in sizes)
            for sizes in self.outputs
        )


def named(lengths: Sequence[Size]) -> dict[str, Size]:
    """Lengths by their names in symbolic sizes."""
    return {f"L{number}": length for number, length in enumerate(lengths)}


def _within(low: int, length: int, limit: int) -> bool:
    return low <= length <= limit


def _number(size: object, lengths: Mapping[str, int]) -> int:
    return int(symbolic_sizes.evaluate(size, lengths))


def narrowed(between: Range, lengths: Sequence[int], difference: Size) -> Range | None:
    """The largest part of ``between`` around these lengths in which ``difference`` keeps its sign.

    ``difference`` is what ``symbolic_sizes.undecided`` returned. None if it does not depend on exactly one length.
    """
    names = symbolic_sizes.names_in(difference)
    if len(names) != 1:
        return None
    (name,) = names
    which = list(named(lengths)).index(name)
    known = named(lengths)
    below = _number(difference, known) < 0

    def same(length: int) -> bool:
        return (_number(difference, {**known, name: length}) < 0) == below

    low = high = lengths[which]
    while low > between[0][which] and same(low - 1):
        low -= 1
    while high < between[1][which] and same(high + 1):
        high += 1
    lows, highs = list(between[0]), list(between[1])
    lows[which], highs[which] = low, high
    return tuple(lows), tuple(highs)


def build(
    step: Recorded,
    fitted: Fit,
    sizes: Sequence[int],
    between: Range,
    name: str,
    room: Sequence[int],
    flags: int,
) -> BoundProgram:
    """Lower and compile the program of a step for all lengths ``between`` two bounds.

    ``name`` is the program's. ``fitted`` says how the step's numbers depend on the lengths, and ``sizes`` which of
    them are sizes. Dimensions of inputs and results that are close to a length have the length's limit plus its
    ``room`` as their size, so that the next run can take the results of one run. ``flags`` is the number of truth
    values that the program takes after the lengths. Raises NotCoveredError, which names operator and line, if a
    length cannot vary, and what the compiler raises.
    """
    lowering = _BoundLowering(step, fitted, sizes, between, name, room, flags)
    key, differences_key = lowering.cache_keys()
    client = step.trace.backend.client
    differences = _stored_differences(differences_key)
    executable: JaxObject = None
    if differences is not None:
        executable = stored_programs.load(client, key, name, step.layout.placement)
    from_cache = executable is not None
    if from_cache:
        program = lowering.described()
    else:
        program = lowering.program()
        executable = compile_program(client, program)
        differences = tuple(lowering.differences)
        stored_programs.store(key, executable)
        _store_differences(differences_key, differences)
    assert differences is not None
    return BoundProgram(
        executable=executable,
        program=program,
        lows=between[0],
        limits=between[1],
        inputs=lowering.input_shapes,
        outputs=lowering.output_sizes,
        aliases=lowering.aliases,
        differences=differences,
        sizes=lowering.sizes,
        from_cache=from_cache,
    )


def _store_differences(key: CacheKey | None, differences: Sequence[object]) -> None:
    """Store, beside a stored program, for which lengths it is not valid."""
    stored = disk_cache.current()
    if stored is not None and key is not None and not stored.readonly:
        stored.put(key, json.dumps(list(map(str, differences))).encode())


def _stored_differences(key: CacheKey | None) -> tuple[Size, ...] | None:
    """For which lengths a stored program is not valid; None if there is no such program."""
    stored = disk_cache.current()
    payload = None if stored is None or key is None else stored.get(key)
    if payload is None:
        return None
    try:
        return tuple(map(symbolic_sizes.parsed, json.loads(payload)))
    except ValueError as error:
        disk_cache.warn_unusable(key, error)
        return None


class _BoundLowering:
    """Lowers one step to a program for all lengths up to a bound."""

    def __init__(
        self,
        step: Recorded,
        fitted: Fit,
        sizes: Sequence[int],
        between: Range,
        name: str,
        room: Sequence[int],
        flags: int,
    ) -> None:
        for operation in operations_of(step.entries):
            rule = operation.plan.rule
            whole = isinstance(rule, Rule) and (rule.whole_step or rule.all_replicas)
            if whole or operation.plan.name == MARK:
                raise NotCoveredError(MSG_WHOLE.format(operator=operation.plan.name))
        self.step = step
        self.name = name
        self.count = len(between[0])
        self.flags = flags
        self.differences: dict[object, None] = {}
        numbers = _symbolic_numbers(fitted, sizes, *between)
        self.sizes = tuple(dict.fromkeys(numbers[p] for p in sizes if p in fitted.terms))
        filled = skeletons.filled(step.entries, numbers)
        self.metas, parts = filled
        needed = {e.first for e in operations_of(needed_entries(step.entries, step.outputs))}
        self.parts = [part for part in parts if part.entry.first in needed]
        frame = Frame({})
        self.given = [entry.first for entry in inputs_of(step.entries)]
        lengths = [numbers[position] for position in fitted.lengths]
        places = functools.partial(_places, frame, [*zip(lengths, between[1], room, strict=True)])
        self.input_shapes = tuple(_shape(places, self.metas[vid]) for vid in self.given)
        self.output_sizes = tuple(_sizes(self.metas[vid]) for vid in step.outputs)
        self.output_shapes = tuple(_shape(places, self.metas[vid]) for vid in step.outputs)
        self.aliases = tuple(
            (slot, target)
            for slot, target in step.layout.aliases
            if self.input_shapes[slot] == self.output_shapes[target]
        )

        shapes = f"inputs {self.input_shapes} outputs {step.outputs} {self.output_shapes}"
        facts = f"{between} {self.sizes} {flags} flags, aliases {self.aliases}"
        self.text = f"{skeletons.text(filled, step.entries)}\n{shapes}\n{facts}"

    def cache_keys(self) -> tuple[CacheKey | None, CacheKey | None]:
        """The persistent cache's keys of the program, and of the lengths for which it is not valid."""
        backend, layout = self.step.trace.backend, self.step.layout
        texts = (self.text, f"{self.text}\ndifferences")
        identities = [program_identity.of_step(backend, text.encode(), layout) for text in texts]
        key, another = (one.cache_key(self.name, layout.placement) for one in identities)
        return key, another

    def described(self) -> Program:
        """The program without its code."""
        _, inputs, outputs = self._outline()
        placement = self.step.layout.placement
        return Program(self.name, b"", inputs, outputs, self.aliases, placement)

    def program(self) -> Program:
        """The program; it takes padded inputs, lifted numbers, then the vector of lengths and flags."""
        lowering, inputs, outputs = self._outline()
        with symbolic_sizes.watching_comparisons() as self.differences:
            return lowering.program_of(self._run, inputs, outputs)

    def _outline(self) -> tuple[StepLowering, tuple[ArraySpec, ...], tuple[ArraySpec, ...]]:
        step, backend = self.step, self.step.trace.backend
        layout = dataclasses.replace(step.layout, aliases=self.aliases)
        lowering = StepLowering(
            step.trace, step.entries, step.outputs, layout, self.name, flat=True
        )
        exact = input_specs(backend, step.entries)
        shapes = (*self.input_shapes, *(None for _ in exact[len(self.input_shapes) :]))
        inputs = [*map(_with_shape, exact, shapes)]
        count = self.count + self.flags
        inputs.append(ArraySpec((count,), backend.client.numpy_dtype(np.dtype(np.int32))))
        outputs = map(_with_shape, lowering.output_specs(), self.output_shapes)
        return lowering, tuple(inputs), tuple(outputs)

    def _run(self, *arrays: TracedValue) -> tuple[TracedValue, ...]:
        *rest, lengths = arrays
        last = self.step.entries[-1]
        ints = rest.pop() if last.ints else None
        floats = rest.pop() if last.floats else None
        wide = lengths.astype(np.int64)
        frame = Frame(named([wide[number] for number in range(self.count)]))
        if self.flags:
            flags = wide[self.count :]
            ints = flags if ints is None else jnp.concatenate([ints.astype(np.int64), flags])
        scope = VaryingScope(frame, floats, ints)
        for vid, array in zip(self.given, rest, strict=True):
            sizes = _sizes(self.metas[vid])
            scope.give(vid, array if sizes is None else _entering(frame, array, sizes))
        for part in self.parts:
            scope.compute(part)
        return tuple(
            _leaving(frame, scope[vid], shape)
            for vid, shape in zip(self.step.outputs, self.output_shapes, strict=True)
        )


def _entering(frame: Frame, array: object, sizes: tuple[object, ...]) -> Padded:
    """An input of these symbolic sizes, in an array of their largest values."""
    dims = tuple(map(dim_of, sizes))
    for axis, places in enumerate(frame.shape(dims)):
        array = frame.cut(array, axis, places)
    return Padded(array, dims)


def _leaving(frame: Frame, value: object, shape: tuple[int, ...] | None) -> TracedValue:
    """The array of a result in the shape of its buffer, its elements side by side along each dimension."""
    if isinstance(value, Padded):
        for axis in range(len(value.dims)):
            value = frame.plain(value, axis)
        value = value.array
    for axis, places in enumerate(shape or ()):
        value = frame.cut(value, axis, places)
    return value


def _symbolic_numbers(
    fitted: Fit, sizes: Sequence[int], lows: Sequence[int], limits: Sequence[int]
) -> list[Size]:
    """The step's numbers for symbolic lengths from ``lows`` to ``limits``, with all sizes at least ``LEAST``."""
    names = list(named(limits))
    constraints = [f"{name} >= {low}" for name, low in zip(names, lows, strict=True)]
    constraints += [f"{name} <= {limit}" for name, limit in zip(names, limits, strict=True)]
    numbers = list(fitted.predicted(symbolic_sizes.symbols(names, constraints)))
    varying = dict.fromkeys(numbers[position] for position in sizes if position in fitted.terms)
    small = [size for size in varying if symbolic_sizes.bounds(size)[0] < LEAST]
    if not small:
        return numbers
    constraints += [f"{size} >= {LEAST}" for size in small]
    return list(fitted.predicted(symbolic_sizes.symbols(names, constraints)))


def _sizes(meta: TensorMeta | None) -> tuple[Size, ...] | None:
    """The sizes of a value if it varies, else None."""
    assert meta is not None
    return meta.shape if any(map(symbolic_sizes.is_symbolic, meta.shape)) else None


def _shape(places: Callable[[object], int], meta: TensorMeta | None) -> tuple[int, ...] | None:
    """The shape of a value's buffer if the value varies, else None."""
    sizes = _sizes(meta)
    return None if sizes is None else tuple(map(places, sizes))


def _places(frame: Frame, lengths: Iterable[tuple[Size, int, int]], size: Size) -> int:
    """The number of places for a size in a buffer; ``lengths`` has each length with its limit and room."""
    for length, limit, more in lengths:
        difference = size - length
        if not symbolic_sizes.is_symbolic(difference) and abs(difference) <= NEAR:
            return limit + more
    return frame.bound(size)


def _with_shape(spec: ArraySpec, shape: tuple[int, ...] | None) -> ArraySpec:
    return spec if shape is None else dataclasses.replace(spec, shape=shape)


class VaryingExecutable:
    """A program for a bound as the executable of steps of certain lengths.

    It pads arguments that are not padded to its bound, and returns ``PaddedBuffer``s. ``ran`` is called before
    each run, unless it is None.
    """

    takes_padded = True

    __slots__ = (
        "_bound",
        "_client",
        "_lengths",
        "_numbers",
        "_placement",
        "_shapes",
        "program_name",
        "ran",
    )

    def __init__(
        self,
        bound: BoundProgram,
        lengths: tuple[int, ...],
        flags: Sequence[bool],
        backend: Backend,
    ) -> None:
        self.program_name = bound.program.name
        self.ran: Callable[[], None] | None = None
        self._bound = bound
        self._client = backend.client
        self._placement = bound.program.placement
        self._lengths = (*lengths, *flags)
        shapes = bound.output_shapes(lengths)
        self._shapes = tuple(
            None if shape == tuple(spec.shape) else shape
            for shape, spec in zip(shapes, bound.program.outputs, strict=True)
        )
        self._numbers: Buffer | None = None

    def execute(self, arguments: Sequence[Buffer]) -> list[Buffer]:
        """Enqueue one run and return its results; varying ones are padded to the bound."""
        results: list[Buffer] = []
        indivisible.do(self.deferred(arguments, results))
        return results

    def deferred(
        self, arguments: Sequence[Buffer], results: list[Buffer], known: bool = False
    ) -> Iterable[object]:
        """Like ``execute``, but runs when the iterable is consumed, and appends the results to ``results``."""
        if self.ran is not None:
            self.ran()
        self._bound.mark_used()
        if self._numbers is None:
            self._numbers = self._client.put(np.array(self._lengths, np.int32), self._placement)
        shapes = self._bound.inputs
        # an argument that does not vary here may be another program's padded result
        exact = exact_arguments(arguments, [slot for slot, _ in self._bound.aliases], shapes)
        varying = [
            a if shape is None else self._padded(a, shape)
            for a, shape in zip(exact, shapes, strict=False)
        ]
        given = [*varying, *exact[len(shapes) :], self._numbers]
        if not any(shape is not None for shape in self._shapes):
            return execution(self._bound.executable, given, results)
        raw: list[Array] = []
        run = execution(self._bound.executable, given, raw)
        padded = {
            position: PaddedBuffer(shape, self._client, self._placement)
            for position, shape in enumerate(self._shapes)
            if shape is not None
        }
        # no Python function may run from here on: donated values now exist only in the results
        arrays = map(raw.__getitem__, padded)
        filled = indivisible.storing_each("array", [*padded.values()], arrays)
        values: Iterable[Array] = map(padded.get, range(len(self._shapes)), raw)
        return itertools.chain(run, filled, map(results.append, values))

    def _padded(self, buffer: Buffer, shape: tuple[int, ...]) -> Buffer:
        """A value in a buffer of ``shape``: its own buffer if that has the shape, else a copy made on the host."""
        whole = whole_buffer(buffer)
        if whole.shape == shape:
            return whole
        counters.increment(PADDED_ON_HOST)
        return self._client.put(with_padding(self._on_host(buffer), shape), self._placement)

    def _on_host(self, buffer: Buffer) -> np.ndarray:
        if isinstance(buffer, PaddedBuffer):
            return buffer.on_host()
        return np.asarray(self._client.get(buffer))

    def serialize(self) -> bytes:
        """Raise NotImplementedError: the program for the bound is stored instead."""
        raise NotImplementedError(MSG_STORE)

    def memory_analysis(self) -> Mapping[str, int]:
        """The bytes that the program for the bound needs, by use."""
        return self._bound.executable.memory_analysis()

    def cost_analysis(self) -> Mapping[str, float]:
        """The compiler's estimates for the bound."""
        return self._bound.executable.cost_analysis()

    def optimized_hlo(self) -> str:
        """The compiled module for the bound as HLO text."""
        return self._bound.executable.optimized_hlo()

    def input_shardings(self) -> tuple[str | None, ...]:
        """It runs on one device: None for each argument."""
        return (None,) * (len(self._bound.program.inputs) - 1)

    def output_shardings(self) -> tuple[str | None, ...]:
        """It runs on one device: None for each result."""
        return (None,) * len(self._shapes)
