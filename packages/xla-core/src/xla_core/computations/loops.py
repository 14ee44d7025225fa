"""``while_loop`` and ``fori_loop``: loops of the program, whose number of iterations the device decides."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch._higher_order_ops.while_loop import (
    while_loop_dense,
    while_loop_op,
    while_loop_stack_output_op,
)

from xla_core.computations import forward_backward as joints
from xla_core.computations import pytrees
from xla_core.computations.computation import Computation, Evaluate
from xla_core.computations.forward_backward import Recorded
from xla_core.dispatch.functional import find_trace
from xla_core.operators.error_messages import ValueNeededError
from xla_core.operators.tensor_meta import tensor_meta
from xla_core.recording.xla_tensor import XLATensor, tensor_on
from xla_core.torch_bridge.operands import Tree
from xla_core.torch_bridge.torch_private import current_backward

BODY: Final = "the body of while_loop"
CONDITION: Final = "the condition of while_loop"
MSG_CONDITION: Final = (
    "the condition of while_loop must return a tensor with one element; it returned {got}"
)
MSG_CARRIED: Final = (
    "the body of while_loop must return tensors of the shapes and dtypes that are carried in. "
    "Got {got} but expected {wanted}"
)

# The smallest and largest index of no iteration, and the meta of such pairs.
_NO_INDEX: Final = np.array([np.iinfo(np.int64).max, np.iinfo(np.int64).min])
_EXTREMES: Final = tensor_meta((2,), torch.int64)


def while_loop(
    cond_fn: Callable[..., torch.Tensor],
    body_fn: Callable[..., object],
    carried_inputs: Sequence[Tree],
    additional_inputs: Sequence[Tree] | None = None,
) -> list[torch.Tensor]:
    """Run ``while cond_fn(*carried, *additional): carried = body_fn(*carried, *additional)`` on the device.

    Both functions are recorded once, so they must not read values or write in place; they may capture tensors.
    ``carried_inputs`` are ``xla`` tensors, or ints, which become tensors. ``additional_inputs`` (default: none) are
    tensors, or ints (sizes, from ``torch.compile``), which stay numbers. Returns the last carried tensors. They
    have no autograd history, since only the device knows the number of iterations; ``scan`` has gradients. Raises
    ValueError if the body changes shapes or dtypes, TypeError for tensors on other devices.
    """
    trace = find_trace(carried_inputs)
    given = [torch.tensor(t, device=trace.device) if type(t) is int else t for t in carried_inputs]
    carried, _ = pytrees.flatten(given, "`carried_inputs`")
    additional = list(additional_inputs or ())
    kept = [t for t in additional if not isinstance(t, int)]
    constants, _ = pytrees.flatten(kept, "`additional_inputs`")
    tensors = [*carried, *constants]
    metas = pytrees.metas(tensors)
    count = len(carried)

    def condition(given: list[XLATensor]) -> list[torch.Tensor]:
        outcome = cond_fn(*given[:count], *_in_place(additional, given[count:]))
        if not isinstance(outcome, torch.Tensor) or outcome.numel() != 1:
            got = tuple(outcome.shape) if isinstance(outcome, torch.Tensor) else repr(outcome)
            raise TypeError(MSG_CONDITION.format(got=got))
        return [outcome.reshape(()).bool()]

    def body(given: list[XLATensor]) -> list[torch.Tensor]:
        outcome = body_fn(*given[:count], *_in_place(additional, given[count:]))
        values, _ = pytrees.flatten(
            list(outcome) if isinstance(outcome, (tuple, list)) else [outcome],
            f"what {BODY} returned",
        )
        if pytrees.metas(values) != metas[:count]:
            got = list(pytrees.metas(values))
            raise ValueError(MSG_CARRIED.format(got=got, wanted=list(metas[:count])))
        return list(values)

    with torch.no_grad():
        unlike = [False] * len(metas)
        tested = joints.record(trace, CONDITION, condition, metas, unlike, wanted=False)
        repeated = joints.record(trace, BODY, body, metas, unlike, wanted=False)
        return _Loop(tested, repeated, count).run(tensors)


def _in_place(additional: Sequence[Tree], tensors: Sequence[jax.Array]) -> list[Tree]:
    """``additional`` with its tensors replaced by ``tensors``, in order."""
    rest = iter(tensors)
    return [t if isinstance(t, int) else next(rest) for t in additional]


@while_loop_op.py_impl(XLATensor)  # type: ignore[untyped-decorator]
def _of_torch(
    cond_fn: Callable[..., torch.Tensor],
    body_fn: Callable[..., object],
    carried_inputs: Sequence[Tree],
    additional_inputs: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, ...]:
    """``torch._higher_order_ops.while_loop`` on ``xla`` tensors.

    PyTorch's backward pass of a loop is a loop, too. It counts with a tensor on the CPU, which is moved to the
    device, and reads that tensor to find the values of an iteration, so that each iteration is a step of its own.
    """
    device = find_trace(carried_inputs).device
    carried = [t.to(device) if _is_cpu_number(t) else t for t in carried_inputs]
    try:
        return tuple(while_loop(cond_fn, body_fn, carried, additional_inputs))
    except ValueNeededError:
        if current_backward() < 0:
            raise
        result: tuple[torch.Tensor, ...]
        result = while_loop_dense(cond_fn, body_fn, tuple(carried), tuple(additional_inputs))
        return result


def _is_cpu_number(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == 0 and value.device.type == "cpu"


# If a gradient is wanted, PyTorch keeps the carried values of all iterations. Their number is not known before, so
# the condition is read in each iteration, as on PyTorch's other devices.
while_loop_stack_output_op.py_impl(XLATensor)(partial(while_loop_dense, stack_output=True))


def fori_loop(
    lower: torch.Tensor | int,
    upper: torch.Tensor | int,
    body_fun: Callable[..., object],
    *input_value: torch.Tensor,
) -> list[torch.Tensor]:
    """Apply ``body_fun`` ``upper - lower`` times; returns the number of iterations left (0) and the last values.

    ``body_fun`` takes and returns ``input_value`` (one tensor, or several), not the number of the iteration. The
    bounds are ints, or tensors of one element, which are not read. The results have no autograd history, as those
    of
    ``while_loop``.
    """
    # unsigned integers would wrap around where the lower bound is larger
    lower, upper = (n.long() if isinstance(n, torch.Tensor) else n for n in (lower, upper))
    left = upper - lower
    if not isinstance(left, torch.Tensor):
        left = torch.tensor(left, device=find_trace(input_value).device)

    def body(left: torch.Tensor, *values: torch.Tensor) -> list[torch.Tensor]:
        outcome = body_fun(*values)
        return [left - 1, *(outcome if isinstance(outcome, (tuple, list)) else [outcome])]

    return while_loop(lambda left, *_values: left > 0, body, (left, *input_value))


def _widened(seen: Sequence[Tree], indices: Sequence[Tree]) -> tuple[object, ...]:
    """The smallest and largest indices ``seen`` so far, updated with the ``indices`` of one more iteration."""
    return tuple(
        jnp.stack([jnp.minimum(s[0], jnp.min(i[..., 0])), jnp.maximum(s[1], jnp.max(i[..., 1]))])
        if i.size
        else s
        for s, i in zip(seen, indices, strict=True)
    )


@dataclasses.dataclass(frozen=True)
class _Loop:
    """A condition and a body, whose first ``carried`` arguments are the carried values."""

    condition: Recorded
    body: Recorded
    carried: int

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The values after the last iteration."""
        condition, body = self.condition, self.body
        captured = [tensor_on(s) for s in (*condition.captured, *body.captured)]
        programs = body.joint.programs
        key = (_Loop, id(condition.joint), self.carried)
        computation = programs.get(key)
        if computation is None:
            # the condition is kept because its id is in the key
            computation = programs[key] = (self._computation(), condition.joint)
        values = computation[0](
            [*tensors, *captured],
            [*condition.floats, *body.floats],
            [*condition.ints, *body.ints],
        )
        return condition.checked(body.checked(values))

    def _computation(self) -> Computation:
        condition, body = self.condition.joint, self.body.joint
        random = any(j.body.is_random(j.forward) for j in (condition, body))
        outputs = [*body.argument_metas[: self.carried], *[_EXTREMES] * self._checks()]
        text = b"\n".join((condition.text(), body.text(), str(self.carried).encode()))
        return Computation("while_loop", text, outputs, self._evaluate(), random=random)

    def _checks(self) -> int:
        return len(self.condition.ranges) + len(self.body.ranges)

    def _evaluate(self) -> Evaluate:
        parts = (self.condition, self.body)
        arguments = self.body.joint.arguments
        numbers = [(len(p.floats), len(p.ints)) for p in parts]
        captures = len(self.condition.captured)
        joints_ = [p.joint for p in parts]

        def evaluate(
            tensors: jax.Array, floats: jax.Array, ints: jax.Array, key: jax.Array
        ) -> list[jax.Array]:
            constants, captured = tensors[self.carried : arguments], tensors[arguments:]
            held = (captured[:captures], captured[captures:])
            cut_floats, cut_ints = numbers[0]
            own_floats = (floats[:cut_floats], floats[cut_floats:])
            own_ints = (ints[:cut_ints], ints[cut_ints:])

            def values(which: int, state: Tree) -> list[jax.Array]:
                count, carried = state
                joint = joints_[which]
                sources = (*carried, *constants, *reversed(held[which]))
                given = {v: sources[s] for v, s in joint.inputs.items()}
                own = None if key is None else jax.random.fold_in(key, 2 * count + which)
                scope = joint.body.run(
                    joint.forward, given, own_floats[which], own_ints[which], own
                )
                return [scope[v] for v in joint.outputs]

            def step(state: Tree) -> Tree:
                count, carried, seen = state
                outputs = values(1, (count, carried))
                tested = values(0, (count, carried))[1:] if self.condition.ranges else []
                after = tuple(outputs[: self.carried])
                indices = [*tested, *outputs[self.carried :]]
                return None if count is None else count + 1, after, _widened(seen, indices)

            count = None if key is None else jnp.uint32(0)
            start = (count, tuple(tensors[: self.carried]), (_NO_INDEX,) * self._checks())
            count, carried, seen = jax.lax.while_loop(
                lambda state: values(0, state[:2])[0], step, start
            )
            if self.condition.ranges:  # the condition has run once more than the body
                last = values(0, (count, carried))[1:]
                seen = (*_widened(seen[: len(last)], last), *seen[len(last) :])
            return [*carried, *seen]

        return evaluate
