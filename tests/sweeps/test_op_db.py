"""Every operator of PyTorch's own operator database, on ``xla`` against the CPU.

Values, shapes, dtypes, gradients and the exceptions for wrong operands are compared; what is known
to differ, and what runs on the CPU, stands in the tables below with its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import scipy.stats
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils import _pytree

import torch_xla
from xla_core.lowering.registry import find_inspected, find_rule
from xla_core.testing.against_cpu import (
    Outcome,
    assert_as_accurate,
    attempt,
    copy_to,
    fallbacks,
    gradients,
    leaves,
)

pytestmark = [
    pytest.mark.sweep,
    # The database itself calls deprecated forms, and fallbacks warn; both are checked otherwise.
    pytest.mark.filterwarnings("ignore"),
]

DTYPES = (torch.float32, torch.int64, torch.bool, torch.bfloat16)
# Programs are compiled for each operator: few samples, spread over the database's list of them.
SAMPLES = {torch.float32: 8}
SAMPLES_OTHERWISE = 4
# In which dtype the truth is computed when a result is not near the CPU's in the dtype itself.
REFERENCE = {torch.float32: torch.float64, torch.bfloat16: torch.float32}

NO_SUCH = "XLA has no such decomposition for all devices"
RARE = "a beta operator that no module of torch.nn reaches"
FALLBACKS = {
    "aten::hash_tensor": RARE,
    "aten::linalg_ldl_factor_ex": NO_SUCH,
    "aten::linalg_ldl_solve": NO_SUCH,
    "aten::special_airy_ai": "a special function that no module of torch.nn reaches",
}

NO_MEMORY = "views of an xla tensor do not expose the memory behind it"
NO_SPARSE = "xla tensors are dense"
# Operators that must raise on ``xla`` where the CPU computes, and what they raise.
REFUSED: dict[str, tuple[type[Exception], str]] = {
    "as_strided.partial_views": (RuntimeError, NO_MEMORY),
    "chalf": (TypeError, "XLA has no complex32"),
    "sparse.mm.reduce": (NotImplementedError, NO_SPARSE),
    "sparse.sampled_addmm": (NotImplementedError, NO_SPARSE),
    "to_sparse": (TypeError, NO_SPARSE),
}

# Whose elements nobody has written to: shape and dtype are all there is.
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
FACTORS: dict[str, Callable[..., Any]] = {
    "linalg.eig": lambda w, v: (_product(v, w, torch.linalg.inv(v)),),
    "linalg.eigh": lambda w, v: (w, _product(v, w.to(v.dtype), v.mH)),
    "linalg.svd": lambda u, s, vh: (
        s,
        _product(u[..., : s.shape[-1]], s, vh[..., : s.shape[-1], :]),
    ),
    "svd": lambda u, s, v: (s, _product(u[..., : s.shape[-1]], s, v[..., : s.shape[-1]].mH)),
}

# Results whose dtype is another than the CPU's, by operator and operand dtype.
OTHER_DTYPE = {
    (name, torch.bfloat16): "saved statistics stay float32, as PyTorch has on CUDA"
    for name in (
        "_batch_norm_with_update",
        "_native_batch_norm_legit",
        "native_batch_norm",
        "native_layer_norm",
    )
}

# Arguments that PyTorch itself wants on the CPU whatever the device.
HOST_ARGUMENTS = {"tensor_split"}

NO_GRADIENTS = {
    "pca_lowrank": "goes through a random projection",
    "svd_lowrank": "goes through a random projection",
}

VALUES_UNSEEN = "whether it is a mistake depends on values that only the device knows"
OVERLAP = "out= arguments that overlap operands in memory: xla tensors share no memory"
ERRORS_DIFFER = {
    "amax": "a tensor of 65 dimensions cannot be moved to the device to begin with",
    "amin": "a tensor of 65 dimensions cannot be moved to the device to begin with",
    "aminmax": "a tensor of 65 dimensions cannot be moved to the device to begin with",
    "as_strided_scatter": NO_MEMORY,
    "cat": OVERLAP,
    "gradient": "the sample's other operand is on the meta device",
    "kthvalue": OVERLAP,
    "masked_select": OVERLAP,
    "scatter": VALUES_UNSEEN,
    "scatter_add": VALUES_UNSEEN,
    "take": OVERLAP,
    "uniform": "the bounds are operands of the program, not looked at before it runs",
}


def name_of(op: OpInfo) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def chosen(op: OpInfo, dtype: torch.dtype, requires_grad: bool = False) -> list[SampleInput]:
    torch.manual_seed(0)
    found = list(op.sample_inputs("cpu", dtype, requires_grad=requires_grad))
    step = max(1, -(-len(found) // SAMPLES.get(dtype, SAMPLES_OTHERWISE)))
    return found[::step]


def widened(sample: SampleInput, dtype: torch.dtype) -> SampleInput:
    def wide(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.dtype == dtype:
            return leaf.detach().to(REFERENCE[dtype]).requires_grad_(leaf.requires_grad)
        return REFERENCE[dtype] if leaf is dtype else leaf

    return sample.transform(wide)


def operands(op: OpInfo, sample: SampleInput, device: str) -> tuple[Any, Any, dict[str, Any]]:
    args = sample.args if op.name in HOST_ARGUMENTS else copy_to(sample.args, device)
    source, kwargs = copy_to((sample.input, sample.kwargs), device)
    if "device" in kwargs:
        kwargs["device"] = torch.device(device)
    return source, args, kwargs


def call(op: OpInfo, sample: SampleInput, device: str) -> Any:
    source, args, kwargs = operands(op, sample, device)
    return op(source, *args, **kwargs)


def is_random(op: OpInfo, sample: SampleInput) -> bool:
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


def assert_same_metas(got: Any, expected: Any) -> None:
    described = [[(tuple(t.shape), t.dtype) for t in leaves(r)] for r in (got, expected)]
    assert described[0] == described[1]


def picked(op: OpInfo, sample: SampleInput, result: Any) -> list[torch.Tensor]:
    """The values that indices among the results name, in place of the indices."""
    x = sample.input
    position = TIES[op.name]
    dim = sample.kwargs.get("dim", sample.args[position] if len(sample.args) > position else -1)
    found = []
    for leaf in leaves(result):
        host = leaf.cpu()
        if leaf is leaves(result)[-1] and x.dim():
            keep = host if host.dim() == x.dim() else host.unsqueeze(dim)
            host = x.gather(dim, keep)
        found.append(host)
    return found


def assert_agrees(op: OpInfo, sample: SampleInput, dtype: torch.dtype, e: Any, g: Any) -> None:
    if op.name in UNWRITTEN or is_random(op, sample):
        assert_same_metas(g, e)
        return
    name = name_of(op)
    if op.name in TIES:
        assert_same_metas(g, e)
        e, g = picked(op, sample, e), picked(op, sample, g)
    if name in FACTORS:
        g, e = FACTORS[name](*_pytree.tree_map(lambda t: t.cpu(), tuple(g))), FACTORS[name](*e)
    if (op.name, dtype) in OTHER_DTYPE:
        g = [a.cpu().to(b.dtype) for a, b in zip(leaves(g), leaves(e), strict=True)]
    reference = None
    if dtype in REFERENCE and name not in FACTORS and op.name not in TIES:
        reference = lambda: call(op, widened(sample, dtype), "cpu")  # noqa: E731
    assert_as_accurate(g, e, reference)


def check_outcomes(e: Outcome, g: Outcome, culprit: Any) -> bool:
    """Whether there are values to compare: both calls gave one. Raises when only one did."""
    if e.error is not None:
        assert g.error is not None, f"{culprit}: the CPU raised {e.error!r}"
        return False
    if g.error is not None:
        raise g.error
    return True


def check_refused(op: OpInfo, samples: list[SampleInput]) -> None:
    refusal, reason = REFUSED[name_of(op)]
    errors = [attempt(lambda s=s: torch_xla.sync(call(op, s, "xla"))).error for s in samples]
    assert any(isinstance(error, refusal) for error in errors), (reason, errors)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", op_db, ids=name_of)
def test_values(op: OpInfo, dtype: torch.dtype) -> None:
    if dtype not in op.dtypes:
        pytest.skip("PyTorch has no CPU kernel for this dtype")
    samples = chosen(op, dtype)
    if name_of(op) in REFUSED:
        check_refused(op, samples)
        return
    with fallbacks() as ran_on_cpu:
        expected = [attempt(lambda s=s: call(op, s, "cpu")) for s in samples]
        got = [attempt(lambda s=s: call(op, s, "xla")) for s in samples]
        torch_xla.sync()
    for sample, e, g in zip(samples, expected, got, strict=True):
        if check_outcomes(e, g, sample):
            assert_agrees(op, sample, dtype, e.value, g.value)
    assert ran_on_cpu.keys() <= FALLBACKS.keys()


def gradients_of(op: OpInfo, sample: SampleInput, device: str) -> Outcome:
    given = operands(op, sample, device)
    tensors = [t for t in _pytree.tree_leaves(given) if isinstance(t, torch.Tensor)]

    def backward() -> list[torch.Tensor | None]:
        source, args, kwargs = given
        result = op(source, *args, **kwargs)
        if sample.output_process_fn_grad is not None:
            result = sample.output_process_fn_grad(result)
        return gradients(result, [t for t in tensors if t.requires_grad])

    return attempt(backward)


@pytest.mark.parametrize(
    "op", [o for o in op_db if o.supports_autograd and torch.float32 in o.dtypes], ids=name_of
)
def test_gradients(op: OpInfo) -> None:
    if name_of(op) in NO_GRADIENTS or name_of(op) in REFUSED:
        pytest.skip(NO_GRADIENTS.get(name_of(op), "refused, see test_values"))
    samples = chosen(op, torch.float32, requires_grad=True)
    with fallbacks() as ran_on_cpu:
        expected = [gradients_of(op, s, "cpu") for s in samples]
        got = [gradients_of(op, s, "xla") for s in samples]
        torch_xla.sync()
    for sample, e, g in zip(samples, expected, got, strict=True):
        if not check_outcomes(e, g, sample):
            continue
        assert [x is None for x in g.value] == [x is None for x in e.value]
        if is_random(op, sample):
            assert_same_metas(g.value, e.value)
            continue
        wide = lambda s=sample: gradients_of(op, widened(s, torch.float32), "cpu").value  # noqa: E731
        assert_as_accurate(g.value, e.value, wide)
    assert ran_on_cpu.keys() <= FALLBACKS.keys()


@pytest.mark.parametrize("op", [o for o in op_db if o.error_inputs_func is not None], ids=name_of)
def test_errors(op: OpInfo) -> None:
    if name_of(op) in ERRORS_DIFFER:
        pytest.skip(ERRORS_DIFFER[name_of(op)])
    torch.manual_seed(0)
    for wrong in op.error_inputs("cpu"):
        sample = wrong.sample_input
        expected = attempt(lambda s=sample: call(op, s, "cpu")).error
        if expected is None:
            continue  # wrong on another device than the CPU
        got = attempt(lambda s=sample: torch_xla.sync(call(op, s, "xla"))).error
        assert isinstance(got, type(expected)), f"{sample}: {got!r}; CPU: {expected!r}"


def overloads_of(counter: str) -> Iterator[Any]:
    packet = getattr(torch.ops.aten, counter.removeprefix("aten::"))
    return (getattr(packet, name) for name in packet.overloads())


@pytest.mark.parametrize("counter", sorted(FALLBACKS))
def test_what_is_listed_as_a_fallback_has_no_rule(counter: str) -> None:
    assert not [o for o in overloads_of(counter) if find_rule(o) or find_inspected(o)]


COUNT = 4000
# What a random operator draws, as a function of the device: many numbers of one distribution.
DRAWN: dict[str, Callable[[str], torch.Tensor]] = {
    "bernoulli": lambda d: torch.full((COUNT,), 0.3, device=d).bernoulli(),
    "cauchy": lambda d: torch.empty(COUNT, device=d).cauchy_(1.0, 2.0),
    "exponential": lambda d: torch.empty(COUNT, device=d).exponential_(1.5),
    "geometric": lambda d: torch.empty(COUNT, device=d).geometric_(0.2),
    "log_normal": lambda d: torch.empty(COUNT, device=d).log_normal_(0.5, 0.7),
    "multinomial": lambda d: torch.multinomial(
        torch.tensor([0.1, 0.5, 0.15, 0.25], device=d), COUNT, replacement=True
    ),
    "normal": lambda d: torch.normal(torch.full((COUNT,), 2.0, device=d), 3.0),
    "rand": lambda d: torch.rand(COUNT, device=d),
    "randint": lambda d: torch.randint(-3, 9, (COUNT,), device=d),
    "randn": lambda d: torch.randn(COUNT, device=d),
    "uniform": lambda d: torch.empty(COUNT, device=d).uniform_(-1.0, 4.0),
    "dropout": lambda d: torch.nn.functional.dropout(torch.ones(COUNT, device=d), 0.3),
    "dropout2d": lambda d: torch.nn.functional.dropout2d(torch.ones(40, 100, 1, 1, device=d), 0.3),
    "dropout3d": lambda d: torch.nn.functional.dropout3d(
        torch.ones(40, 100, 1, 1, 1, device=d), 0.3
    ),
    "alpha_dropout": lambda d: torch.nn.functional.alpha_dropout(
        torch.ones(COUNT, device=d), 0.3, training=True
    ),
    "feature_alpha_dropout": lambda d: torch.nn.functional.feature_alpha_dropout(
        torch.ones(40, 100, 1, device=d), 0.3, training=True
    ),
    "rrelu": lambda d: torch.nn.functional.rrelu(-torch.ones(COUNT, device=d), training=True),
}


@pytest.mark.parametrize("name", sorted(DRAWN))
def test_distributions(name: str) -> None:
    torch.manual_seed(0)
    torch_xla.manual_seed(0)
    host, device = DRAWN[name]("cpu"), DRAWN[name]("xla").cpu()
    assert_same_metas(device, host)
    # Two samples of one distribution are told apart once in ten thousand; the seeds are fixed.
    found = scipy.stats.ks_2samp(host.flatten().numpy(), device.flatten().numpy())
    assert found.pvalue > 1e-4
