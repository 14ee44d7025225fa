"""Every operator of PyTorch's own operator database, on ``xla`` against the CPU.

Values, shapes, dtypes and gradients are compared; what is known to differ, and what runs on the CPU, stands
in the tables below with its reason. xla-core's test_op_db_smoke compares the exceptions for wrong operands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import scipy.stats
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

import torch_xla
from xla_core.testing.against_cpu import Outcome, attempt, fallbacks
from xla_core.testing.internals import overloads_with_rules
from xla_core.testing.op_db import (
    NO_GRADIENTS,
    assert_agrees,
    assert_gradients_agree,
    assert_same_metas,
    call,
    chosen,
    gradients_of,
    name_of,
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
NO_SUCH = "XLA has no such decomposition for all devices"
FALLBACKS = {
    "aten::linalg_ldl_factor_ex": NO_SUCH,
    "aten::linalg_ldl_solve": NO_SUCH,
    "aten::special_airy_ai": "a special function that no module of torch.nn reaches",
}

NO_SPARSE = "no xla tensor is compressed"
# Operators that must raise on ``xla`` where the CPU computes, and what they raise.
REFUSED: dict[str, tuple[type[Exception], str]] = {
    "sparse.mm.reduce": (NotImplementedError, NO_SPARSE),
    "sparse.sampled_addmm": (NotImplementedError, NO_SPARSE),
}


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
    samples = chosen(op, dtype, SAMPLES.get(dtype, SAMPLES_OTHERWISE))
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


@pytest.mark.parametrize(
    "op", [o for o in op_db if o.supports_autograd and torch.float32 in o.dtypes], ids=name_of
)
def test_gradients(op: OpInfo) -> None:
    if name_of(op) in NO_GRADIENTS or name_of(op) in REFUSED:
        pytest.skip(NO_GRADIENTS.get(name_of(op), "refused, see test_values"))
    samples = chosen(op, torch.float32, SAMPLES[torch.float32], requires_grad=True)
    with fallbacks() as ran_on_cpu:
        expected = [gradients_of(op, s, "cpu") for s in samples]
        got = [gradients_of(op, s, "xla") for s in samples]
        torch_xla.sync()
    for sample, e, g in zip(samples, expected, got, strict=True):
        if check_outcomes(e, g, sample):
            assert_gradients_agree(op, sample, torch.float32, e.value, g.value)
    assert ran_on_cpu.keys() <= FALLBACKS.keys()


def overloads_of(counter: str) -> Iterator[Any]:
    packet = getattr(torch.ops.aten, counter.removeprefix("aten::"))
    return (getattr(packet, name) for name in packet.overloads())


@pytest.mark.parametrize("counter", sorted(FALLBACKS))
def test_what_is_listed_as_a_fallback_has_no_rule(counter: str) -> None:
    assert not set(overloads_of(counter)) & set(overloads_with_rules())


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
