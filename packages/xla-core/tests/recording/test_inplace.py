"""Writing in place on ``xla``: values, aliases, versions and refusals are PyTorch's own."""

from __future__ import annotations

import pytest
import torch

import torch_xla
from xla_core.testing.against_cpu import assert_same, fallbacks

BOTH = ("cpu", "xla")
OVERLAP = "more than one element of the written-to tensor refers to a single memory location"


def table(device, dtype=torch.float32):
    return torch.arange(6).reshape(2, 3).clone().to(dtype).to(device)


def same_on_both(run):
    """Run on both devices and compare the tensors and other values that come back."""
    expected, got = run("cpu"), run("xla")
    assert len(expected) == len(got)
    for want, have in zip(expected, got, strict=True):
        if isinstance(want, torch.Tensor):
            assert have.device.type == "xla"
            assert (want.dtype, want.shape) == (have.dtype, have.shape)
            assert torch.equal(want.detach(), have.detach().cpu())
        else:
            assert want == have


def same_error(run):
    """Both devices refuse, with the same type and text but for the names of tensor types."""
    texts = []
    for device in BOTH:
        with pytest.raises(Exception) as caught:
            run(device)
        text = str(caught.value).replace("XLAFloatType", "torch.FloatTensor")
        texts.append((type(caught.value), text))
    assert texts[0] == texts[1]
    return texts[0][1]


# -- what an in-place operation does ---------------------------------------------------------------

WRITES = {
    "add": lambda x, o: x.add_(o, alpha=2),
    "iadd": lambda x, o: x.__iadd__(o),
    "mul by a number": lambda x, o: x.mul_(2.5),
    "sub in a chain": lambda x, o: x.sub_(1).mul_(o).add_(3),
    "fill": lambda x, o: x.fill_(4),
    "fill with a tensor": lambda x, o: x.fill_(o.sum()),
    "zero": lambda x, o: x.zero_(),
    "clamp": lambda x, o: x.clamp_(1, 4),
    "masked fill": lambda x, o: x.masked_fill_(x > 2, -1),
    "masked scatter": lambda x, o: x.masked_scatter_(x > 2, o),
    "copy": lambda x, o: x.copy_(o),
    "copy that broadcasts": lambda x, o: x.copy_(o[0]),
    "copy from another dtype": lambda x, o: x.copy_(o.to(torch.int64) * 3),
    "copy from the host": lambda x, o: x.copy_(torch.ones(3)),
    "copy of itself": lambda x, o: x.copy_(x),
    "item": lambda x, o: x.__setitem__((0, 1), 9),
    "row": lambda x, o: x.__setitem__(1, o[0]),
    "strided": lambda x, o: x.__setitem__((slice(None), slice(None, None, 2)), 9.5),
    "ellipsis and None": lambda x, o: x.__setitem__((..., 1, None), o[:, :1]),
    "mask": lambda x, o: x.__setitem__(o > 1, 7),
    "mask of rows": lambda x, o: x.__setitem__(o[:, 0] > 0, 7),
    "mask with values": lambda x, o: x.__setitem__(o > 0, x.flatten()[:4] + 1),
    "mask from the host": lambda x, o: x.__setitem__(torch.tensor([True, False]), 7),
    "positions": lambda x, o: x.__setitem__(torch.tensor([1, 0]), o),
    "positions on the device": lambda x, o: x.__setitem__((o[:, 0].long(), [2, 1]), 5),
    "index_put": lambda x, o: x.index_put_((o[1].long(), o[0].long()), o[1], accumulate=True),
    "index_put with a mask": lambda x, o: x.index_put_(
        (o > 1,), torch.tensor(3.0, device=o.device)
    ),
    "index_add": lambda x, o: x.index_add_(1, o[:, 0].long(), o[:, :2]),
    "index_fill": lambda x, o: x.index_fill_(0, o[:1, 0].long(), 8),
    "scatter": lambda x, o: x.scatter_(1, o.long(), 6),
    "scatter_add": lambda x, o: x.scatter_add_(1, o.long(), o),
    "lerp": lambda x, o: x.lerp_(o, 0.5),
    "addcmul": lambda x, o: x.addcmul_(o, o, value=2),
    "addcdiv": lambda x, o: x.addcdiv_(o, o + 1, value=2),
    "where its own result is the index": lambda x, o: x.__setitem__(x[0].long() % 2, 1),
    "tril": lambda x, o: x.tril_(),
    "random": lambda x, o: x.uniform_().mul_(0),
    "list": lambda x, o: torch._foreach_mul_([x, x.new_ones(2)], 2.0),
    "list of views": lambda x, o: torch._foreach_add_([x[0], x[1]], [o[1], o[0]], alpha=2),
    "chunks": lambda x, o: [part.add_(i) for i, part in enumerate(x.split(1, 1))],
}


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "through a view"])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.filterwarnings("ignore::xla_core.dispatch.cpu_fallback.FallbackWarning")
def test_write(write, whole):
    def run(device):
        base = torch.arange(20.0).reshape(4, 5).clone().to(device)
        x = table(device) if whole else base[1:3].t()[1:4].t()
        other = torch.tensor([[0.0, 1, 2], [1, 0, 1]], device=device)
        write(x, other)
        return x, base, other, x._version

    same_on_both(run)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float64]
)
def test_write_keeps_the_dtype(dtype):
    def run(device):
        x = table(device, dtype)
        x.copy_(torch.tensor([0, 1, 3], device=device))
        x[1] = True
        x[0, :2] = torch.tensor([1.0, 2.0])
        return x, x.copy_(table(device) > 2).clone(), x.fill_(1)

    same_on_both(run)


