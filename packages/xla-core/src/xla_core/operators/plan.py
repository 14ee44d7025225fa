"""``Plan``: how one operator overload is recorded and lowered, decided when it is first met."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

import torch
from torch._ops import OpOverload

from xla_core.operators.decompositions import DecomposedRule
from xla_core.operators.lowering_registry import Rule, ViewRule
from xla_core.operators.run_rule import STORAGE_ARGUMENTS
from xla_core.operators.tensor_meta import TensorMeta
from xla_core.support import flags
from xla_core.torch_bridge.operands import NamedOperands, Operand

SEED: Final = "__seed"
"""The extra argument that carries a random operator's seed, a lifted int."""

_numbers = itertools.count()


class _Scalars:
    """What becomes of the numbers among operators' arguments; all plans, as they are few and stay."""

    constant = False
    plans: list[Plan] = []


def scalars_are_constants() -> bool:
    """Whether every number is a constant of its program; else those that may change are arguments."""
    return _Scalars.constant


def make_scalars_constants(constant: bool) -> None:
    """Let numbers be constants of the programs recorded from now on, or arguments again (the default).

    As constants a compiler sees them, and another number is another program. Seeds stay arguments.
    """
    _Scalars.constant = bool(constant)
    for plan in _Scalars.plans:
        plan.choose_lifted()


class Plan:
    """One overload as the trace knows it; plans are compared by identity, or by ``number``.

    ``overload`` is the operator the user called, whose meta kernel gives shapes, dtypes and errors.
    ``rule`` lowers it; for a write through a view it is the view's rule and ``is_put`` is set.
    ``lift_mask`` says, per positional argument, whether its scalars are lifted.

    The record is what a trace and the lowering need. Shapes and dtypes of results are inferred by
    ``dispatch.meta_inference.OperatorPlan``, which knows tensors and the CPU's errors.
    """

    __slots__ = (
        "number", "name", "overload", "rule", "is_put", "random", "lift_mask", "lift_names",
        "storage_arguments", "written", "host_tensors", "needs_all_replicas", "_metas", "_put",
    )  # fmt: skip

    def __init__(
        self,
        overload: OpOverload,
        rule: Rule | ViewRule | DecomposedRule | None,
        *,
        name: str | None = None,
        is_put: bool = False,
        written: tuple[int, ...] = (),
        host_tensors: bool = False,
    ) -> None:
        self.number = next(_numbers)
        self.name = name or str(overload)
        self.overload = overload
        self.rule = rule
        self.is_put = is_put
        self.random = isinstance(rule, Rule) and rule.random
        self.needs_all_replicas = isinstance(rule, Rule) and rule.all_replicas
        self.choose_lifted()
        self.storage_arguments = STORAGE_ARGUMENTS
        self.written = written
        self.host_tensors = host_tensors
        self._metas: dict[object, tuple[TensorMeta | None, ...]] = {}
        self._put: Plan | None = None
        _Scalars.plans.append(self)

    def choose_lifted(self) -> None:
        """Decide which of the operator's scalars are arguments of the program."""
        lift: frozenset[str] = frozenset()
        if isinstance(self.rule, Rule) and not _Scalars.constant:
            lift = self.rule.lift
        self.lift_mask = tuple(a.name in lift for a in self.overload._schema.arguments)
        self.lift_names = lift | {SEED}

    def __repr__(self) -> str:
        return self.name

    @property
    def repeats(self) -> bool:
        """Whether this is a view that may show one element repeatedly."""
        return isinstance(self.rule, ViewRule) and self.rule.put is None

    def copies_host_tensors(self) -> bool:
        """Whether CPU tensors of any shape are copied to the device: elementwise, where the user wants it."""
        return torch.Tag.pointwise in self.overload.tags and flags.COPY_CPU_OPERANDS.get()

    def infer(
        self, args: Sequence[Operand], kwargs: NamedOperands
    ) -> tuple[TensorMeta | None, ...]:
        """The metas of the results. Raises what PyTorch raises for these operands."""
        raise NotImplementedError(self.name)

    def put_plan(self, view: TensorMeta, base: TensorMeta) -> Plan | None:
        """The plan that writes through this view, or None where one element is seen repeatedly."""
        rule = self.rule
        assert isinstance(rule, ViewRule)
        if rule.put is None:
            if view.numel > base.numel:
                return None
            # An expand that repeats nothing is a reshape.
            rule = _reshape_rule(rule)
        if self._put is None or self._put.rule is not rule:
            self._put = type(self)(self.overload, rule, name=f"put:{self.name}", is_put=True)
        return self._put


_reshape_rules: dict[OpOverload, ViewRule] = {}


def _put_by_reshape(base: Operand, value: Operand, *_args: object) -> Operand:
    # expanding a dimension of size 1 to size 0 shows nothing of it
    return value.reshape(base.shape) if value.size else base


def _reshape_rule(rule: ViewRule) -> ViewRule:
    by_reshape = _reshape_rules.get(rule.overload)
    if by_reshape is None:
        by_reshape = ViewRule(rule.overload, rule.get, _put_by_reshape, rule.where)
        _reshape_rules[rule.overload] = by_reshape
    return by_reshape
