"""The lowering rules: one per operator overload, each a pure function on jax arrays.

A rule is found by its ``OpOverload``; registering a second rule for an overload is an error.
In-place and ``out=`` overloads need no rule of their own when a functional overload with the
same arguments has one: the dispatcher derives them from the operator schema.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Literal, TypeAlias, TypeVar

import torch
from torch._ops import OpOverload

from xla_core.contract.foreign_values import Attribute
from xla_core.jax_bridge.traced_values import TracedValue
from xla_core.operators import source_digests
from xla_core.operators.tensor_meta import TensorMeta
from xla_core.torch_bridge.operands import Operand, Operands

F = TypeVar("F", bound=Callable[..., object])
InLoops: TypeAlias = Literal["no", "yes", "begins", "ends"]

MSG_DUPLICATE: Final = (
    "duplicate lowering rule for {overload}: {where}; first registered at {first}"
)


class Absent:
    """Stands for an operator that the installed torch does not have; rules for it are left out."""

    def __getattr__(self, name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return self


class _Operators:
    """``torch.ops.aten``, with ``Absent`` for what this version of torch does not have."""

    def __getattr__(self, name: str) -> Attribute:
        packet = getattr(torch.ops.aten, name, None)
        return _Overloads(packet) if packet is not None else Absent()


class _Overloads:
    def __init__(self, packet: Operand) -> None:
        self._packet = packet

    def __getattr__(self, name: str) -> Attribute:
        return getattr(self._packet, name, None) or Absent()


aten: Final = _Operators()
"""The operators that rules are registered for, as in ``@rule(aten.mm.default)``."""


class Promotion(enum.Enum):
    """How an element-wise rule's operands are converted before it runs.

    The names and meanings are those of ``torch._prims_common.ELEMENTWISE_TYPE_PROMOTION_KIND``;
    ``NONE`` hands the operands over as they are.
    """

    NONE = "none"
    DEFAULT = "DEFAULT"
    NO_OPMATH = "NO_OPMATH"
    INT_TO_FLOAT = "INT_TO_FLOAT"
    ALWAYS_BOOL = "ALWAYS_BOOL"
    COMPLEX_TO_FLOAT = "COMPLEX_TO_FLOAT"
    BOOL_TO_LONG = "BOOL_TO_LONG"


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """One lowering rule.

    ``function`` takes the operator's arguments with every tensor replaced by a jax array and
    returns a jax array, or a tuple of them for an operator with several outputs. Arguments
    that cannot matter to the value (``layout``, ``device``, ``pin_memory``,
    ``memory_format``, ``generator``, ``non_blocking``) are removed before.
    ``lift`` names scalar arguments that reach the rule as 0-d arrays, because their value may
    change from step to step. With ``context`` the first argument is a ``RuleContext``.
    ``meta`` stands in for a meta kernel that PyTorch lacks: it takes the operator's arguments
    with meta tensors and returns what the operator returns, as meta tensors. With ``all_replicas``
    the operator talks to other replicas: a program with it runs on all of them. With ``whole_step``
    it means something together with others of the step: a program with it is lowered without functions for its
    repeats. ``in_loops`` says whether the body of a loop may have it all the same: ``no``, ``yes``, or ``begins``
    and ``ends`` for two that enclose a region, which must lie within one iteration. ``exact`` says that a result
    is the exact one, rounded once: in bfloat16 it is what float32 would give, rounded.
    """

    overload: OpOverload
    function: Callable[..., object]
    promotion: Promotion
    lift: frozenset[str]
    context: bool
    random: bool
    where: str
    meta: Callable[..., object] | None = None
    all_replicas: bool = False
    whole_step: bool = False
    in_loops: InLoops = "no"
    exact: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class ViewRule:
    """How a view operator reads from its base and how a write into the view reaches the base.

    ``get(base, *args)`` returns the view's value; ``put(base, value, *args)`` returns the base
    with ``value`` written where the view looks, or is None where PyTorch refuses such a write.
    ``overlaps`` says that the view may show an element of its base several times, so that a write to
    a part of it must not be followed by ``put`` of all of it.
    """

    overload: OpOverload
    get: Callable[..., TracedValue]
    put: Callable[..., object] | None
    where: str
    overlaps: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class MultiViewRule:
    """A view operator with several outputs (``split``, ``unbind``), as single-output views.

    ``expand(base_meta, *args)`` returns one ``(overload, args)`` per output.
    """

    overload: OpOverload
    expand: Callable[..., Sequence[tuple[OpOverload, tuple[object, ...]]]]
    where: str


ALL_OR_NOTHING: Final = -1000
"""In place of a dimension: the number says whether there is such a result."""


@dataclasses.dataclass(frozen=True, slots=True)
class InspectedRule:
    """How an operator is computed whose result, or whose error, depends on values.

    ``rule`` gives the results, as large as they can be, and then one number (int64, no dimensions), which
    alone is fetched where the operator is called: the size at which results are cut, or -1 for
    operands that the CPU refuses. ``dims`` says, given the operator's arguments, along which dimension
    each result is cut (None: not at all; ``ALL_OR_NOTHING``: at 0 an empty vector takes its place).
    With ``then`` there are no results yet: that rule, recorded with the number as the keyword
    ``size``, gives them. ``looks`` says, given the operator's arguments, whether the number matters.
    Only for ``platforms`` (None: all), elsewhere the operator runs on the CPU.
    """

    rule: Rule
    dims: Callable[..., Sequence[int | None]]
    then: Rule | None
    looks: Callable[..., bool] | None
    platforms: tuple[str, ...] | None


@dataclasses.dataclass(frozen=True, slots=True)
class RuleContext:
    """What a rule with ``context=True`` may ask: its outputs' metas, its operands' metas, randomness.

    ``outputs`` are the expected results; ``args`` mirrors the rule's positional arguments with
    each tensor given as its ``TensorMeta``; ``key`` is a jax PRNG key, unique to this call,
    for rules registered with ``random=True``.
    """

    outputs: tuple[TensorMeta | None, ...]
    args: Operands
    key: TracedValue = None


_rules: dict[OpOverload, Rule] = {}
_views: dict[OpOverload, ViewRule] = {}
_multi_views: dict[OpOverload, MultiViewRule] = {}
_inspected: dict[OpOverload, InspectedRule] = {}


_files: set[str] = set()
_without_file: dict[str, bytes] = {}


def source_files() -> frozenset[str]:
    """The files that define rules, and those that register them."""
    return frozenset(_files)


def unfiled() -> dict[str, bytes]:
    """Digests of the rules that no file defines (at a prompt, by ``exec``), by what they are rules for."""
    return dict(_without_file)


_is_file: Final = functools.cache(lambda name: Path(name).is_file())


def _note(subject: OpOverload, *functions: Callable[..., object] | None) -> None:
    """Remember where the functions of a rule come from: its lowering is part of cache keys."""
    frame = sys._getframe(2)
    while frame.f_code.co_filename == __file__ and frame.f_back is not None:
        frame = frame.f_back
    _files.add(frame.f_code.co_filename)
    for function in functions:
        while function is not None and not hasattr(function, "__code__"):
            function = getattr(function, "__wrapped__", getattr(function, "func", None))
        if function is None:
            continue
        code = function.__code__
        _files.add(code.co_filename)
        if not _is_file(code.co_filename):
            former = _without_file.get(str(subject), b"")
            _without_file[str(subject)] = former + source_digests.code_digest(code)


def _where(function: Callable[..., object]) -> str:
    code = getattr(function, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else repr(function)


def _claim(overload: OpOverload, where: str) -> None:
    if not isinstance(overload, OpOverload):
        raise TypeError(
            f"a lowering rule is registered for an operator overload such as aten.add.Tensor, got {overload!r}"
        )
    for table in (_rules, _views, _multi_views):
        if overload in table:
            raise ValueError(
                MSG_DUPLICATE.format(overload=overload, where=where, first=table[overload].where)
            )
    if overload in _inspected:
        first = _inspected[overload].rule.where
        raise ValueError(MSG_DUPLICATE.format(overload=overload, where=where, first=first))


def rule(
    *overloads: OpOverload,
    promotion: Promotion = Promotion.NONE,
    lift: Sequence[str] = (),
    context: bool = False,
    random: bool = False,
    meta: Callable[..., object] | None = None,
    all_replicas: bool = False,
    whole_step: bool = False,
    in_loops: InLoops = "no",
    exact: bool = False,
) -> Callable[[F], F]:
    """Register the decorated function as the lowering rule of each of ``overloads``; returns the function.

    ``promotion`` says how operands are converted first, ``lift`` names scalar arguments that come as 0-d
    arrays, ``meta`` is a meta kernel where PyTorch has none. With ``context`` the function's first argument is
    a ``RuleContext``, and so it is with ``random``, for operators that draw random numbers: it has the key.
    ``all_replicas``, ``whole_step``, ``in_loops`` and ``exact`` are those of ``Rule``. Raises ValueError for an
    overload that has a rule already.
    """

    def register(function: F) -> F:
        where = _where(function)
        for overload in overloads:
            if isinstance(overload, Absent):
                continue
            _claim(overload, where)
            _note(overload, function, meta)
            _rules[overload] = Rule(
                overload,
                function,
                promotion,
                frozenset(lift),
                context or random,
                random,
                where,
                meta,
                all_replicas,
                whole_step,
                in_loops,
                exact,
            )
        return function

    return register


def view_rule(
    overload: OpOverload,
    get: Callable[..., object],
    put: Callable[..., object] | None,
    overlaps: bool = False,
) -> None:
    """Register how to read and write through the view operator ``overload``."""
    where = _where(get)
    if isinstance(overload, Absent):
        return
    _claim(overload, where)
    _note(overload, get, put)
    _views[overload] = ViewRule(overload, get, put, where, overlaps)


def multi_view_rule(
    overload: OpOverload, expand: Callable[..., Sequence[tuple[OpOverload, tuple[object, ...]]]]
) -> None:
    """Register a view operator with several outputs as a list of single-output views."""
    where = _where(expand)
    if isinstance(overload, Absent):
        return
    _claim(overload, where)
    _note(overload, expand)
    _multi_views[overload] = MultiViewRule(overload, expand, where)


def _uncut(*_args: object, **_kwargs: object) -> Sequence[int | None]:
    return ()


def inspected_rule(
    *overloads: OpOverload,
    meta: Callable[..., object],
    dims: Callable[..., Sequence[int | None]] = _uncut,
    then: Callable[..., object] | None = None,
    then_meta: Callable[..., object] | None = None,
    looks: Callable[..., bool] | None = None,
    platforms: tuple[str, ...] | None = None,
    context: bool = False,
) -> Callable[[F], F]:
    """Register the decorated function as what is looked at first, see ``InspectedRule``.

    ``meta`` gives the results at their full size and the number, ``then_meta`` the results of ``then``.
    Raises ValueError on a duplicate.
    """

    def register(function: F) -> F:
        for overload in overloads:
            if isinstance(overload, Absent):
                continue
            _claim(overload, _where(function))
            _note(overload, function, meta, then, then_meta)
            _inspected[overload] = InspectedRule(
                _plain_rule(overload, function, meta, context),
                dims,
                None if then is None else _plain_rule(overload, then, then_meta),
                looks,
                platforms,
            )
        return function

    return register


def _plain_rule(
    overload: OpOverload,
    function: Callable[..., object],
    meta: Callable[..., object] | None,
    context: bool = False,
) -> Rule:
    where = _where(function)
    return Rule(overload, function, Promotion.NONE, frozenset(), context, False, where, meta)


def find_inspected(overload: OpOverload) -> InspectedRule | None:
    """Return how ``overload`` is computed after a look at values, or None."""
    return _inspected.get(overload)


def find_rule(overload: OpOverload) -> Rule | None:
    """Return the rule of ``overload``, or None."""
    return _rules.get(overload)


def rule_of(overload: OpOverload) -> Rule:
    """Return the rule of ``overload``, which another rule builds on. Raises LookupError without one."""
    rule = _rules.get(overload)
    if rule is None:
        raise LookupError(
            f"another lowering rule needs that of {overload}, which is not registered"
        )
    return rule


def find_view(overload: OpOverload) -> ViewRule | None:
    """Return the view rule of ``overload``, or None."""
    return _views.get(overload)


def find_multi_view(overload: OpOverload) -> MultiViewRule | None:
    """Return the several-outputs view rule of ``overload``, or None."""
    return _multi_views.get(overload)