def test_the_result_is_the_tensor_itself():
    x = table("xla")
    view = x[0]
    assert x.add_(1) is x
    assert x.mul_(2).sub_(1) is x
    assert view.zero_() is view
    x += 1
    assert view.tolist() == [1, 1, 1]


def test_numbers_that_change_do_not_compile(compile_count):
    x = table("xla")
    counts = []
    for step in range(6):
        x.add_(x, alpha=0.1 * step + 0.45).mul_(1.0 + 0.3 * (step + 1)).clamp_(
            -step - 2.5, step + 90.5
        )
        x[0] += 0.25 + step
        torch_xla.sync()
        counts.append(compile_count())
    assert counts[1:] == counts[:1] * 5


def test_updates_of_views_in_a_loop_compile_once(compile_count):
    x = torch.zeros(3, 4, device="xla")
    row = x[1]
    counts = []
    for step in range(4):
        row.add_(step + 2)
        x[:, 0] = row[1]
        torch_xla.sync()
        counts.append(compile_count())
    assert counts[1] == counts[3]  # the first step writes zeros that were never on the device
    assert x.tolist() == [[14, 0, 0, 0], [14, 14, 14, 14], [14, 0, 0, 0]]


# -- refusals ------------------------------------------------------------------------------------

EXPANDED = {
    "add": lambda x: x.add_(1),
    "mul": lambda x: x.mul_(x),
    "copy": lambda x: x.copy_(x.clone()),
    "clamp": lambda x: x.clamp_(0, 1),
    "random": lambda x: x.normal_(),
    "a column": lambda x: x[:, 0].neg_(),
    "transposed": lambda x: x.t().add_(1),
    "out": lambda x: torch.add(x.clone(), 1, out=x),
    "exponent": lambda x: torch._foreach_exp_([x]),
}


@pytest.mark.parametrize("write", EXPANDED.values(), ids=EXPANDED)
def test_expanded_tensors_are_refused(write):
    assert OVERLAP in same_error(lambda device: write(torch.ones(3, device=device).expand(2, 3)))


def test_a_refused_write_changes_nothing():
    x = torch.ones(3, device="xla")
    wide = x.expand(2, 3)
    column = wide[:, 1]
    assert column.tolist() == [1, 1]
    with pytest.raises(RuntimeError, match=OVERLAP):
        column.add_(1)
    assert column.tolist() == [1, 1]
    assert (column * 2).tolist() == [2, 2]
    assert x.tolist() == [1, 1, 1]


def test_expanded_tensors_can_be_filled():
    def run(device):
        x = torch.ones(2, 1, 3, device=device)
        x.expand(2, 4, 3)[1].fill_(5)
        x[:, 0].t().expand(2, 3, 2)[:, 1:].zero_()
        return (x,)

    same_on_both(run)


