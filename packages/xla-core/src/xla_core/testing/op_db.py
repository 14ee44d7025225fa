"""Samples of PyTorch's own operator database, and how their results are compared with the CPU's.

The database (``torch.testing._internal``) lists nearly every operator with samples of its operands.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar
from unittest import mock

import scipy.special
import torch
from torch.testing._internal import common_utils
from torch.testing._internal.opinfo import core
from torch.testing._internal.opinfo.core import ErrorInput, OpInfo, SampleInput
from torch.utils import _pytree

from xla_core.extension_api.operators import Operand
from xla_core.testing.against_cpu import (
    Outcome,
    assert_as_accurate,
    attempt,
    copy_to,
    forget_pending,
    gradients,
    leaves,
)

T = TypeVar("T")

# In which dtype the truth is computed when a result is not near the CPU's in the dtype itself.
REFERENCE = {
    torch.float32: torch.float64,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.complex64: torch.complex128,
}

# Where the CPU's float64 has 7 digits only, and no wider dtype tells the truth.
EXACT: dict[str, Callable[..., object]] = {
    f"special.bessel_{name}": getattr(scipy.special, name) for name in ("j0", "j1", "y0", "y1")
}

# Operators whose elements are uninitialized: only shape and dtype can be compared.
UNWRITTEN = {
    "empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided",
}  # fmt: skip

# Where the samples decide whether numbers are drawn. A sample for which the CPU's results differ from
# seed to seed is compared by shape and dtype; ``test_distributions`` compares what is drawn.
# The database's own seeds, which it sets inside of operators, are overridden for that.
RANDOM = {
    "bernoulli", "cauchy", "exponential", "geometric", "log_normal", "multinomial", "normal",
    "nn.functional.alpha_dropout", "nn.functional.dropout", "nn.functional.dropout2d",
    "nn.functional.dropout3d", "nn.functional.feature_alpha_dropout",
    "nn.functional.fractional_max_pool2d", "nn.functional.fractional_max_pool3d",
    "nn.functional.multi_head_attention_forward", "nn.functional.rrelu",
    "nn.functional.scaled_dot_product_attention",
    "pca_lowrank", "rand_like", "randint", "randint_like", "randn", "randn_like", "svd_lowrank",
    "uniform",
}  # fmt: skip

# The position of ``dim`` among the arguments of operators that return indices: which of several
# equal elements an index names is not defined, so the elements themselves are compared.
TIES = {"argsort": 0, "kthvalue": 1, "mode": 0, "sort": 0, "topk": 1}


def _product(left: torch.Tensor, values: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return (left * values.unsqueeze(-2)) @ right


# Factors are determined up to signs and order: what they multiply to is compared, and the values.
FACTORS: dict[str, Callable[..., object]] = {
    "linalg.eig": lambda w, v: (_product(v, w, torch.linalg.inv(v)),),
    "linalg.eigh": lambda w, v: (w, _product(v, w.to(v.dtype), v.mH)),
    "linalg.svd": lambda u, s, vh: (
        s,
        _product(u[..., : s.shape[-1]], s, vh[..., : s.shape[-1], :]),
    ),
    "svd": lambda u, s, v: (s, _product(u[..., : s.shape[-1]], s, v[..., : s.shape[-1]].mH)),
}

# Arguments that PyTorch itself wants on the CPU whatever the device.
HOST_ARGUMENTS = {"tensor_split"}

NO_GRADIENTS = {
    "pca_lowrank": "goes through a random projection",
    "svd_lowrank": "goes through a random projection",
}


def name_of(op: OpInfo) -> str:
    """The operator's name with its variant's, if it has one."""
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def _listed(samples: Callable[[], Iterable[T]]) -> list[T]:
    """What the database gives; it does not look for the ``unittest.TestCase`` that asks, for there is none.

    It would look through the stack and read the source line of each frame, twice for each sample: nine tenths of
    the time that comparing takes.
    """
    with (
        mock.patch.object(common_utils, "extract_test_fn", lambda: None),
        mock.patch.object(core, "extract_test_fn", lambda: None),
    ):
        return list(samples())


def all_samples(
    op: OpInfo, dtype: torch.dtype, requires_grad: bool = False, most: int | None = None
) -> list[SampleInput]:
    """The database's samples of the operator's operands, on the CPU: the first ``most`` (default: all)."""

    def drawn() -> Iterable[SampleInput]:
        samples = op.sample_inputs("cpu", dtype, requires_grad=requires_grad)
        return itertools.islice(samples, most)

    return _listed(drawn)


def all_mistakes(op: OpInfo) -> list[ErrorInput]:
    """The database's calls of the operator that raise."""
    return _listed(lambda: op.error_inputs("cpu"))


