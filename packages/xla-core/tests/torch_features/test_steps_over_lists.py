"""torch_xla.amp.syncfree's steps over lists, and clipping, beside PyTorch's optimizers on the CPU."""

from __future__ import annotations

import pytest
import torch

from torch_xla import _patched_functions
from torch_xla.amp.syncfree import SGD, _functional, adam, adamw, sgd


def test_the_classes_are_the_same():
    assert (sgd.SGD, adam.Adam.__name__, adamw.AdamW.__name__) == (SGD, "Adam", "AdamW")


@pytest.mark.parametrize(
    ("adamw_rule", "amsgrad", "maximize"),
    [(False, False, False), (True, True, False), (False, True, True)],
)
def test_adam_as_torchs(adamw_rule, amsgrad, maximize):
    start, grads = torch.randn(5), [torch.randn(5) for _ in range(3)]
    options = {"weight_decay": 0.1, "eps": 1e-6, "amsgrad": amsgrad, "maximize": maximize}
    expected = start.clone().requires_grad_()
    kind = torch.optim.AdamW if adamw_rule else torch.optim.Adam
    optimizer = kind([expected], lr=0.01, betas=(0.8, 0.95), **options)
    param, *state = (t.to("xla") for t in (start, *torch.zeros(3, 5), torch.zeros(())))
    for number, grad in enumerate([*grads[:2], torch.full((5,), float("inf")), grads[2]]):
        skipped = number == 2
        if not skipped:
            expected.grad = grad.clone()
            optimizer.step()
        average, square, largest, step = state
        _functional.adam_step(
            torch.tensor(float(skipped), device="xla"), [step], [param], [grad.to("xla")],
            [average], [square], [largest],
            beta1=0.8, beta2=0.95, lr=0.01, use_adamw=adamw_rule, **options,
        )  # fmt: skip
    torch.testing.assert_close(param.cpu(), expected.detach(), rtol=1e-5, atol=1e-6)
    assert step.item() == 3


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_as_torchs(nesterov):
    start, grads = torch.randn(5), [torch.randn(5) for _ in range(3)]
    expected = start.clone().requires_grad_()
    options = {"momentum": 0.9, "weight_decay": 0.1, "nesterov": nesterov, "maximize": False}
    options["dampening"] = 0.0 if nesterov else 0.2
    optimizer = torch.optim.SGD([expected], lr=0.1, **options)
    param, buffer, step = (t.to("xla") for t in (start, torch.zeros(5), torch.zeros(())))
    for grad, skipped in (
        (grads[0], 0),
        (torch.full((5,), float("nan")), 1),
        *((g, 0) for g in grads[1:]),
    ):
        if not skipped:
            expected.grad = grad.clone()
            optimizer.step()
        _functional.sgd_step(
            torch.tensor([float(skipped)], device="xla"), [step], [param], [grad.to("xla")],
            [buffer], lr=0.1, **options,
        )  # fmt: skip
    torch.testing.assert_close(param.cpu(), expected.detach(), rtol=1e-5, atol=1e-6)


def test_clipping_reads_nothing(monkeypatch):
    values, grads = torch.randn(2, 3), torch.randn(2, 3) * 5
    expected = values.clone().requires_grad_()
    expected.grad = grads.clone()
    norm = torch.nn.utils.clip_grad_norm_([expected], 1.0)
    param = values.to("xla").requires_grad_()
    param.grad = grads.to("xla")
    found = _patched_functions.clip_grad_norm_([param], 1.0)
    torch.testing.assert_close(found.cpu(), norm)
    torch.testing.assert_close(param.grad.cpu(), expected.grad)
    empty = _patched_functions.clip_grad_norm_(torch.ones(1, device="xla"), 1.0)
    assert (empty.device.type, empty.item()) == ("xla", 0.0)
    with pytest.raises(RuntimeError, match="leave foreach out"):
        _patched_functions.clip_grad_norm_([param], 1.0, foreach=True)