ERRORS = {
    "leaf": lambda d: table(d).requires_grad_().add_(1),
    "list with a leaf": lambda d: torch._foreach_add_([table(d).requires_grad_()], 1),
    "view of a leaf": lambda d: table(d).requires_grad_()[0].add_(1),
    "one of several views": lambda d: (table(d).requires_grad_() * 1).unbind()[0].add_(1),
    "view made without grad": lambda d: _view_without_grad(d).add_(1),
    "inference tensor": lambda d: _inference_tensor(d).add_(1),
    "dtype": lambda d: table(d, torch.int64).add_(0.5),
    "dtype of a tensor": lambda d: table(d, torch.int64).mul_(table(d)),
    "shape": lambda d: torch.ones(3, device=d).add_(table(d)),
    "shape that does not broadcast": lambda d: table(d).add_(torch.ones(4, device=d)),
    "shape of a logical": lambda d: (torch.ones(1, device=d) > 0).logical_or_(table(d) > 1),
    "shape in copy": lambda d: table(d).copy_(torch.ones(4, device=d)),
    "shape in copy from the host": lambda d: table(d).copy_(torch.ones(2, 2, 3)),
    "mask's shape": lambda d: table(d).__setitem__(torch.tensor([True, False, True]).to(d), 1),
    "values for positions": lambda d: table(d).index_put_((torch.tensor([0]).to(d),), torch.ones(2).to(d)),
    "dtype in index_put": lambda d: table(d).index_put_((torch.tensor([0]).to(d),), table(d).long()),
    "index out of range": lambda d: table(d).__setitem__(2, 1),
    "detach_ of a view": lambda d: (table(d).requires_grad_() * 2)[0].detach_(),
    "resize_ of what requires grad": lambda d: table(d).requires_grad_().resize_(2),
    "saved result": lambda d: _then_backward(table(d).requires_grad_().exp(), lambda y: y.add_(1)),
    "saved result, list": lambda d: _then_backward(
        table(d).requires_grad_().exp(), lambda y: torch._foreach_mul_([y], 2.0)
    ),
    "saved result, data of a view": lambda d: _then_backward(
        table(d).requires_grad_().exp(), lambda y: y[0].detach().zero_()
    ),
}  # fmt: skip


@pytest.mark.parametrize("run", ERRORS.values(), ids=ERRORS)
def test_errors_are_the_cpus(run):
    same_error(run)


def _view_without_grad(device):
    y = table(device).requires_grad_() * 1
    with torch.no_grad():
        return y[0]


def _inference_tensor(device):
    with torch.inference_mode():
        return table(device)


def _then_backward(y, write):
    write(y)
    y.sum().backward()


@pytest.mark.parametrize("device", BOTH)
def test_a_view_saved_for_backward_and_then_a_write_to_its_base(device):
    y = table(device).requires_grad_() * 1
    v = y[0]
    loss = (v * v).sum()
    y.add_(1)
    with pytest.raises(
        RuntimeError,
        match=r"modified by an inplace operation.* is at version 1; expected version 0",
    ):
        loss.backward()


def test_data_hides_a_write_from_autograd():
    def run(device):
        x = table(device).requires_grad_()
        y = x.exp()
        y.data.zero_()
        y.sum().backward()
        return x.grad, y, y._version

    same_on_both(run)


# -- sharing ---------------------------------------------------------------------------------------


def test_detach_and_data_share_the_value():
    def run(device):
        x = table(device).requires_grad_()
        d, data = x.detach(), x.data
        d.add_(1)
        data[0] = 9
        with torch.no_grad():
            x.mul_(2)
        return x, d, data, x._version, d._version, data._version, d.requires_grad

    same_on_both(run)


def test_set_data_takes_value_shape_and_dtype():
    def run(device):
        x, y = table(device), torch.ones(4, device=device, dtype=torch.float64)
        view, alias = x[0], x.detach()
        x.data = y
        x.add_(1)
        view.add_(10)
        return x, y, view, alias

    same_on_both(run)


def test_set_data_refuses_another_device():
    x = table("xla")
    with pytest.raises(
        RuntimeError, match=r"cannot set \.data of a tensor on xla:0 to a tensor on cpu"
    ):
        x.data = torch.ones(2)
    assert x.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_set_():
    def run(device):
        x, y = table(device), torch.ones(4, device=device)
        view = x[0]
        x.set_(y)
        x[1] = 7
        view.zero_()
        z = torch.ones(3, device=device)
        z.set_()
        return x, y, view, z

    same_on_both(run)


