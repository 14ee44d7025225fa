"""Linear layers with weights of 8 or 4 bits, against the weights that they stand for."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from torch_xla.experimental.xla_quantized_matmul import XlaQuantizedLinear
from torch_xla.stablehlo import exported_program_to_stablehlo

INPUTS, OUTPUTS = 8, 5


def layer(block_size=-1, int4=False, symmetric=False, activation=False, dtype=torch.float32):
    """A layer of random weights, and the plain weight (outputs, inputs) that it stands for."""
    made = XlaQuantizedLinear(INPUTS, OUTPUTS, symmetric, block_size, int4, activation)
    largest = 8 if int4 else 128
    weight = torch.randint(-largest, largest, made.weight.shape, dtype=torch.int8)
    scaler = torch.rand(made.weight_scaler.shape)
    zero = None if symmetric else torch.randn(made.weight_scaler.shape)
    made.load_quantized_weight(weight, scaler.to(dtype), None if zero is None else zero.to(dtype))
    plain = weight * scaler[:, None] - (0 if zero is None else zero[:, None])
    return made, plain if block_size == -1 else plain.flatten(0, 1).t()


@pytest.mark.parametrize("device", ["cpu", "xla"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("int4", [True, False])
@pytest.mark.parametrize("block_size", [-1, 4])
def test_it_is_the_linear_layer_of_its_weights(block_size, int4, symmetric, device):
    made, plain = layer(block_size, int4, symmetric)
    made.to(device)
    x = torch.randn(2, 3, INPUTS)
    moved = x.clone().to(device).requires_grad_()
    got = made(moved)
    got.square().sum().backward()
    torch.testing.assert_close(got.cpu(), F.linear(x, plain), rtol=1e-4, atol=1e-3)
    reference = x.clone().requires_grad_()
    F.linear(reference, plain).square().sum().backward()
    torch.testing.assert_close(moved.grad.cpu(), reference.grad, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("symmetric", [True, False])
def test_rounded_activations_multiply_integers(symmetric):
    made, plain = layer(symmetric=symmetric, activation=True)
    x = torch.randn(4, INPUTS)
    x[1] = 0  # has no scale of its own
    rows = x.abs().amax(-1, keepdim=True) / 127
    rounded = (x / rows).round().nan_to_num() * rows
    wanted = F.linear(rounded, plain)
    for device in ("cpu", "xla"):
        torch.testing.assert_close(
            made.to(device)(x.to(device)).cpu(), wanted, rtol=1e-4, atol=1e-3
        )
    with pytest.raises(RuntimeError, match="rounds its operand and has no gradient"):
        made(x.to("xla").requires_grad_()).sum().backward()


@pytest.mark.parametrize("activation", [False, True])
def test_the_dtype_is_that_of_operand_and_scales(activation):
    made, plain = layer(activation=activation, dtype=torch.bfloat16)
    x = torch.randn(3, INPUTS).to(torch.bfloat16)
    wanted = F.linear(x.float(), plain)
    for device in ("cpu", "xla"):
        got = made.to(device)(x.to(device))
        assert got.dtype == torch.bfloat16
        # weights up to 128 in a bfloat16 product: PyTorch's CPU rounds after each operator
        torch.testing.assert_close(got.float().cpu(), wanted, rtol=2**-5, atol=2.0)


def test_weights_of_four_bits_are_told_to_the_compiler():
    made, plain = layer(int4=True)
    x = torch.randn(3, INPUTS)
    program = exported_program_to_stablehlo(torch.export.export(made, (x,)))
    assert "tensor<5x8xi4>" in program.get_stablehlo_text()
    torch.testing.assert_close(program(x).cpu(), F.linear(x, plain), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("block_size", [-1, 4])
def test_a_state_dict_is_loaded_into_a_new_layer(block_size):
    made, _ = layer(block_size)
    model = nn.Sequential(XlaQuantizedLinear(INPUTS, OUTPUTS, block_size=block_size))
    model.load_state_dict({f"0.{name}": value for name, value in made.state_dict().items()})
    x = torch.randn(2, INPUTS)
    assert torch.equal(model(x), made(x))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"weight": torch.zeros(5, 8)}, "int8 .*got torch.float32"),
        (
            {"weight": torch.zeros(8, 5, dtype=torch.int8)},
            r"weight has the shape \(8, 5\).*\(5, 8\)",
        ),
        ({"weight_scaler": torch.zeros(8)}, r"weight scaler has the shape \(8,\).*is \(5,\)"),
        ({"zero_point": torch.zeros(1, 5)}, r"zero point has the shape \(1, 5\)"),
    ],
)
def test_weights_that_do_not_fit_are_refused(change, text):
    made, _ = layer()
    good = {"weight": made.weight, "weight_scaler": made.weight_scaler}
    with pytest.raises(ValueError, match=text):
        made.load_quantized_weight(**{**good, **change})


def test_blocks_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="8 inputs are not a whole number of blocks of 3"):
        XlaQuantizedLinear(8, 5, block_size=3)
    with pytest.raises(ValueError, match="works with one scale per output"):
        XlaQuantizedLinear(8, 5, block_size=4, quantize_activation=True)
    x = torch.randn(2, 9, device="xla")
    with pytest.raises(ValueError, match=r"weight has the shape \(5, 8\); for 9 inputs"):
        layer()[0].to("xla")(x)
