"""Operators for which PyTorch's meta kernels do not tell the result, and operands XLA has no type for."""

from __future__ import annotations

import pytest
import torch

from xla_core.dispatch import meta_inference
from xla_core.lowering import rules  # noqa: F401  (rules registers them)
from xla_core.operators import lowering_registry
from xla_core.testing.against_cpu import assert_agrees_with_cpu, assert_same, fallbacks


def on_xla(*values: float) -> torch.Tensor:
    return torch.tensor(values, device="xla")


def test_a_mistake_is_no_reason_to_fall_back() -> None:
    with fallbacks() as ran_on_cpu, pytest.raises(RuntimeError, match="must match the size"):
        _ = on_xla(1.0, 2.0, 3.0) + on_xla(1.0, 2.0)
    assert not ran_on_cpu


def test_a_dtype_that_xla_lacks_is_refused_where_it_is_asked_for() -> None:
    x = on_xla(1.0, 2.0)
    message = "cannot have dtype torch.float8_e8m0fnu"
    with pytest.raises(TypeError, match=message):
        x.to(torch.float8_e8m0fnu)
    with pytest.raises(TypeError, match=message):
        torch.zeros(2).to(torch.float8_e8m0fnu).to("xla")
    with pytest.raises(TypeError, match=message):
        torch.empty(2, dtype=torch.float8_e8m0fnu, device="xla")
    assert (x + 1).tolist() == [2.0, 3.0]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_a_compressed_sparse_tensor_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="new_compressed_tensor"):
        torch.eye(2).to_sparse_csr().to("xla")


def test_a_factory_reads_the_numbers_it_is_given_in_tensors() -> None:
    start, end = on_xla(1.0)[0], on_xla(3.0)[0]
    assert torch.linspace(start, end, 3, device="cpu").tolist() == [1.0, 2.0, 3.0]
    assert torch.linspace(start, end, 3, device="xla").tolist() == [1.0, 2.0, 3.0]


def test_factorisations_report_errors_without_a_fallback() -> None:
    with fallbacks() as ran_on_cpu:
        assert_same(torch.linalg.inv(2 * torch.eye(2, device="xla")), torch.eye(2) / 2)
        with pytest.raises(torch.linalg.LinAlgError, match="singular"):
            torch.linalg.inv(torch.zeros(2, 2, device="xla"))
        with pytest.raises(torch.linalg.LinAlgError, match="positive-definite"):
            torch.linalg.cholesky(-torch.eye(2, device="xla"))
    assert not ran_on_cpu


@pytest.mark.parametrize("training", [True, False])
def test_saved_statistics_of_batch_norm_have_the_shapes_of_the_cpu(training: bool) -> None:
    x, statistics = torch.randn(4, 3), torch.tensor([0.5, 1.0, 2.0])
    args = (None, None, statistics, statistics, training, 0.1, 1e-5)
    on_device = [a.to("xla") if isinstance(a, torch.Tensor) else a for a in args]
    expected = torch.native_batch_norm(x, *[a.clone() if a is statistics else a for a in args])
    assert_same(torch.native_batch_norm(x.to("xla"), *on_device), expected)


def test_random_slopes_of_a_leaky_rectifier() -> None:
    x = torch.linspace(-2, 2, 9).to("xla").requires_grad_()
    y = torch.nn.functional.rrelu(x, 0.1, 0.3, training=True)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    slopes = (y / x).detach().cpu()
    assert ((slopes[:4] >= 0.1 - 1e-6) & (slopes[:4] <= 0.3 + 1e-6)).all()
    torch.testing.assert_close(gradient.cpu()[:4], slopes[:4])
    assert gradient.cpu()[5:].tolist() == [1.0] * 4


def _floats_for(overload):
    """Operands of ``overload`` that are floats of one shape, as its schema asks for them."""
    positional, named = [], {}
    for argument in overload._schema.arguments:
        kind = str(argument.type)
        if kind == "Tensor":
            value = torch.empty(2, 3, device="meta")
        elif argument.has_default_value():
            continue
        else:
            value = {"str?": "floor", "int": 1}.get(kind.replace("Optional[str]", "str?"), 1.0)
        if argument.kwarg_only:
            named[argument.name] = value
        else:
            positional.append(value)
    return positional, named


def _kept():
    return [
        overload
        for overload, rule in lowering_registry._rules.items()
        if torch.Tag.pointwise in overload.tags
        and (
            rule.promotion in meta_inference._KEEP_FLOATS
            or overload is torch.ops.aten.pow.Tensor_Scalar
        )
    ]


@pytest.mark.parametrize("overload", _kept(), ids=str)
def test_results_that_are_taken_to_be_like_the_operand_are(overload):
    """Held against PyTorch's own meta kernel, which is not asked for such operands."""
    positional, named = _floats_for(overload)
    result = overload(*positional, **named)
    assert (result.dtype, result.shape) == (torch.float32, (2, 3))


FILLS = {
    "masked_fill": lambda x, value: x.masked_fill(x > 1, value),
    "masked_fill_": lambda x, value: x.masked_fill_(x > 1, value),
    "index_fill": lambda x, value: x.index_fill(0, torch.tensor([0], device=x.device), value),
    "index_fill_": lambda x, value: x.index_fill_(0, torch.tensor([0], device=x.device), value),
}


@pytest.mark.parametrize("name", FILLS)
def test_a_number_in_a_cpu_tensor_fills_on_the_device(name: str) -> None:
    """As ``scores.masked_fill(mask, torch.tensor(-1e9))``: its meta kernel wants one device for both."""
    with fallbacks() as ran_on_cpu:
        for value in (torch.tensor(-1e9), torch.tensor(2), torch.tensor(True)):
            assert_agrees_with_cpu(
                lambda x, v=value: FILLS[name](x.clone(), v), torch.ones(2, 3) * 2
            )
            assert_agrees_with_cpu(
                lambda x, v=value: FILLS[name](x.clone(), v), torch.arange(4, dtype=torch.bfloat16)
            )
    assert not ran_on_cpu
    with pytest.raises(RuntimeError):
        FILLS[name](on_xla(1.0, 2.0), torch.ones(2))
