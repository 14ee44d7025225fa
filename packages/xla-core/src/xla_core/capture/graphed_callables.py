"""``make_graphed_callables``: functions and modules whose forward and backward pass are each a captured step.

The forward pass also returns the tensors that autograd saved, and the backward pass takes them as arguments. So
both are ordinary captured functions, and several forward passes may run before their backward passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from xla_core.capture.captured import Captured
from xla_core.capture.matching import shown
from xla_core.contract.foreign_values import ForeignObject
from xla_core.recording.storage import Storage, View
from xla_core.recording.xla_tensor import XLATensor, tensor_on
from xla_core.torch_bridge.operands import Gradients, Operand, Tree


class _Saved:
    """A tensor that autograd saved: the number of the returned tensor that it shows, and the view of that."""

    __slots__ = ("number", "view")

    def __init__(self, number: int, view: View | None) -> None:
        self.number = number
        self.view = view


class _Graphed:
    """The two captured passes of one callable."""

    def __init__(
        self, function: Callable[..., Tree], parameters: Sequence[Operand], warmup: int
    ) -> None:
        self._function = self.__wrapped__ = function
        self._parameters = list(parameters)
        self._own: set[int] = set()
        self._saved: list[XLATensor] = []
        self._handed: Sequence[Operand] = ()
        self._roots: tuple[list[Operand], list[Operand]] = [], []
        self._spec: object = None
        self.forward = Captured(self._forward, warmup)
        self.backward = Captured(self._backward, warmup)

    def _forward(self, *inputs: Operand) -> Operand:
        """The results and the saved tensors as flat lists; the autograd graph is kept for ``_backward``."""
        leaves = [_leaf(t) for t in inputs]
        self._own = {id(t._s) for t in self._parameters}
        saved: dict[int, int] = {}
        handed: list[XLATensor] = []

        def pack(t: Operand) -> Operand:
            if not isinstance(t, XLATensor) or id(t._s) in self._own:
                return t
            s: Storage = t._s
            if id(s) not in saved:
                saved[id(s)] = len(handed)
                handed.append(tensor_on(s))
            return _Saved(saved[id(s)], t._v)

        with torch.enable_grad(), saved_tensors_hooks(pack, self._unpack):
            results, self._spec = pytree.tree_flatten(self._function(*leaves))
        self._roots = results, [t for t in (*leaves, *self._parameters) if _wants_gradient(t)]
        return [t.detach() for t in results], handed

    def _unpack(self, packed: object) -> object:
        if not isinstance(packed, _Saved):
            return packed
        base = self._handed[packed.number]
        return shown(base._s, packed.view)

    def _backward(self, saved: Sequence[Operand], gradients: Sequence[Operand]) -> object:
        results, wanted = self._roots
        outputs = [t for t in results if t.requires_grad]
        self._handed = saved
        try:
            return torch.autograd.grad(
                outputs, wanted, gradients, retain_graph=True, allow_unused=True
            )
        finally:
            self._handed = ()

    def __call__(self, *inputs: Operand) -> Tree:
        graphed = self

        class Passes(torch.autograd.Function):
            @staticmethod
            def forward(ctx: FunctionCtx, *given: Operand) -> Tree:
                results, saved = graphed.forward(*given[: len(inputs)])
                ctx.saved = saved
                ctx.wanted = [_wants_gradient(t) for t in given]
                ctx.mark_non_differentiable(*[t for t in results if not t.is_floating_point()])
                return tuple(results)

            @staticmethod
            def backward(ctx: FunctionCtx, *gradients: torch.Tensor | None) -> Gradients:
                given = [
                    g for g, t in zip(gradients, graphed._roots[0], strict=True) if t.requires_grad
                ]
                computed = iter(graphed.backward(ctx.saved, given))
                return tuple(next(computed) if wanted else None for wanted in ctx.wanted)

        results = Passes.apply(*inputs, *self._parameters)
        return pytree.tree_unflatten(list(results), self._spec)


def _leaf(t: Operand) -> Operand:
    return t.detach().requires_grad_(t.requires_grad) if isinstance(t, torch.Tensor) else t


def _wants_gradient(t: Operand) -> bool:
    return isinstance(t, torch.Tensor) and t.requires_grad


def make_graphed_callables(
    callables: ForeignObject,
    sample_args: Operand,
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
) -> object:
    """Make functions or modules whose forward and backward pass are replayed.

    ``callables`` is one function or module, or a tuple of them. ``sample_args`` is a tuple of tensors for each,
    like those of later calls in shape, dtype and ``requires_grad``. A module's ``forward`` is replaced in its
    present mode (training or evaluation); in the other mode it is called as before. For a function, a new function
    is returned. Each is called ``num_warmup_iters`` times (at least 3) with its sample, forward and backward; that
    leaves no gradients, but buffers advance. With ``allow_unused_input`` (default: False) inputs that the results
    do not depend on have no gradient; otherwise they raise RuntimeError.
    """
    several = isinstance(callables, tuple)
    functions = callables if several else (callables,)
    samples = sample_args if several else (sample_args,)
    tensors = [
        _graphed(f, args, max(3, num_warmup_iters), allow_unused_input)
        for f, args in zip(functions, samples, strict=True)
    ]
    return tuple(tensors) if several else tensors[0]


def _graphed(
    function: ForeignObject, sample: Sequence[Operand], count: int, allow_unused: bool
) -> Operand:
    is_module = isinstance(function, torch.nn.Module)
    parameters = [p for p in function.parameters() if p.requires_grad] if is_module else []
    former = function.forward if is_module else function
    graphed = _Graphed(former, parameters, 0)
    for _ in range(count):
        inputs = [_leaf(t) for t in sample]
        results = [t for t in pytree.tree_leaves(graphed(*inputs)) if _wants_gradient(t)]
        wanted = [t for t in (*inputs, *parameters) if _wants_gradient(t)]
        if results and wanted:
            ones = [torch.ones_like(t) for t in results]
            torch.autograd.grad(results, wanted, ones, allow_unused=allow_unused)
    if not is_module:
        return graphed
    training = function.training

    def forward(*args: Operand, **kwargs: Tree) -> Tree:
        if kwargs or function.training != training:
            return former(*args, **kwargs)
        return graphed(*args)

    function.forward = forward
    return function
