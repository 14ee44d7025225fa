"""PyTorch's switches for TF32, on a device that has it; the CPU has not, and is told to follow them here."""

from __future__ import annotations

import re

import pytest
import torch

import torch_xla
from torch_xla import backends
from xla_core.api import stablehlo_text
from xla_core.lowering import compile_settings

X = torch.randn(1, 2, 4, 4, generator=torch.Generator().manual_seed(0))
W = torch.randn(2, 2, 3, 3, generator=torch.Generator().manual_seed(1))
HIGHEST, DEFAULT = {"HIGHEST"}, {"DEFAULT"}


@pytest.fixture
def following():
    """A device that multiplies as TF32 where it may; PyTorch's switches are put back."""
    X.to("xla")  # the client says what its device has when it starts
    products = torch.backends.cuda.matmul.allow_tf32
    compile_settings.follow_torch(True)
    yield
    compile_settings.follow_torch(False)
    torch.backends.cuda.matmul.allow_tf32 = products


def precisions():
    """The precisions of a product, and of a convolution and its gradient, as they are lowered now."""
    x, w = X.to("xla"), W.to("xla").requires_grad_()
    torch_xla.sync()
    product = stablehlo_text.stablehlo_text([x[0, 0] @ x[0, 1]])
    result = torch.conv2d(x, w, padding=1)
    (gradient,) = torch.autograd.grad(result.sum(), w)
    convolutions = stablehlo_text.stablehlo_text([result.detach(), gradient])
    return tuple(set(re.findall("HIGHEST|DEFAULT|HIGH", text)) for text in (product, convolutions))


def test_pytorch_begins_with_exact_products_and_tf32_in_convolutions(following):
    assert precisions() == (HIGHEST, DEFAULT)


def test_each_switch_is_followed(following):
    torch.backends.cuda.matmul.allow_tf32 = True
    # not the attribute: PyTorch's own testing tools, which other tests import, forbid to set it
    with torch.backends.cudnn.flags(allow_tf32=False):
        assert precisions() == (DEFAULT, HIGHEST)
        torch.set_float32_matmul_precision("highest")
        assert precisions() == (HIGHEST, HIGHEST)
        torch.set_float32_matmul_precision("high")
        assert precisions() == (DEFAULT, HIGHEST)


def test_our_own_setting_comes_before_the_switches(following):
    try:
        backends.set_mat_mul_precision("highest")
        torch.backends.cuda.matmul.allow_tf32 = True
        assert precisions() == (HIGHEST, HIGHEST)
    finally:
        backends.set_mat_mul_precision("default")


def test_a_switch_makes_another_program_and_its_return_finds_the_first(following, compile_count):
    x = torch.randn(5, 5).to("xla")
    torch_xla.sync()
    kept = []

    def compiled():
        before = compile_count()
        kept.append(x @ x)
        torch_xla.sync()
        return compile_count() - before

    assert compiled() == 1
    assert compiled() == 0
    torch.backends.cuda.matmul.allow_tf32 = True
    assert compiled() == 1
    torch.backends.cuda.matmul.allow_tf32 = False
    assert compiled() == 0
    text = compile_settings.key_text({})
    with torch.backends.cudnn.flags(allow_tf32=False):
        assert compile_settings.key_text({}) != text  # the persistent cache's key


def test_on_the_cpu_nothing_changes():
    token = compile_settings.token()
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        assert compile_settings.token() == token == ""
        assert precisions() == (DEFAULT, DEFAULT)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
