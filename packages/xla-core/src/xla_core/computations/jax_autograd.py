"""``j2t_autograd``: jax functions with gradients in PyTorch's autograd, by ``jax.vjp``."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import torch

from xla_core.computations import forward_backward as joints
from xla_core.computations.call_jax import call_jax
from xla_core.computations.forward_backward import Passes
from xla_core.torch_bridge.operands import Tree


def j2t_autograd(fn: Callable[..., object]) -> Callable[..., Tree]:
    """A differentiable function on ``xla`` tensors that calls ``fn``, a function on jax arrays.

    ``fn`` is called as by ``call_jax``. If a gradient is wanted, ``jax.vjp`` gives the forward pass, the values
    that it saves, and the backward pass; each pass is one operation of the step. Gradients of complex tensors
    follow PyTorch's convention.
    """

    @functools.wraps(fn)
    def inner(*args: Tree, **kwargs: Tree) -> Tree:
        leaves, structure = jax.tree.flatten((args, kwargs))
        places = tuple(
            i for i, a in enumerate(leaves) if isinstance(a, torch.Tensor) and a.requires_grad
        )
        if not places or not torch.is_grad_enabled():
            return call_jax(fn, args, kwargs)
        call = _Call(fn, structure, places)
        passes = _Vjp(call, [None if i in places else a for i, a in enumerate(leaves)])
        results = joints.run(passes, [leaves[i] for i in places])
        return jax.tree.unflatten(passes.structure, results)

    return inner


@dataclasses.dataclass(frozen=True)
class _Call:
    """``fn`` as a function of flattened arguments, of which those at ``places`` have gradients."""

    fn: Callable[..., object]
    structure: Hashable
    places: tuple[int, ...]

    def __call__(self, differentiable: Sequence[jax.Array], others: Sequence[jax.Array]) -> Tree:
        """The results of ``fn``, and the function from their gradients to those of the arguments at ``places``."""

        def flat(arrays: Sequence[jax.Array]) -> jax.Array:
            leaves = list(others)
            for i, array in zip(self.places, arrays, strict=True):
                leaves[i] = array
            args, kwargs = jax.tree.unflatten(self.structure, leaves)
            return self.fn(*args, **kwargs)

        return jax.vjp(flat, list(differentiable))


def _pull(vjp: Callable[[Tree], Tree], gradients: Tree) -> object:
    """The gradients of a function's arguments, from those of its results.

    A gradient of PyTorch is the complex conjugate of jax's.
    """

    def cotangent(array: jax.Array) -> jax.Array:
        if jnp.issubdtype(array.dtype, jnp.inexact):
            return jnp.conj(array)
        return np.zeros(array.shape, jax.dtypes.float0)  # as jax requires for integers

    (pulled,) = vjp(jax.tree.map(cotangent, gradients))
    return jax.tree.map(jnp.conj, pulled)


class _Vjp(Passes):
    """One call of a jax function, and its gradient."""

    def __init__(self, call: _Call, others: list[jax.Array]) -> None:
        self.call = call
        self.others = others
        self.structure: object = None
        self._kept: object = None

    def forward(
        self, tensors: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[bool], list[torch.Tensor]]:
        result, vjp = call_jax(self.call, (list(tensors), self.others), override_hash=self.call)
        results, self.structure = jax.tree.flatten(result)
        saved, self._kept = jax.tree.flatten(vjp)
        floating = [t.is_floating_point() or t.is_complex() for t in results]
        return results, floating, saved

    def backward(
        self, saved: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        vjp = jax.tree.unflatten(self._kept, saved)
        tangents = jax.tree.unflatten(self.structure, gradients)
        pulled: list[torch.Tensor | None] = call_jax(_pull, (vjp, tangents))
        return pulled
