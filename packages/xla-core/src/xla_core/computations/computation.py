"""``Computation``: a function of arrays that is a single operation in a step.

The operator ``xla::computation`` takes tensors, lifted numbers and, if it is random, a seed. Its plan contains the
function. Equal computations share a plan, so that steps with equal computations are equal.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import torch

from xla_core.dispatch.functional import find_trace, wrap_results
from xla_core.dispatch.meta_inference import OperatorPlan
from xla_core.jax_bridge.traced_values import TracedValue
from xla_core.operators.lowering_registry import Promotion, Rule, RuleContext
from xla_core.operators.plan import SEED, Plan
from xla_core.operators.tensor_meta import TensorMeta
from xla_core.recording import random_state
from xla_core.recording.trace import Trace
from xla_core.recording.xla_tensor import XLATensor, through_wrapper
from xla_core.support import caches
from xla_core.torch_bridge import op_library as op_library
from xla_core.torch_bridge.operands import NamedOperands, Operands

MSG_OPERAND: Final = (
    "{name}: operand {position} is {got}; operands of a computation are tensors on an xla device"
)
_DIGITS: Final = 12


Evaluate: TypeAlias = Callable[
    [Sequence[TracedValue], Sequence[TracedValue], Sequence[TracedValue], TracedValue],
    Sequence[TracedValue],
]
"""The function of a computation.

It takes jax arrays of its tensors, lifted floats, lifted ints, and a jax PRNG key for
this run (None unless it is random), and returns jax arrays of its results."""


class Computation:
    """A function of arrays whose results have known shapes and dtypes, as one operation of a step.

    ``name`` is part of the operation's name. ``outputs`` are the shapes and dtypes of the results. ``text`` must
    differ from that of all other computations, and be the same in all processes: it is part of the persistent
    cache's key. ``random`` (default: False): ``evaluate`` draws random numbers.
    """

    def __init__(
        self,
        name: str,
        text: bytes,
        outputs: Sequence[TensorMeta],
        evaluate: Evaluate,
        *,
        random: bool = False,
    ) -> None:
        self.name = name
        self.outputs = tuple(outputs)
        described = text + repr((name, self.outputs, random)).encode()
        self.digest: str = hashlib.sha256(described).hexdigest()
        self.plan: Plan = _plan_of(self, evaluate, random)

    def __call__(
        self,
        tensors: Sequence[torch.Tensor],
        floats: Sequence[float] = (),
        ints: Sequence[int] = (),
        seed: int | None = None,
    ) -> list[torch.Tensor]:
        """Record the operation; returns the results, which have no autograd history.

        ``floats`` and ``ints`` are the lifted numbers. ``seed`` is that of a random computation (default: the next
        one of the device's generator). Raises TypeError for an operand that is not on an ``xla`` device.
        """
        for position, tensor in enumerate(tensors):
            if not isinstance(tensor, XLATensor):
                got = type(tensor) if not isinstance(tensor, torch.Tensor) else tensor.device
                raise TypeError(MSG_OPERAND.format(name=self.name, position=position, got=got))
        kwargs = None if seed is None else {SEED: seed}
        recorded: list[torch.Tensor] = through_wrapper(self._record)(
            (list(tensors), list(floats), list(ints)), kwargs
        )
        return recorded

    def _record(self, args: Operands, kwargs: NamedOperands | None) -> object:
        trace: Trace = find_trace(args)
        if self.plan.random and kwargs is None:
            kwargs = {SEED: random_state.next_seed(trace.device.index)}
        with trace.lock:
            return wrap_results(trace, trace.record(self.plan, args, kwargs), "list")


_plans: caches.Bounded[str, Plan] = caches.Bounded("plans of computations")
_lock = threading.Lock()


def _plan_of(computation: Computation, evaluate: Evaluate, random: bool) -> Plan:
    """The plan that all computations equal to this one share."""
    with _lock:
        plan = _plans.get(computation.digest)
        if plan is None:
            plan = _plans.keep(computation.digest, _make_plan(computation, evaluate, random))
        return plan


def _make_plan(computation: Computation, evaluate: Evaluate, random: bool) -> Plan:
    overload = torch.ops.xla.computation.default
    outputs = computation.outputs

    def meta(*_args: object) -> list[torch.Tensor]:
        return [torch.empty(m.shape, dtype=m.dtype, device="meta") for m in outputs]

    def run(
        context: RuleContext,
        tensors: list[TracedValue],
        floats: list[TracedValue],
        ints: list[TracedValue],
    ) -> Sequence[TracedValue]:
        return evaluate(tensors, floats, ints, context.key)

    rule = Rule(
        overload,
        run,
        Promotion.NONE,
        frozenset({"floats", "ints"}),
        context=True,
        random=random,
        where=_where(evaluate),
        meta=meta,
    )
    return OperatorPlan(
        overload, rule, name=f"xla.{computation.name}.{computation.digest[:_DIGITS]}"
    )


def _where(evaluate: Evaluate) -> str:
    return (
        f"{type(evaluate).__module__}.{getattr(evaluate, '__qualname__', type(evaluate).__name__)}"
    )
