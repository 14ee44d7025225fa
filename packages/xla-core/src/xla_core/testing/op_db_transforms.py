"""Transforms of ``torch.func`` over the samples of PyTorch's operator database, compared with the CPU's.

``jvp`` is forward-mode AD by all operands that have derivatives, ``grad`` reverse mode through ``torch.func``,
and ``vmap`` maps over all floating-point operands at once: each of them twice, the second time halved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import func
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils import _pytree

from xla_core.extension_api.operators import Operand
from xla_core.testing import op_db
from xla_core.testing.against_cpu import assert_as_accurate, weights

MODES: Final = ("jvp", "grad", "vmap")


def _has_derivative(leaf: Operand) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def _is_mapped(leaf: Operand) -> bool:
    return isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def as_function(
    op: OpInfo, sample: SampleInput, device: str, chosen: Callable[[object], bool]
) -> tuple[Callable[..., tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]:
    """The operator as a function of the operands that ``chosen`` picks, and those operands on ``device``.

    The function returns all tensors among the results.
    """
    operands, structure = _pytree.tree_flatten(op_db.operands(op, sample, device))
    places = [i for i, leaf in enumerate(operands) if chosen(leaf)]

    def function(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        filled = list(operands)
        for place, value in zip(places, values, strict=True):
            filled[place] = value
        source, args, kwargs = _pytree.tree_unflatten(filled, structure)
        result = op(source, *args, **kwargs)
        if sample.output_process_fn_grad is not None:
            result = sample.output_process_fn_grad(result)
        return tuple(r for r in _pytree.tree_leaves(result) if isinstance(r, torch.Tensor))

    return function, tuple(operands[i].detach() for i in places)


def transformed(op: OpInfo, sample: SampleInput, device: str, mode: str) -> Operand:
    """What the transform ``mode`` of the operator gives for the sample on ``device``."""
    function, values = as_function(
        op, sample, device, _is_mapped if mode == "vmap" else _has_derivative
    )
    if mode == "vmap":
        rows = tuple(torch.stack([value, value * 0.5]) for value in values)
        return func.vmap(function, randomness="different")(*rows)
    if mode == "jvp":
        return func.jvp(function, values, tuple(map(weights, values)))

    def total(*given: torch.Tensor) -> torch.Tensor:
        sums = [(r * weights(r)).sum() for r in function(*given) if _is_mapped(r)]
        return sum(s.real + s.imag if s.is_complex() else s for s in sums)  # type: ignore[return-value]

    return func.grad(total, argnums=tuple(range(len(values))))(*values)


def assert_agrees(
    op: OpInfo, sample: SampleInput, dtype: torch.dtype, mode: str, expected: Operand, got: Operand
) -> None:
    """Raise AssertionError unless ``got``, of ``xla``, is as good as ``expected``, of the CPU."""
    if op.name in op_db.UNWRITTEN or op_db.is_random(op, sample):
        op_db.assert_same_metas(got, expected)
        return
    reference = None
    if dtype in op_db.REFERENCE:
        reference = lambda: transformed(op, op_db.widened(sample, dtype), "cpu", mode)  # noqa: E731
    assert_as_accurate(got, expected, reference)
