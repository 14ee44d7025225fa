"""Recurrent nets over batches and sequences of any size share programs, and give what PyTorch gives."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import torch_xla
from xla_core.varying import families

LENGTHS = (5, 9, 7, 12)
NETS = {
    "lstm of two layers and directions": lambda: nn.LSTM(3, 4, 2, bidirectional=True),
    "lstm with a projection": lambda: nn.LSTM(3, 4, proj_size=2, batch_first=True),
    "gru": lambda: nn.GRU(3, 4, batch_first=True),
    "rnn without biases": lambda: nn.RNN(3, 4, bias=False),
    "rnn of relu": lambda: nn.RNN(3, 4, nonlinearity="relu"),
}

# oneDNN has no projections, which PyTorch says on the CPU
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections")


def trained(net, x, lengths=None):
    """Outputs, last states and all gradients of a step."""
    net.zero_grad()
    x = x.detach().requires_grad_()
    if lengths is None:
        y, last = net(x)
    else:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        y, last = net(packed)
        y = pad_packed_sequence(y, batch_first=True, padding_value=2.0)[0]
    last = last if isinstance(last, tuple) else (last,)
    (y.square().sum() + sum(state.sin().sum() for state in last)).backward()
    torch_xla.sync()
    return [t.detach().cpu() for t in (y, *last, x.grad, *(p.grad for p in net.parameters()))]


def served(net, batches, counted):
    """How many batches needed no program of their own; all are compared with the CPU."""
    before = counted(families.SERVED)
    ours = copy.deepcopy(net).to("xla")
    for x, *lengths in batches:
        wanted = trained(net, x, *lengths)
        torch.testing.assert_close(
            trained(ours, x.to("xla"), *lengths), wanted, rtol=1e-3, atol=1e-4
        )
    return counted(families.SERVED) - before


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("axis", [0, 1])
def test_a_net_takes_any_length_and_batch(name, axis, varying, counted):
    torch.manual_seed(5)
    sizes = [(n, 4) if axis == 0 else (4, n) for n in LENGTHS]
    batches = [(torch.randn(*size, 3),) for size in sizes]
    # the size's program for what is read after the step is another family
    assert served(NETS[name](), batches, counted) >= 2, families.kept_out()
    assert not families.kept_out()


def ragged(longest):
    """Three sequences, and their lengths."""
    lengths = torch.randint(2, longest + 1, (3,))
    lengths[1] = longest
    return torch.randn(3, longest, 3), lengths


def test_packed_sequences_of_any_lengths(varying, counted):
    torch.manual_seed(6)

    batches = list(map(ragged, (5, 9, 7, 12, 6, 11, 8, 13, 10)))
    # how long the longest is, and how many elements there are: two lengths need a few batches to be told apart
    net = nn.GRU(3, 4, batch_first=True, bidirectional=True)
    assert served(net, batches, counted) >= 4, families.kept_out()
    assert not families.kept_out()


def test_sequences_padded_to_a_length(varying):
    data, sizes = torch.randn(9, 2), torch.tensor([4, 3, 2])
    for batch_first in (False, True):
        for total in (-1, 5):
            operands = (sizes, batch_first, 7.0, total)
            wanted = torch._VF._pad_packed_sequence(data, *operands)
            results = torch._VF._pad_packed_sequence(data.to("xla"), *operands)
            assert torch.equal(results[0].cpu(), wanted[0])
            assert torch.equal(results[1], wanted[1])
    for tensor in (data, data.to("xla")):
        with pytest.raises(RuntimeError, match="total_length=2 and max sequence length being 3"):
            torch._VF._pad_packed_sequence(tensor, sizes, True, 0.0, 2)


@pytest.mark.parametrize(
    ("name", "packed"), [("lstm with a projection", True), ("gru", False), ("rnn of relu", True)]
)
def test_gradients_of_gradients(name, packed, varying):
    torch.manual_seed(7)
    net = NETS[name]()
    batch = torch.randn(3, 3, 3), torch.tensor([2, 3, 1])

    def penalty(device):
        here = copy.deepcopy(net).to(device)
        x = batch[0].to(device).requires_grad_()
        if packed:
            x_in = pack_padded_sequence(x, batch[1], batch_first=True, enforce_sorted=False)
            y = here(x_in)[0].data
        else:
            y = here(x)[0]
        (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        (gradient.square().sum() + y.sum()).backward()
        gradients = (x.grad, *(weight.grad for weight in here.parameters()))
        return [g.cpu() for g in (gradient.detach(), *gradients)]

    torch.testing.assert_close(penalty("xla"), penalty("cpu"), rtol=1e-3, atol=1e-4)


def test_other_nets_are_pytorchs_own(varying, monkeypatch):
    x = torch.randn(5, 2, 3)
    net = nn.LSTM(3, 4)
    wanted = net(x)[0]
    net = net.to("xla")
    assert "RecurrentLayer" in grad_functions(net(x.to("xla"))[0])
    half = net.to(torch.bfloat16)
    assert "RecurrentLayer" not in grad_functions(half(x.to("xla", torch.bfloat16))[0])
    net = net.float()
    monkeypatch.setenv("XLA_VARYING_SHAPES", "0")
    y = net(x.to("xla"))[0]
    assert "RecurrentLayer" not in grad_functions(y)
    torch.testing.assert_close(y.detach().cpu(), wanted.detach(), rtol=1e-2, atol=1e-2)


@pytest.fixture
def as_it_is(varying, monkeypatch):
    """Nothing is set."""
    monkeypatch.delenv("XLA_VARYING_SHAPES")


def test_the_third_length_of_a_net_is_ours_if_nothing_is_set(as_it_is):
    net = nn.LSTM(3, 4).to("xla")
    fixed = [net(torch.ones(n, 2, 3, device="xla"))[0] for n in (5, 5, 9, 5)]
    assert not any("RecurrentLayer" in grad_functions(y) for y in fixed)
    assert "RecurrentLayer" in grad_functions(net(torch.ones(7, 2, 3, device="xla"))[0])
    # the first ones have programs
    assert "RecurrentLayer" not in grad_functions(net(torch.ones(9, 2, 3, device="xla"))[0])


def test_a_net_shares_programs_if_nothing_is_set(as_it_is, counted):
    torch.manual_seed(9)
    batches = [(torch.randn(n, 2, 3),) for n in (6, 11, 5, 9, 7, 12, 8, 10)]
    assert served(nn.LSTM(3, 4), batches, counted) >= 3, families.kept_out()


def test_packed_sequences_share_programs_if_nothing_is_set(as_it_is, counted):
    torch.manual_seed(6)
    batches = list(map(ragged, (5, 9, 7, 12, 6, 11, 8, 13, 10, 14)))
    net = nn.LSTM(3, 4, batch_first=True, bidirectional=True)
    assert served(net, batches, counted) >= 3, families.kept_out()


def test_tangents(varying):
    net, x, tangent = nn.GRU(3, 4), torch.randn(5, 2, 3), torch.randn(5, 2, 3)
    found = []
    for device in ("cpu", "xla"):
        with forward_ad.dual_level():
            y = net.to(device)(forward_ad.make_dual(x.to(device), tangent.to(device)))[0]
            found.append(forward_ad.unpack_dual(y).tangent.cpu())
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-4)


def grad_functions(tensor):
    """The names of all functions that the tensor's gradient goes through."""
    seen, rest = set(), [tensor.grad_fn]
    while rest:
        node = rest.pop()
        if node is not None and node not in seen:
            seen.add(node)
            rest += [function for function, _ in node.next_functions]
    return " ".join(node.name() for node in seen)


def test_loops_over_a_length(run_lengths):
    targets = torch.randint(1, 5, (3, 4))

    def step(scores, targets, *lengths):
        scores = scores.detach().requires_grad_()
        loss = F.ctc_loss(scores.log_softmax(-1), targets, *lengths)
        loss.backward()
        return loss.detach(), scores.grad

    def make(n):
        return (
            torch.randn(n, 3, 5),
            targets,
            torch.tensor([n, n - 1, n - 2]),
            torch.tensor([2, 3, 4]),
        )

    assert run_lengths(step, make, (12, 9, 15, 14, 11)) == 3, families.kept_out()


def test_loops_that_carry_what_varies(run_lengths):
    def step(x):
        return (
            torch.special.zeta(x.abs() + 2, x.abs() + 1),
            torch.special.bessel_j0(x),
            x.logcumsumexp(0),
        )

    assert run_lengths(step, lambda n: (torch.randn(n, 4),), LENGTHS) == 2, families.kept_out()
