"""Parts for scans written by hand: the passes of a function, trees without None, autograd functions of trees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch
from functorch.compile import default_partition
from torch.utils import _pytree

from xla_core.computations.rematerialization import PartitionFn
from xla_core.torch_bridge.operands import AutogradContext, Gradients, TorchObject, Tree

MSG_PARTS: Final = "parts of the lengths {lengths} do not add up to a sequence of {whole} items"
MSG_GRADIENTS: Final = "{name}.backward returned {got} gradients for {wanted} arguments"


def value_and_grad_partitioned(
    fn: Callable[[object, object], tuple[object, object]],
    init: Tree,
    xs: Tree,
    partition_fn: PartitionFn = default_partition,
    is_fn_pure: bool = True,
) -> tuple[
    Callable[[Tree, Tree], tuple[Tree, tuple[Tree, Tree]]],
    Callable[[Tree, Tree], Tree],
    Callable[[Tree, tuple[Tree, Tree]], tuple[Tree, Tree]],
]:
    """Three functions that are the passes of ``scan`` over ``fn``, for loops that are written by hand.

    ``forward(carry, x)`` returns ``(carry, (y, activations))``. ``alias_input(stacked, xs)`` returns the stacked
    activations of all iterations, from those of ``forward`` and from ``xs``, which are not kept twice.
    ``backward(carry_gradient, (y_gradient, activations))`` returns the gradients of ``carry`` and ``x``, None for
    leaves without one. The carry is kept, and everything else is computed again. ``init``, ``xs``, ``partition_fn``
    and ``is_fn_pure`` are accepted as by ``scan`` and have no effect.
    """
    del init, xs, partition_fn, is_fn_pure

    def forward(carry: Tree, x: Tree) -> tuple[Tree, tuple[Tree, Tree]]:
        with torch.no_grad():
            result, y = fn(carry, x)
        return result, (y, carry)

    def alias_input(stacked: Tree, xs: Tree) -> Tree:
        return stacked, xs

    def backward(carry_gradient: Tree, rest: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
        y_gradient, activations = rest
        return _computed_again(fn, activations, (carry_gradient, y_gradient))

    return forward, alias_input, backward


def _computed_again(
    fn: Callable[[object, object], tuple[object, object]],
    activations: Tree,
    flowing: tuple[Tree, Tree],
) -> tuple[Tree, Tree]:
    """The gradients of the two arguments of ``fn``, from ``flowing``, the gradients of its results."""
    with torch.enable_grad():
        given = _pytree.tree_map(_fresh, activations)
        results = fn(*given)
    pairs = [
        (result, gradient)
        for result, gradient in zip(
            _pytree.tree_leaves(results), _pytree.tree_leaves(flowing), strict=True
        )
        if gradient is not None and isinstance(result, torch.Tensor) and result.requires_grad
    ]
    leaves, spec = _pytree.tree_flatten(given)
    wanted = [leaf for leaf in leaves if _differentiable(leaf)]
    remaining = iter(
        torch.autograd.grad([r for r, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True)
    )
    gradients = [next(remaining) if _differentiable(leaf) else None for leaf in leaves]
    carry, x = _pytree.tree_unflatten(gradients, spec)
    return carry, x


def _differentiable(leaf: Tree) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def _fresh(leaf: Tree) -> object:
    """A detached tensor with the same value that requires a gradient if its dtype allows; others unchanged."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.detach().requires_grad_(leaf.is_floating_point() or leaf.is_complex())


def tree_flatten_none(pytree: Tree) -> tuple[list[Tree], Callable[[Sequence[Tree]], Tree]]:
    """The leaves of a tree that are not None, and a function that makes the tree of such leaves again."""
    leaves, spec = _pytree.tree_flatten(pytree)
    there = [leaf is not None for leaf in leaves]

    def unflatten(flat: Sequence[Tree]) -> Tree:
        remaining = iter(flat)
        return _pytree.tree_unflatten([next(remaining) if t else None for t in there], spec)

    return [leaf for leaf in leaves if leaf is not None], unflatten


def split(seq: Sequence[Tree], *part_lengths: int) -> tuple[Sequence[Tree], ...]:
    """Cut ``seq`` into parts of these lengths. Raises ValueError unless they add up to the length of ``seq``."""
    if sum(part_lengths) != len(seq):
        raise ValueError(MSG_PARTS.format(lengths=part_lengths, whole=len(seq)))
    parts, start = [], 0
    for length in part_lengths:
        parts.append(seq[start : start + length])
        start += length
    return tuple(parts)


def pytreeify(cls: type[torch.autograd.Function]) -> type:
    """An autograd function like ``cls`` whose arguments and results are trees of tensors.

    ``cls.forward(ctx, *trees)`` returns a tree, or a tuple of trees. ``cls.backward(ctx, *gradients)`` takes trees
    like the results, and returns for each argument a tree like it, or None. Its backward pass raises ValueError for
    another number of gradients.
    """

    class OfTrees(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: AutogradContext, specs: list[TorchObject], spec: TorchObject, *leaves: Tree
        ) -> Tree:
            results = cls.forward(ctx, *_pytree.tree_unflatten(leaves, spec))
            flat, result_spec = _pytree.tree_flatten(results)
            specs.append(result_spec)
            ctx.trees = (spec, result_spec)
            return tuple(flat)

        @staticmethod
        def backward(ctx: AutogradContext, *gradients: torch.Tensor | None) -> Gradients:
            spec, results = ctx.trees
            trees = _pytree.tree_unflatten(gradients, results)
            result_spec = cls.backward(ctx, *(trees if isinstance(trees, tuple) else (trees,)))
            return None, None, *_flat_gradients(cls.__name__, result_spec, spec)

    class Trees(cls):  # type: ignore[misc]
        @classmethod
        def apply(cls, *trees: Tree) -> Tree:
            """The function's results, with an autograd history."""
            leaves, spec = _pytree.tree_flatten(trees)
            specs: list[object] = []
            flat = OfTrees.apply(specs, spec, *leaves)
            return _pytree.tree_unflatten(list(flat), specs[0])

    Trees.__name__ = Trees.__qualname__ = cls.__name__
    Trees.__doc__ = cls.__doc__
    return Trees


def _flat_gradients(name: str, gradients: Tree, spec: TorchObject) -> list[object]:
    """The gradients of all leaves; an argument whose gradient is None has None for each leaf."""
    given = gradients if isinstance(gradients, tuple) else (gradients,)
    children = spec.children()
    if len(given) != len(children):
        raise ValueError(MSG_GRADIENTS.format(name=name, got=len(given), wanted=len(children)))
    flat: list[Tree] = []
    for gradient, child in zip(given, children, strict=True):
        flat += [None] * child.num_leaves if gradient is None else _pytree.tree_leaves(gradient)
    return flat