def chosen(
    op: OpInfo, dtype: torch.dtype, count: int, requires_grad: bool = False
) -> list[SampleInput]:
    """At most ``count`` samples of the operator in ``dtype``, spread over the database's list of them."""
    torch.manual_seed(0)
    samples = all_samples(op, dtype, requires_grad)
    step = max(1, -(-len(samples) // count))
    return samples[::step]


def widened(sample: SampleInput, dtype: torch.dtype) -> SampleInput:
    """The sample in the dtype of ``REFERENCE``, to compute the truth with."""

    def wide(leaf: Operand) -> Operand:
        if isinstance(leaf, torch.Tensor) and leaf.dtype == dtype:
            return leaf.detach().to(REFERENCE[dtype]).requires_grad_(leaf.requires_grad)
        return REFERENCE[dtype] if leaf is dtype else leaf

    return sample.transform(wide)


def operands(
    op: OpInfo, sample: SampleInput, device: str
) -> tuple[Operand, Operand, dict[str, Operand]]:
    """Copies of the sample's operands on ``device``: the first, the positional and the named ones."""
    args = sample.args if op.name in HOST_ARGUMENTS else copy_to(sample.args, device)
    source, kwargs = copy_to((sample.input, sample.kwargs), device)
    if "device" in kwargs:
        kwargs["device"] = torch.device(device)
    return source, args, kwargs


def call(op: OpInfo, sample: SampleInput, device: str) -> Operand:
    """What the operator gives for the sample on ``device``."""
    source, args, kwargs = operands(op, sample, device)
    return op(source, *args, **kwargs)


def is_random(op: OpInfo, sample: SampleInput) -> bool:
    """Whether what the CPU computes for the sample depends on its seed."""
    if op.name not in RANDOM:
        return False
    drawn = []
    for seed in range(4):
        torch.default_generator.manual_seed(seed)
        with mock.patch.object(torch, "manual_seed"):
            result = call(op, sample, "cpu")
        drawn.append([r for r in leaves(result) if isinstance(r, torch.Tensor)])
    first = drawn[0]
    return any(
        not torch.equal(a, b) for other in drawn[1:] for a, b in zip(first, other, strict=True)
    )


def assert_same_metas(got: Operand, expected: Operand) -> None:
    """Raise AssertionError unless shapes and dtypes agree."""
    described = [[(tuple(t.shape), t.dtype) for t in leaves(r)] for r in (got, expected)]
    assert described[0] == described[1]


def _dim_of(op: OpInfo, sample: SampleInput) -> int:
    """The dimension along which an operator of ``TIES``, or ``msort``, chooses or orders elements."""
    if op.name == "msort":
        return 0
    position = TIES[op.name]
    dim = sample.kwargs.get("dim", sample.args[position] if len(sample.args) > position else -1)
    assert isinstance(dim, int)
    return dim


def picked(op: OpInfo, sample: SampleInput, result: Operand) -> list[torch.Tensor]:
    """The values that indices among the results name, in place of the indices."""
    x = sample.input
    dim = _dim_of(op, sample)
    tensors = []
    for leaf in leaves(result):
        host = leaf.cpu()
        if leaf is leaves(result)[-1] and x.dim():
            keep = host if host.dim() == x.dim() else host.unsqueeze(dim)
            host = x.gather(dim, keep)
        tensors.append(host)
    return tensors


def assert_agrees(
    op: OpInfo, sample: SampleInput, dtype: torch.dtype, e: Operand, g: Operand
) -> None:
    """Raise AssertionError unless ``g``, of ``xla``, is as good as ``e``, which the CPU gave."""
    if op.name in UNWRITTEN or is_random(op, sample):
        assert_same_metas(g, e)
        return
    name = name_of(op)
    if op.name in TIES:
        assert_same_metas(g, e)
        e, g = picked(op, sample, e), picked(op, sample, g)
    if name in FACTORS:
        g, e = FACTORS[name](*_pytree.tree_map(lambda t: t.cpu(), tuple(g))), FACTORS[name](*e)
    reference = None
    if dtype in REFERENCE and name not in FACTORS and op.name not in TIES:
        reference = lambda: call(op, widened(sample, dtype), "cpu")  # noqa: E731
    if dtype is torch.float64 and name in EXACT:
        reference = lambda: torch.as_tensor(EXACT[name](sample.input.detach().numpy()))  # noqa: E731
    assert_as_accurate(g, e, reference)


def gradients_of(op: OpInfo, sample: SampleInput, device: str) -> Outcome:
    """The gradients by all operands that require one, on ``device``."""
    given = operands(op, sample, device)
    tensors = [t for t in _pytree.tree_leaves(given) if isinstance(t, torch.Tensor)]

    def backward() -> list[torch.Tensor | None]:
        source, args, kwargs = given
        result = op(source, *args, **kwargs)
        if sample.output_process_fn_grad is not None:
            result = sample.output_process_fn_grad(result)
        return gradients(result, [t for t in tensors if t.requires_grad])

    return attempt(backward)


def assert_gradients_agree(
    op: OpInfo, sample: SampleInput, dtype: torch.dtype, expected: Operand, got: Operand
) -> None:
    """Raise AssertionError unless ``gradients_of`` gave the same on both devices, in ``dtype``."""
    assert [x is None for x in got] == [x is None for x in expected]
    if is_random(op, sample):
        assert_same_metas(got, expected)
        return
    reference = None
    if op.name in (*TIES, "msort"):  # equal elements: any of them may have been taken
        expected, got = (
            _of_equal_elements(op, sample, expected),
            _of_equal_elements(op, sample, got),
        )
    elif dtype in REFERENCE:
        reference = lambda: gradients_of(op, widened(sample, dtype), "cpu").value  # noqa: E731
    assert_as_accurate(got, expected, reference)


def _of_equal_elements(
    op: OpInfo, sample: SampleInput, gradients: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The gradient of the sample's input, summed over elements that are equal along the operator's ``dim``."""
    if not gradients:  # argsort has none
        return []
    values, gradient = sample.input.detach(), gradients[0].detach().cpu().double()
    if not values.dim():
        return [gradient]
    dim = _dim_of(op, sample)
    ordered, places = values.sort(dim=dim, stable=True)
    ordered, gradient = ordered.movedim(dim, 0), gradient.gather(dim, places).movedim(dim, 0)
    begins = torch.ones(ordered.shape, dtype=torch.bool)
    begins[1:] = ordered[1:] != ordered[:-1]
    groups = begins.long().cumsum(0) - 1
    return [torch.zeros_like(gradient).scatter_add(0, groups, gradient)]


def errors_compared(op: OpInfo) -> tuple[int, str]:
    """How many of the calls that the database expects to fail the CPU refuses, and what ``xla`` does else.

    The text is empty if ``xla`` refuses each of them while it is recorded, with an exception of the CPU's type.
    """
    refused = 0
    for case in all_mistakes(op):
        sample = case.sample_input
        expected = attempt(partial(call, op, sample, "cpu")).error
        if expected is None:
            continue  # wrong on another device than the CPU
        refused += 1
        got = attempt(partial(call, op, sample, "xla")).error
        forget_pending()
        if not isinstance(got, type(expected)):
            raised = "no error" if got is None else repr(got)
            return refused, f"{sample}: {raised}; the CPU: {expected!r}"
    return refused, ""
