"""Random rules: moments, bounds and distributions of large samples, and dependence on the key."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

import xla_core.lowering.rules  # noqa: F401  (registers the rules)
from xla_core.testing.rules import check, evaluate

aten = torch.ops.aten

COUNT = 40_000
# Five standard errors: a true rule fails one run in a million, and the seeds are fixed anyway.
SIGMAS = 5.0


def assert_mean(sample: torch.Tensor, mean: float, deviation: float) -> None:
    """The sample mean is within five standard errors of ``mean``."""
    error = SIGMAS * deviation / math.sqrt(sample.numel())
    assert abs(sample.double().mean().item() - mean) < error


def assert_distribution(sample: torch.Tensor, cdf: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Kolmogorov-Smirnov: the distance to ``cdf`` is below the level of one in a million."""
    ordered = sample.double().flatten().sort().values
    count = ordered.numel()
    expected = cdf(ordered)
    ranks = torch.arange(count, dtype=torch.float64)
    distance = torch.maximum(
        (expected - ranks / count).abs(), (expected - (ranks + 1) / count).abs()
    )
    assert distance.max().item() < 2.7 / math.sqrt(count)


def normal_cdf(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * (1 + torch.erf(x / math.sqrt(2)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniform(dtype: torch.dtype) -> None:
    (sample,) = evaluate(aten.uniform.default, torch.zeros(COUNT, dtype=dtype), -2.0, 3.0)
    assert sample.min() >= -2 and sample.max() < 3
    assert_distribution(sample, lambda x: (x + 2) / 5)
    (unit,) = evaluate(aten.rand.default, [COUNT], dtype=dtype)
    assert unit.min() >= 0 and unit.max() < 1
    assert_distribution(unit, lambda x: x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_uniform_never_gives_its_upper_bound(dtype: torch.dtype) -> None:
    # Above 1024 neighbouring float32 are 2**-13 apart: most draws round, many to a bound.
    low = 1024.0
    high = low + (8 if dtype == torch.bfloat16 else 1 if dtype == torch.float16 else 2.0**-13)
    (sample,) = evaluate(aten.uniform.default, torch.zeros(COUNT, dtype=dtype), low, high)
    assert sample.max().item() < high
    assert sample.min().item() >= low


def test_bfloat16_uniform_has_the_right_mean() -> None:
    (sample,) = evaluate(aten.rand.default, [COUNT], dtype=torch.bfloat16)
    assert sample.max() < 1
    # multiples of 2**-8 have a mean of (1 - 2**-8) / 2
    assert_mean(sample, 0.5 - 2.0**-9, math.sqrt(1 / 12))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normal(dtype: torch.dtype) -> None:
    (sample,) = evaluate(aten.randn.default, [COUNT], dtype=dtype)
    assert_distribution(sample, normal_cdf)
    (sample,) = evaluate(aten.normal_functional.default, torch.zeros(COUNT, dtype=dtype), 2.0, 0.5)
    assert_distribution((sample - 2) / 0.5, normal_cdf)


def test_normal_with_tensors() -> None:
    mean, std = torch.tensor([[1.0], [-1.0]]), torch.full((2, COUNT), 2.0)
    (sample,) = evaluate(aten.normal.Tensor_Tensor, mean, std)
    assert_distribution((sample[1] + 1) / 2, normal_cdf)
    (sample,) = evaluate(aten.normal.Tensor_float, torch.zeros(COUNT), 3.0)
    assert_distribution(sample / 3, normal_cdf)
    (sample,) = evaluate(aten.normal.float_Tensor, 1.5, torch.ones(COUNT))
    assert_distribution(sample - 1.5, normal_cdf)
    (sample,) = evaluate(aten.normal.float_float, 1.5, 2.0, [COUNT])
    assert_distribution((sample - 1.5) / 2, normal_cdf)


def test_complex_normal_has_variance_one() -> None:
    (sample,) = evaluate(aten.randn.default, [COUNT], dtype=torch.complex64)
    assert_distribution(sample.real * math.sqrt(2), normal_cdf)
    assert_distribution(sample.imag * math.sqrt(2), normal_cdf)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.float32])
def test_randint(dtype: torch.dtype) -> None:
    (sample,) = evaluate(aten.randint.low, 3, 8, [COUNT], dtype=dtype)
    counts = torch.bincount(sample.long(), minlength=8)
    assert counts[:3].sum() == 0 and counts.numel() == 8
    deviation = math.sqrt(COUNT * 0.2 * 0.8)
    assert ((counts[3:] - COUNT / 5).abs() < SIGMAS * deviation).all()


def test_randint_of_wide_range_and_like() -> None:
    (sample,) = evaluate(aten.randint.low, -(2**40), 2**40, [COUNT])
    assert_distribution(sample, lambda x: (x + 2**40) / 2**41)
    (sample,) = evaluate(aten.randint_like.default, torch.zeros(100), 5)
    assert set(sample.tolist()) == {0.0, 1.0, 2.0, 3.0, 4.0}


def test_random_integers() -> None:
    (sample,) = evaluate(aten.random.default, torch.zeros(COUNT, dtype=torch.int64))
    assert_distribution(sample, lambda x: x / 2.0**63)
    (sample,) = evaluate(aten.random.default, torch.zeros(COUNT, dtype=torch.uint8))
    assert set(sample.tolist()) == set(range(256))
    (sample,) = evaluate(aten.random.default, torch.zeros(1000, dtype=torch.bool))
    assert set(sample.tolist()) == {False, True}
    (sample,) = evaluate(aten.random.to, torch.zeros(1000), 3)
    assert set(sample.tolist()) == {0.0, 1.0, 2.0}
    (sample,) = evaluate(getattr(aten.random, "from"), torch.zeros(1000, dtype=torch.int32), -2, 1)
    assert set(sample.tolist()) == {-2, -1, 0}


def test_randperm() -> None:
    (first,) = evaluate(aten.randperm.default, 50)
    (second,) = evaluate(aten.randperm.default, 50, seed=1)
    assert sorted(first.tolist()) == list(range(50))
    assert first.tolist() != second.tolist()


def test_bernoulli() -> None:
    (sample,) = evaluate(aten.bernoulli.p, torch.zeros(COUNT), 0.3)
    assert set(sample.tolist()) == {0.0, 1.0}
    assert_mean(sample, 0.3, math.sqrt(0.21))
    chances = torch.tensor([0.0, 0.25, 1.0]).expand(COUNT, 3)
    for overload, args in ((aten.bernoulli.default, (chances,)),
                           (aten.bernoulli.Tensor, (torch.zeros(COUNT, 3), chances))):  # fmt: skip
        (sample,) = evaluate(overload, *args)
        assert sample[:, 0].sum() == 0
        assert sample[:, 2].sum() == COUNT
        assert_mean(sample[:, 1], 0.25, math.sqrt(0.1875))


def test_exponential_and_relatives() -> None:
    zeros = torch.zeros(COUNT)
    (sample,) = evaluate(aten.exponential.default, zeros, 2.0)
    assert sample.min() > 0
    assert_distribution(sample, lambda x: 1 - torch.exp(-2 * x))
    (sample,) = evaluate(aten.log_normal.default, zeros, 0.5, 0.25)
    assert_distribution((sample.log() - 0.5) / 0.25, normal_cdf)
    (sample,) = evaluate(aten.cauchy.default, zeros, 1.0, 2.0)
    assert_distribution(sample, lambda x: torch.atan((x - 1) / 2) / math.pi + 0.5)
    (sample,) = evaluate(aten.geometric.default, zeros, 0.3)
    assert sample.min() == 1
    assert_mean(sample, 1 / 0.3, math.sqrt(0.7) / 0.3)


def test_counting_distributions() -> None:
    (sample,) = evaluate(aten.poisson.default, torch.full((COUNT,), 4.0))
    assert_mean(sample, 4.0, 2.0)
    (sample,) = evaluate(
        aten.binomial.default, torch.full((COUNT,), 10.0), torch.full((COUNT,), 0.3)
    )
    assert_mean(sample, 3.0, math.sqrt(2.1))
    (sample,) = evaluate(aten._standard_gamma.default, torch.full((COUNT,), 2.0))
    assert_mean(sample, 2.0, math.sqrt(2.0))
    (sample,) = evaluate(aten._sample_dirichlet.default, torch.full((500, 3), 2.0))
    torch.testing.assert_close(sample.sum(1), torch.ones(500))


def test_multinomial() -> None:
    weights = torch.tensor([1.0, 0.0, 3.0])
    (sample,) = evaluate(aten.multinomial.default, weights, COUNT, True)
    assert set(sample.tolist()) == {0, 2}
    assert_mean((sample == 2).double(), 0.75, math.sqrt(0.1875))
    (rows,) = evaluate(aten.multinomial.default, weights.expand(COUNT, 3), 2)
    assert (rows.sort(dim=1).values == torch.tensor([0, 2])).all()
    assert_mean((rows[:, 0] == 2).double(), 0.75, math.sqrt(0.1875))


def test_dropout() -> None:
    value = torch.randn(COUNT)
    kept, mask = evaluate(aten.native_dropout.default, value, 0.25, True)
    assert_mean(mask.double(), 0.75, math.sqrt(0.1875))
    torch.testing.assert_close(kept, value * mask / 0.75)
    for probability in (0.0, 1.0):
        kept, mask = evaluate(aten.native_dropout.default, value, probability, True)
        assert mask.double().mean() == 1 - probability
        torch.testing.assert_close(kept, value * (1 - probability))
    kept, mask = evaluate(aten.native_dropout.default, value, 0.25, False)
    torch.testing.assert_close(kept, value)
    assert mask.all()
    check(aten.native_dropout_backward.default, value, torch.rand(COUNT) > 0.5, 1.25)


def test_random_leaky_relu() -> None:
    value = -torch.ones(COUNT)
    result, slopes = evaluate(
        aten.rrelu_with_noise_functional.default, value, value, 0.1, 0.3, True
    )
    torch.testing.assert_close(result, -slopes)
    assert_distribution(slopes, lambda x: (x - 0.1) / 0.2)


def test_keys_decide() -> None:
    first, again, other = (evaluate(aten.randn.default, [8], seed=seed)[0] for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
