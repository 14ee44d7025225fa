"""Views on ``xla``: what shares memory on the CPU shares it here, before and after a sync."""

from __future__ import annotations

import gc

import pytest
import torch

import torch_xla
from xla_core.compilation.program_table import all_programs

VIEWS = {
    "select": lambda x: x[1],
    "select from the end": lambda x: x.select(-1, -2),
    "slice": lambda x: x[1:, ::2],
    "slice with a negative end": lambda x: x[:, -3:-1],
    "empty slice": lambda x: x[:, 2:2],
    "narrow": lambda x: x.narrow(1, 1, 2),
    "view": lambda x: x.view(2, 6),
    "view with -1": lambda x: x.view(-1),
    "transpose": lambda x: x.t(),
    "permute": lambda x: x.view(3, 2, 2).permute(2, 0, 1),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "squeeze": lambda x: x[:1].squeeze(0),
    "diagonal": lambda x: x.diagonal(1),
    "unfold": lambda x: x.unfold(1, 2, 2),
    "expand of nothing": lambda x: x.expand(3, 4),
    "expand and select": lambda x: x.expand(2, 3, 4)[1],
    "part of an expansion": lambda x: x[:, 0].expand(5, 3)[2, 1:],
    "split": lambda x: x.split(3, 1)[1],
    "split with sizes": lambda x: x.split([1, 3], 1)[1],
    "chunk": lambda x: x.chunk(2)[1],
    "unbind": lambda x: x.unbind(1)[2],
    "tensor_split": lambda x: x.tensor_split(3, 1)[0],
    "movedim": lambda x: x.movedim(0, 1),
    "flatten": lambda x: x.flatten(),
    "unflatten": lambda x: x.unflatten(1, (2, 2)),
    "view_as": lambda x: x.view_as(x),
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "as_strided": lambda x: x.as_strided((2, 2), (4, 1), 1),
    "bits": lambda x: x.view(torch.int32),
    "chain": lambda x: x[1:].t()[::2].unsqueeze(0).squeeze(0)[0],
    "view of a view of a view": lambda x: x[1:][:, 1:][0],
}


def table(device):
    return torch.arange(12.0).reshape(3, 4).to(device)


def sync_if(synced, device):
    if synced and device == "xla":
        torch_xla.sync()


@pytest.mark.parametrize("synced", [False, True], ids=["in one step", "with syncs"])
@pytest.mark.parametrize("make", VIEWS.values(), ids=VIEWS)
def test_view_shares_memory_with_its_base(make, synced):
    seen = []
    for device in ("cpu", "xla"):
        x = table(device)
        v = make(x)
        sync_if(synced, device)
        x.mul_(2)
        through_base = v.cpu().clone()
        sync_if(synced, device)
        v.fill_(7)
        assert (v == 7).all()
        through_view = x.cpu().clone()
        sync_if(synced, device)
        x.add_(1)
        seen.append((through_base, through_view, v.cpu(), x.cpu(), v._is_view(), v._version))
    assert_same(*seen)


def assert_same(expected, got):
    for want, have in zip(expected, got, strict=True):
        if isinstance(want, torch.Tensor):
            assert (want.dtype, want.shape) == (have.dtype, have.shape)
            assert torch.equal(want, have)
        else:
            assert want == have


def test_view_of_a_transpose_is_legal():
    x = table("xla")
    flat = x.t().view(-1)
    assert flat.tolist() == table("cpu").t().reshape(-1).tolist()
    flat[1] = 100.0  # row 1, column 0 of the base
    assert x[1, 0].item() == 100
    assert x.t().is_contiguous()
    assert x.t().stride() == (3, 1)


def test_two_views_see_each_other():
    x = table("xla")
    row, column = x[1], x[:, 2]
    row.add_(100)
    assert column.tolist() == [2, 106, 10]
    column.zero_()
    assert row.tolist() == [104, 105, 0, 107]
    assert x.sum().item() == row.sum().item() + 0 + 1 + 3 + 8 + 9 + 11


def test_views_survive_a_sync_and_the_base_may_go():
    x = table("xla")
    v = x[1:, 1:]
    w = v.t()[0]
    torch_xla.sync()
    del x
    gc.collect()
    w.neg_()
    assert v.tolist() == [[-5, 6, 7], [-9, 10, 11]]
    torch_xla.sync()
    del v
    w.neg_()
    assert w.tolist() == [5, 9]


def test_write_after_a_sync_through_an_old_view():
    x = table("xla")
    v = x[0]
    for step in range(4):
        v.add_(1)
        torch_xla.sync()
        assert x[0].tolist() == [step + 1.0, step + 2, step + 3, step + 4]


def test_view_read_last_step_is_not_read_again_stale():
    x = table("xla")
    v = x[0]
    assert v.sum().item() == 6
    x.copy_(torch.ones(3, 4))  # from the host: no operation of the device's
    assert v.tolist() == [1, 1, 1, 1]
    x.data = torch.zeros(3, 4, device="xla")
    assert v.tolist() == [1, 1, 1, 1]  # the view keeps the storage it looks at
    assert x[0].tolist() == [0, 0, 0, 0]


def test_reshape_and_flatten_are_views():
    # where the CPU copies because of strides: tensors here have no strides of their own
    x = table("xla")
    for v in (x.t().reshape(-1), x.t().flatten()):
        before = x.sum().item()
        v.add_(1)
        assert x.sum().item() == before + 12


def test_reading_a_view_of_a_small_tensor_compiles_nothing():
    x = table("xla")
    torch_xla.sync()
    before = len(all_programs())
    assert x[1:, ::2].t().tolist() == [[4, 8], [6, 10]]
    assert x.view(-1)[5].item() == 5
    assert len(all_programs()) == before


