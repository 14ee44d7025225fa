"""The CTC loss on ``xla``: values, gradients, and that other lengths need no other program."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torch_xla
from xla_core.support import counters
from xla_core.testing.against_cpu import assert_same, copy_to, fallbacks

PADDED = torch.tensor([[1, 2, 2, 4], [3, 3, 0, 0], [4, 1, 2, 0]])
CONCATENATED = torch.tensor([1, 2, 2, 4, 3, 3, 4, 1, 2])


def loss_and_gradient(device: str, targets: torch.Tensor, steps: Any, lengths: Any, **options: Any):
    torch.manual_seed(0)
    scores = torch.randn(12, 3, 5).to(device).requires_grad_()
    targets, steps, lengths = copy_to((targets, steps, lengths), device)
    probabilities = scores.log_softmax(2)
    loss = torch.nn.functional.ctc_loss(probabilities, targets, steps, lengths, **options)
    (gradient,) = torch.autograd.grad(loss.sum(), scores)
    return [loss, gradient]


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("in_tensors", [False, True])
@pytest.mark.parametrize("targets", [PADDED, CONCATENATED], ids=["padded", "concatenated"])
def test_against_the_cpu(targets: torch.Tensor, in_tensors: bool, reduction: str) -> None:
    # The last row cannot be aligned: two labels and no blank between the equal ones in its steps.
    for steps, zero_infinity in (((12, 10, 9), False), ((12, 3, 2), True), ((12, 3, 2), False)):
        lengths: Any = (4, 2, 3)
        given = (torch.tensor(steps), torch.tensor(lengths)) if in_tensors else (steps, lengths)
        options = {"reduction": reduction, "zero_infinity": zero_infinity}
        with fallbacks() as ran_on_cpu:
            got = loss_and_gradient("xla", targets, *given, **options)
            torch_xla.sync()
        assert_same(got, loss_and_gradient("cpu", targets, *given, **options))
        assert not ran_on_cpu


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_lengths_may_stay_on_the_cpu(reduction: str) -> None:
    """As on CUDA devices, where PyTorch reads them on the host."""
    lengths = torch.tensor([12, 10, 9]), torch.tensor([4, 2, 3], dtype=torch.int32)
    torch.manual_seed(0)
    scores = torch.randn(12, 3, 5)
    results = []
    for device in ("xla", "cpu"):
        there = scores.to(device, copy=True).requires_grad_()
        criterion = torch.nn.CTCLoss(reduction=reduction)
        loss = criterion(there.log_softmax(2), PADDED.to(device), *lengths)
        loss.sum().backward()
        with torch.inference_mode():
            again = criterion(scores.to(device).log_softmax(2), PADDED.to(device), *lengths)
        results.append([loss, there.grad, again])
    assert_same(*results)


def test_an_empty_row_of_targets() -> None:
    given = (PADDED, (12, 5, 0), (4, 0, 0))
    expected = loss_and_gradient("cpu", *given, reduction="none")
    assert_same(loss_and_gradient("xla", *given, reduction="none"), expected)


def test_one_program_for_all_lengths() -> None:
    known = None
    for lengths in ((4, 2, 3), (3, 1, 2), (1, 1, 1)):
        loss, gradient = loss_and_gradient("xla", PADDED, (12, 10, 9), lengths)
        torch_xla.sync()
        compiled = counters.all_counters()["UncachedCompile"]
        assert known in (None, compiled)
        known = compiled
        assert gradient.cpu().isfinite().all() and loss.item() > 0
