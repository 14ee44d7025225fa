"""What libraries do in captured steps: ask whether one is captured, look modules up in tables that make them."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import torch_xla
from torch_xla.experimental.capture import CaptureError, capture
from xla_core.capture.executed_code import ExecutedCode, stream_capturing
from xla_core.support import counters

COMPLETE, PADDED = [1.0, 1.0, 1.0], [1.0, 1.0, 0.0]


def is_capturing():
    """As libraries ask: in each call, and they know that PyTorch without CUDA raises."""
    try:
        return torch.cuda.is_current_stream_capturing()
    except RuntimeError:
        return False


def replays():
    return counters.all_counters().get("CapturedStepReplayed", 0)


def masked(x, mask):
    """As transformers leaves out a mask that hides nothing, if it may look at it."""
    if not is_capturing() and mask.all():
        return x + 1
    return (x + 1) * mask


def test_a_library_that_may_not_look_at_a_mask_uses_it():
    step = capture(masked)
    x = torch.ones(3, device="xla")
    for mask in [COMPLETE, PADDED] * 3:
        assert step(x, torch.tensor(mask)).tolist() == [2 * one for one in mask]
    assert step.recordings == 1
    assert not is_capturing()


def test_a_value_of_the_host_that_is_gone_after_the_step():
    """As transformers' caches of sliding windows, which a training step makes and forgets."""

    class Cache:
        def __init__(self):
            self.window = torch.tensor(4, dtype=torch.long)
            self.own = self  # freed by the garbage collector

        def use(self, x):
            self.window = self.window.to(x.device)
            return x + 1

    step = capture(lambda x: Cache().use(x))
    for _ in range(5):
        assert step(torch.ones(2, device="xla")).tolist() == [2, 2]
    assert step.recordings == 1


def test_a_refused_step_is_captured_no_longer():
    def step(x):
        return x + 1 if x.sum() > 0 else x

    captured = capture(step)
    x = torch.ones(3, device="xla")
    captured(x)
    with pytest.raises(CaptureError, match="reads a value"):
        captured(x)
    assert not is_capturing()


class Asking(torch.autograd.Function):
    """Asks in the backward pass, in which checkpoints run parts of the forward pass again."""

    answers: set[bool] = set()

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        Asking.answers.add(is_capturing())
        return grad * 2


class AskingSGD(torch.optim.SGD):
    """Asks in its step, as optimizers did before PyTorch 2.13."""

    answers: set[bool] = set()

    def step(self, closure=None):
        self.answers.add(is_capturing())
        return super().step(closure)


def test_who_is_told():
    """The threads that run the step: not another thread, and not optimizers, which want to be capturable then."""
    net = nn.Linear(3, 2).to("xla")
    optimizer = AskingSGD(net.parameters(), lr=0.1)
    answers: set[tuple[bool, bool]] = set()
    Asking.answers.clear()
    optimizer.answers.clear()

    def step(x):
        elsewhere: list[bool] = []
        thread = threading.Thread(target=lambda: elsewhere.append(is_capturing()))
        thread.start()
        thread.join()
        optimizer.zero_grad()
        loss = Asking.apply(net(x)).sum()
        loss.backward()
        optimizer.step()
        answers.add((is_capturing(), elsewhere[0]))
        return loss

    captured = capture(step)
    x = torch.ones(4, 3, device="xla")
    for _ in range(5):
        captured(x)
    torch_xla.sync()
    assert answers == {(True, False)}
    assert Asking.answers == {True}
    assert optimizer.answers == {False}
    assert not is_capturing()


def test_what_was_there_before_is_asked_and_put_back(monkeypatch):
    """Another capture around this one, or a test's stand-in."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: "outer")
    seen = set()

    def step(x):
        thread = threading.Thread(target=lambda: seen.add(is_capturing()))
        thread.start()
        thread.join()
        return x + 1

    captured = capture(step)
    for _ in range(4):
        captured(torch.ones(2, device="xla"))
    assert seen == {"outer"}
    assert is_capturing() == "outer"


def test_two_threads_that_record_at_once():
    """The block that began first ends first, and so is not the one that is there."""
    blocks = []
    for _ in range(2):
        code = ExecutedCode()
        code.threads = {threading.get_ident()}
        blocks.append(stream_capturing(code))
    before = torch.cuda.is_current_stream_capturing
    try:
        for block in blocks:
            block.__enter__()
            assert is_capturing()
        for block in blocks:
            block.__exit__(None, None, None)
        assert not is_capturing()
    finally:
        torch.cuda.is_current_stream_capturing = before


class Activations(dict):
    """As the table of activations of transformers: each look-up makes a module."""

    def __getitem__(self, key):
        return super().__getitem__(key)()


ACTIVATIONS = Activations(gelu=torch.nn.GELU, silu=torch.nn.SiLU)


def test_a_table_that_makes_an_object_at_each_look_up(monkeypatch):
    monkeypatch.setitem(ACTIVATIONS, "relu", torch.nn.ReLU)
    net = torch.nn.Linear(3, 2).to("xla")

    def step(x):
        return ACTIVATIONS["gelu"](net(x))

    captured = capture(step)
    x = torch.ones(4, 3, device="xla")
    before = replays()
    for _ in range(4):
        torch.testing.assert_close(captured(x), torch.nn.GELU()(net(x)))
    assert replays() - before == 1

    monkeypatch.setitem(ACTIVATIONS, "gelu", torch.nn.ReLU)
    with pytest.raises(CaptureError, match=r"ACTIVATIONS\['gelu'\] is no longer"):
        captured(x)
    monkeypatch.delitem(ACTIVATIONS, "gelu")
    with pytest.raises(CaptureError, match=r"ACTIVATIONS\['gelu'\] is no longer"):
        captured(x)