def test_split_parts_are_views():
    x = torch.zeros(7, device="xla")
    for number, part in enumerate(x.split(3)):
        part.fill_(number)
    a, b = x[:6].chunk(2)
    a.copy_(b)
    assert x.tolist() == [1, 1, 1, 1, 1, 1, 2]
    for number, part in enumerate(x.unbind()):
        part.add_(number)
    assert x.tolist() == [1, 2, 3, 4, 5, 6, 8]


def test_views_of_empty_and_size_one_tensors():
    seen = []
    for device in ("cpu", "xla"):
        empty, one = torch.zeros(2, 0, 3, device=device), torch.zeros(1, 1, device=device)
        empty.transpose(0, 2)[1].add_(1)
        empty.view(0).fill_(3)
        one.squeeze().add_(2)
        one.expand(1, 1).t().mul_(3)
        one[0].unsqueeze(0).diagonal().sub_(1)
        one.expand(0, 1).add_(100)
        seen.append((empty.cpu(), one.cpu()))
    assert_same(*seen)


def test_writing_many_parts_of_one_base():
    seen = []
    for device in ("cpu", "xla"):
        x = torch.zeros(4, 5, 3, device=device)
        for i in range(4):
            x[i, i:] += i
            x[i].t()[1, ::2] -= 2 * i
            x[..., i % 3].diagonal().mul_(3)
        seen.append((x.cpu(),))
    assert_same(*seen)


def test_complex_parts_are_views():
    seen = []
    for device in ("cpu", "xla"):
        z = torch.tensor([1 + 2j, 3 - 1j]).to(device)
        z.real.add_(1)
        z.imag[1] = 5
        torch.view_as_real(z)[0].mul_(2)
        z.conj()[0] = 1 + 1j
        seen.append((z.cpu(), z.real.cpu(), z.conj().resolve_conj().cpu()))
    assert_same(*seen)


# -- autograd through views ------------------------------------------------------------------------


def gradients(run):
    found = []
    for device in ("cpu", "xla"):
        x = table(device).requires_grad_()
        run(x, device).backward()
        found.append((x.grad.cpu(),))
    return found


RUNS = {
    "in place through a row": lambda x, d: _then(x * 2, lambda y: y[1].mul_(3)),
    "through a transpose of a slice": lambda x, d: _then(
        x * 2, lambda y: y[:, 1:].t().add_(1).mul_(2)
    ),
    "base after view": lambda x, d: _base_after_view(x),
    "copy into a view": lambda x, d: _then(
        torch.zeros(6, 4, device=d), lambda y: y[::2].copy_(x * x)
    ),
    "fill a view": lambda x, d: _then(x * x, lambda y: y.diagonal().fill_(2)),
    "masked": lambda x, d: _then(x * x, lambda y: y.masked_fill_(y > 9, 0)),
    "expand": lambda x, d: (x[:1].expand(5, 4) * x[0]).sum(),
    "unfold": lambda x, d: (x.unfold(1, 2, 1) ** 2).sum(),
    "set an item": lambda x, d: _then(x * 3, lambda y: y.__setitem__((slice(None), 1), x[:, 0])),
    "view of a transpose": lambda x, d: (x.t().reshape(2, 6)[1] ** 2).sum(),
}


def _then(y, write):
    write(y)
    return (y * y).sum()


def _base_after_view(x):
    y = x * 2
    v = y[1]
    y.mul_(3)
    return (v * v).sum()


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_gradients_through_views_and_writes(run):
    assert_same(*gradients(run))


def test_views_know_their_base():
    x = torch.zeros(3, 4, device="xla", requires_grad=True)
    y = x * 1
    v = y[0].t()
    assert v._is_view()
    assert v._base is y
    assert not y._is_view()
    v.add_(1)
    assert y._version == v._version == 1
    assert y.detach()._version == 1


def test_gradient_of_a_leaf_shares_no_memory():
    # where strides differ autograd on the CPU copies a gradient before it becomes .grad
    given = torch.ones(4, 3, device="xla")
    x = table("xla").requires_grad_()
    for count in (1, 2, 3):
        x.t().backward(given)
        assert x.grad.tolist() == [[count] * 4] * 3
    assert given.tolist() == [[1] * 3] * 4
    x.grad.zero_()
    assert given.tolist() == [[1] * 3] * 4


def test_gradient_of_a_sum_can_be_written_to():
    x = table("xla").requires_grad_()
    x.sum().backward()
    x.grad[0, 1] = 5
    x.grad.mul_(2)
    assert x.grad.tolist() == [[2, 10, 2, 2], [2] * 4, [2] * 4]
    torch.nn.utils.clip_grad_value_([x], 3)
    assert x.grad.max().item() == 3


@pytest.mark.parametrize(
    "windows",
    [
        lambda t: t.unfold(0, 2, 1),
        lambda t: t.as_strided((3, 2, 2), (2, 2, 1)),
        lambda t: t.t().unfold(1, 2, 2),
        lambda t: t.unfold(0, 2, 2),
    ],
)
def test_a_write_to_one_of_overlapping_windows(windows):
    """The other windows show what was written, and write nothing themselves."""

    def run(device):
        table = torch.arange(8.0).reshape(4, 2).to(device)
        every = windows(table)
        every[1].copy_(torch.tensor(-1.0).to(device))
        every[0, :, 0].mul_(3)
        table[3] += 1
        every[1].neg_()
        return table.tolist(), every.tolist()

    assert run("cpu") == run("xla")


def test_a_write_of_nothing_to_repeated_elements():
    def run(device):
        row = torch.arange(2.0).to(device)
        row.expand(2, 2).narrow(1, 2, 0).add_(1)
        return row.tolist()

    assert run("cpu") == run("xla") == [0, 1]
