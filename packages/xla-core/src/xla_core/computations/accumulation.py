"""``gradient_accumulation``: sums the gradients of several training steps in one loop of the program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import jax
import jax.numpy as jnp
import torch
from torch import nn

from xla_core.computations import forward_backward as joints
from xla_core.computations import pytrees
from xla_core.computations.body_recorder import needed
from xla_core.computations.computation import Computation
from xla_core.computations.forward_backward import Recorded
from xla_core.operators.tensor_meta import TensorMeta, tensor_meta
from xla_core.recording.xla_tensor import XLATensor, tensor_on
from xla_core.torch_bridge.dtypes import numpy_dtype
from xla_core.torch_bridge.operands import Tree

WHAT: Final = "train_step"
MSG_NONE: Final = "iterable_tensors cannot be empty"
MSG_NO_TENSOR: Final = "Element {number} of iterable_tensors is not a tensor"
MSG_EMPTY: Final = "Element {number} of iterable_tensors is empty"
MSG_LENGTH: Final = "Element {number} of iterable_tensors has inconsistent first dimension"
MSG_RESULTS: Final = (
    "train_step must return a loss and {count} carried tensors of unchanged shapes and dtypes. "
    "Got {got} but expected {wanted} after the loss"
)
MSG_LOSS: Final = "train_step must return a loss of one element that requires a gradient; got {got}"
MSG_HISTORY: Final = (
    "train_step uses a tensor of shape {shape} that was computed outside of it and has an autograd history; "
    "compute it inside, or detach() it"
)


def gradient_accumulation(
    train_step: Callable[..., object],
    iterable_tensors: Sequence[torch.Tensor],
    model: nn.Module,
    *carried_tensors: torch.Tensor,
) -> Tree:
    """Run ``train_step`` and its backward pass for each slice of ``iterable_tensors``, as one loop.

    A slice is taken along the first dimension. ``train_step(*slices, *carried)`` returns a loss of one element, or
    a tuple of the loss and the next carried tensors. The mean of the losses is computed, and its gradients are
    added to the ``.grad`` of the model's parameters (and of other leaves that ``train_step`` uses). ``train_step``
    is recorded once, so it must not read values, call ``backward()`` itself, or write in place. Returns the mean
    loss, or a tuple of it and the last carried tensors, without autograd history. Raises ValueError for tensors
    without a common first dimension and for a loss or carried tensors that do not fit, RuntimeError if
    ``train_step`` uses a tensor that was computed outside and has a history.
    """
    length = _length(iterable_tensors)
    items, _ = pytrees.flatten(list(iterable_tensors), "`iterable_tensors`")
    carried, _ = pytrees.flatten(list(carried_tensors), "`carried_tensors`")
    del model  # train_step captures its parameters
    recorded = _recorded(train_step, items, pytrees.metas(carried))
    programs = recorded.joint.programs
    key = (gradient_accumulation, len(items), length)
    computation = programs.get(key)
    if computation is None:
        computation = programs[key] = _computation(recorded, len(items), length)
    captured = [tensor_on(s) for s in recorded.captured]
    with torch.no_grad():
        results = recorded.checked(
            computation([*items, *carried, *captured], recorded.floats, recorded.ints)
        )
        loss, after, gradients = (
            results[0],
            results[1 : 1 + len(carried)],
            results[1 + len(carried) :],
        )
        _accumulate(recorded, gradients)
    return (loss, *after) if carried else loss


def _recorded(
    train_step: Callable[..., Tree], items: Sequence[XLATensor], carries: Sequence[TensorMeta]
) -> Recorded:
    """Record one step with its gradient. Raises RuntimeError if it uses a tensor that has a history."""
    slices = [tensor_meta(m.shape[1:], m.dtype) for m in pytrees.metas(items)]

    def step(given: list[XLATensor]) -> list[torch.Tensor]:
        values = train_step(*given[: len(items)], *given[len(items) :])
        loss, *after = values if isinstance(values, (tuple, list)) else (values,)
        _check(loss, after, carries)
        return [loss.reshape(()), *(t.detach() for t in after)]

    with torch.enable_grad():
        recorded = joints.record(
            items[0]._s.trace,
            WHAT,
            step,
            [*slices, *carries],
            [False] * (len(slices) + len(carries)),
            wanted=True,
        )
    for tensor in recorded.differentiable:
        if tensor.grad_fn is not None:
            raise RuntimeError(MSG_HISTORY.format(shape=tuple(tensor.shape)))
    return recorded


def _length(iterable_tensors: Sequence[torch.Tensor]) -> int:
    if not iterable_tensors:
        raise ValueError(MSG_NONE)
    for number, tensor in enumerate(iterable_tensors):
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(MSG_NO_TENSOR.format(number=number))
        if tensor.numel() == 0 or not tensor.dim():
            raise ValueError(MSG_EMPTY.format(number=number))
        if len(tensor) != len(iterable_tensors[0]):
            raise ValueError(MSG_LENGTH.format(number=number))
    return len(iterable_tensors[0])


def _check(loss: Tree, after: Sequence[Tree], carries: Sequence[Tree]) -> None:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        got = pytrees.metas([loss])[0] if isinstance(loss, torch.Tensor) else repr(loss)
        raise ValueError(MSG_LOSS.format(got=got))
    values, _ = pytrees.flatten(list(after), "what train_step returned")
    if pytrees.metas(values) != tuple(carries):
        text = MSG_RESULTS.format(
            count=len(carries), got=list(pytrees.metas(values)), wanted=list(carries)
        )
        raise ValueError(text)


def _accumulate(recorded: joints.Recorded, gradients: Sequence[torch.Tensor]) -> None:
    """Add the sums of gradients to the ``.grad`` of the tensors that have one."""
    joint = recorded.joint
    remaining = iter(gradients)
    for tensor, gradient in zip(
        recorded.differentiable, joint.gradients[joint.arguments :], strict=True
    ):
        if gradient is None:
            continue
        addend = next(remaining)
        if tensor.grad is None:
            tensor.grad = addend
        else:
            tensor.grad.add_(addend)


def _computation(recorded: Recorded, items: int, length: int) -> Computation:
    joint = recorded.joint
    body = joint.body
    gradients = [g for g in joint.gradients if g is not None]
    entries = needed(body.entries, (*joint.outputs, *gradients))
    loss, *others = joint.outputs
    after, indices = others[: joint.arguments - items], others[joint.arguments - items :]
    metas = [body.meta(v) for v in (loss, *after, *gradients)]
    stacks = [tensor_meta((length, *m.shape), m.dtype) for m in map(body.meta, indices)]

    def evaluate(
        tensors: jax.Array, floats: jax.Array, ints: jax.Array, key: jax.Array
    ) -> list[jax.Array]:
        captured = tensors[joint.arguments :]
        share = jnp.asarray(1 / length, numpy_dtype(metas[0].dtype))

        def step(state: Tree, item: jax.Array) -> tuple[Tree, Tree]:
            total, carried, sums = state
            number, slices = item
            sources = (*slices, *carried, *reversed(captured))
            given = {v: sources[s] for v, s in joint.inputs.items()}
            if joint.tangents[0] is not None:
                given[joint.tangents[0]] = share
            own = None if key is None else jax.random.fold_in(key, number)
            scope = body.run(entries, given, floats, ints, own)
            added = tuple(s + scope[g] for s, g in zip(sums, gradients, strict=True))
            after_it = tuple(scope[v] for v in after)
            return (total + scope[loss] * share, after_it, added), [scope[v] for v in indices]

        zeros = [jnp.zeros(m.shape, numpy_dtype(m.dtype)) for m in metas]
        start = (zeros[0], tuple(tensors[items : joint.arguments]), tuple(zeros[1 + len(after) :]))
        numbers = None if key is None else jnp.arange(length)
        (total, carried, sums), seen = jax.lax.scan(
            step, start, (numbers, tuple(tensors[:items])), length
        )
        return [total, *carried, *sums, *seen]

    text = joint.text() + repr((items, length)).encode()
    random = body.is_random(entries)
    return Computation("gradient_accumulation", text, [*metas, *stacks], evaluate, random=random)