def test_swap_tensors():
    def run(device):
        x, y = table(device), torch.ones(4, dtype=torch.int64, device=device)
        alias = x.detach()
        torch.utils.swap_tensors(x, y)
        x.add_(1)
        y.mul_(2)
        return x, y, alias

    same_on_both(run)


def test_swapped_parameters_train_on():
    def run(device):
        p = torch.nn.Parameter(torch.ones(3, device=device))
        q = torch.nn.Parameter(torch.full((2,), 2.0, device=device))
        torch.utils.swap_tensors(p, q)
        (p * p).sum().backward()
        with torch.no_grad():
            p -= p.grad
        return p, p.grad, q

    same_on_both(run)


RESHAPING = {
    "transpose_": lambda x: x.transpose_(0, 1),
    "t_": lambda x: x.t_(),
    "swapaxes_": lambda x: x.swapaxes_(0, 1),
    "unsqueeze_": lambda x: x.unsqueeze_(1),
    "squeeze_": lambda x: x.unsqueeze_(0).squeeze_(),
    "squeeze_ one": lambda x: x.unsqueeze_(0).squeeze_(0),
    "resize_ to fewer": lambda x: x.resize_(2, 2),
    "resize_ to the same": lambda x: x.resize_(3, 2),
    "resize_as_": lambda x: x.resize_as_(x.new_ones(5)),
    "resize_ and back": lambda x: x.resize_(2).add_(1).resize_(2, 3),
    "t_ and resize_": lambda x: x.t_().resize_(4),
}


@pytest.mark.parametrize("synced", [False, True])
@pytest.mark.parametrize("reshape", RESHAPING.values(), ids=RESHAPING)
def test_a_tensor_that_looks_differently_afterwards(reshape, synced):
    def run(device):
        x = table(device)
        view, alias = x[1], x.detach()
        if synced and device == "xla":
            torch_xla.sync()
        result = reshape(x)
        assert result is x
        x.add_(10)
        view.mul_(2)
        if synced and device == "xla":
            torch_xla.sync()
        alias[0] = -1
        return x, view, alias, x.is_leaf

    same_on_both(run)


def test_resize_to_more_elements_keeps_the_first_ones():
    x = table("xla")
    view = x[1]
    x.resize_(4, 2)
    assert x.flatten()[:6].tolist() == [0, 1, 2, 3, 4, 5]
    x.fill_(1)
    assert view.tolist() == [3, 4, 5]  # it keeps what it looks at
    empty = torch.empty(0, device="xla")
    assert empty.resize_(2, 2).fill_(3).tolist() == [[3, 3], [3, 3]]


def test_gradients_through_tensors_that_look_differently_afterwards():
    def run(device):
        x = table(device).requires_grad_()
        y = x * 2
        y.t_().unsqueeze_(1).transpose_(0, 1)
        y[0, 1] *= 3
        (y * y).sum().backward()
        return y, x.grad

    same_on_both(run)


def test_detach_ends_a_graph():
    def run(device):
        x = table(device).requires_grad_()
        y = x * 2
        y.detach_()
        z = (y * x).sum()
        z.backward()
        y.add_(1)
        return x.grad, y, y.requires_grad, y.is_leaf

    same_on_both(run)


def test_copies_between_dtypes_through_views_keep_gradients():
    def run(device):
        x = table(device).requires_grad_()
        y = torch.zeros(3, 4, dtype=torch.float64, device=device)
        y.t()[1:3, 1:].copy_(x.t()[1:])
        y[0, 0] = x.sum()
        (y * y).sum().backward()
        return y, x.grad

    same_on_both(run)


def test_shifts_in_place_are_recorded():
    def shifted(device):
        x = torch.arange(6, dtype=torch.int32, device=device)
        x <<= 3
        x >>= torch.ones(6, dtype=torch.int32, device=device)
        return x

    with fallbacks() as ran_on_cpu:
        assert_same(shifted("xla"), shifted("cpu"))
    assert not ran_on_cpu
