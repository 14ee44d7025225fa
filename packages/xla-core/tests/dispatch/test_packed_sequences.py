"""Packed sequences: their rows are on the device, how many there are per step on the host."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from xla_core.testing.against_cpu import assert_same, attempt, fallbacks

aten = torch.ops.aten


def through(model: nn.Module, padded: torch.Tensor, lengths: torch.Tensor, device: str) -> object:
    """Outputs and lengths of the unpacked result, and the gradients."""
    model = copy.deepcopy(model).to(device)
    padded = padded.detach().to(device).requires_grad_()
    packed = pack_padded_sequence(padded, lengths, batch_first=True, enforce_sorted=False)
    assert packed.batch_sizes.device.type == "cpu"
    output, found = pad_packed_sequence(model(packed)[0], batch_first=True)
    output.square().sum().backward()
    return output, found, padded.grad, [p.grad for p in model.parameters()]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_take_packed_sequences(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, padded = kind(5, 4, 2, bidirectional=True, batch_first=True), torch.randn(3, 6, 5)
    lengths = torch.tensor([4, 6, 1])
    with fallbacks() as ran_on_cpu:
        got = through(model, padded, lengths, "xla")
    assert_same(got, through(model, padded, lengths, "cpu"))
    assert not ran_on_cpu


@pytest.mark.parametrize("lengths", [[2, 5], [5, 0], [5]])
def test_lengths_that_do_not_fit_raise_what_the_cpu_raises(lengths: list[int]) -> None:
    padded = torch.randn(2, 5, 3)
    expected, got = (
        attempt(lambda d=d: aten._pack_padded_sequence(padded.to(d), torch.tensor(lengths), True))
        for d in ("cpu", "xla")
    )
    assert expected.error is not None
    assert (type(got.error), str(got.error)) == (type(expected.error), str(expected.error))
