"""``as_strided`` and its kin count from the storage's start, as on the CPU, whatever view they get."""

import pytest
import torch

from xla_core.testing.against_cpu import assert_same, attempt

VIEWS = {
    "whole": lambda x: x,
    "rows": lambda x: x[1:],
    "every second": lambda x: x[:, ::2],
    "transposed": lambda x: x.t()[1:],
    "view of a view": lambda x: x[1:].t()[1:, 1:],
    "window of a window": lambda x: x[1:].as_strided((3, 2), (1, 4), 3)[1:],
    "column": lambda x: x.select(1, 2),
    "copied on the CPU": lambda x: x.t().reshape(-1)[4:],
}
WINDOWS = {
    "from the start": ((2, 2), (1, 3), 0),
    "its own strides": ((2,), None),
    "in the middle": ((2, 3), (2, 1), 3),
    "repeated": ((2, 2), (0, 1), 1),
    "nothing": ((0,), (1,), 0),
    "beyond the storage": ((5, 3), (3, 1), 0),
}
DTYPES = [torch.float32, torch.bool, torch.complex64]


def arguments(window, seen):
    """Size, stride and offset of a window of a tensor; without an offset, strides are those it reports."""
    size, stride, *offset = WINDOWS[window]
    return size, seen.stride()[:1] if stride is None else stride, *offset


def table(device, dtype=torch.float32):
    return torch.arange(12).remainder(5).to(dtype).reshape(3, 4).to(device)


def agree(run):
    """``run(device)`` gives the same on the CPU and here, or both refuse."""
    expected, got = attempt(lambda: run("cpu")), attempt(lambda: run("xla"))
    if expected.error is None:
        if got.error is not None:
            raise got.error
        assert_same(got.value, expected.value)
    else:
        assert isinstance(got.error, type(expected.error)), got


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("view", VIEWS)
def test_reading(view, window, dtype):
    def run(device):
        seen = VIEWS[view](table(device, dtype))
        size, stride, *offset = arguments(window, seen)
        copied = torch.as_strided_copy(seen, size, stride, *offset)
        changed = seen.detach()
        changed.as_strided_(size, stride, *offset)
        return (
            seen.as_strided(size, stride, storage_offset=offset[0] if offset else None),
            copied,
            changed,
        )

    agree(run)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool], ids=str)
@pytest.mark.parametrize("window", [w for w in WINDOWS if w != "repeated"])
@pytest.mark.parametrize("view", [v for v in VIEWS if v != "copied on the CPU"])
def test_writing(view, window, dtype):
    def run(device):
        whole = table(device, dtype)
        seen = VIEWS[view](whole)
        there = seen.as_strided(*arguments(window, seen))
        there.copy_(torch.ones((), dtype=dtype).to(device))
        if there.numel():
            there[0].logical_not_()
        return whole, seen, there

    agree(run)


# PyTorch refuses to write where elements repeat
@pytest.mark.parametrize("window", [w for w in WINDOWS if w != "repeated"])
@pytest.mark.parametrize("view", VIEWS)
def test_scatter(view, window):
    def run(device):
        whole = table(device)
        seen = VIEWS[view](whole)
        size, stride, *offset = arguments(window, seen)
        src = torch.full(size, 9.0).to(device)
        result = torch.as_strided_scatter(seen, src, size, stride, *offset)
        # the result looks at a copy of the storage
        return result, whole, result.as_strided((2,), (1,), 0)

    agree(run)


def test_scatter_wants_a_source_of_the_windows_size():
    agree(lambda d: torch.as_strided_scatter(table(d)[1:], torch.zeros(3).to(d), (2,), (1,), 0))


def test_scatter_has_no_gradient_for_a_transposed_tensor():
    x = table("xla").requires_grad_()
    with pytest.raises(RuntimeError, match="contiguous"):
        torch.as_strided_scatter(x.t()[1:], torch.zeros(2).to("xla"), (2,), (1,), 0)


@pytest.mark.parametrize("name", ["as_strided", "as_strided_copy", "as_strided_"])
@pytest.mark.parametrize("window", [w for w in WINDOWS if w != "beyond the storage"])
@pytest.mark.parametrize("view", VIEWS)
def test_gradient(view, window, name):
    def run(device):
        leaf = table(device).requires_grad_()
        seen = VIEWS[view](leaf * 1)
        size, stride, *offset = arguments(window, seen)
        call = getattr(torch, name, None) or getattr(torch.Tensor, name)
        there = call(seen, size, stride, *offset)
        weights = torch.arange(1.0, 1 + there.numel()).reshape(there.shape).to(device)
        (there * there * weights).sum().backward()
        return leaf.grad

    agree(run)


@pytest.mark.parametrize("view", [v for v in VIEWS if v != "copied on the CPU"])
def test_gradient_of_a_write_in_place(view):
    def run(device):
        leaf = table(device).requires_grad_()
        whole = leaf * 1
        seen = VIEWS[view](whole)
        seen.as_strided((2, 2), (1, 3), 2).mul_(leaf[1, 1] + 3)
        (whole * whole + seen.sum()).sum().backward()
        return leaf.grad, whole.detach(), seen.detach()

    agree(run)


def test_a_failed_as_strided_in_place_leaves_the_tensor_as_it_was():
    x = table("xla").t()[1:]
    with pytest.raises(RuntimeError):
        x.as_strided_((100,), (1,), 0)
    assert x.stride() == table("xla").t()[1:].stride()
    assert x.tolist() == table("cpu").t()[1:].tolist()


@pytest.mark.parametrize(
    "seen",
    [
        lambda x: x.view(torch.int32)[1:],
        lambda x: x.view(torch.int16)[1:, 3:],
        lambda x: x.view(torch.int64)[1:].t(),
        lambda x: torch.view_as_complex(x.view(3, 2, 2))[1:],
        lambda x: x.view(torch.uint8)[:, 5:],
    ],
)
def test_a_storage_of_another_dtype(seen):
    def run(device):
        whole = table(device)
        there = seen(whole).as_strided((2, 2), (2, 1), 1)
        before = there.clone()
        there[0] = there[1]
        there.unfold(1, 1, 1)[1].zero_()
        return whole, before, there

    agree(run)


def test_a_storage_with_a_rest():
    def run(device):
        odd = torch.arange(7, dtype=torch.int16).to(device)
        return odd[2:6].view(torch.int32).as_strided((3,), (1,), 0)

    agree(run)


def test_conjugates():
    def run(device):
        whole = torch.complex(table("cpu"), table("cpu") + 1).to(device)
        there = whole.conj()[1:].as_strided((2, 2), (1, 3), 1)
        before = there.clone()
        there[:, 0].mul_(2)
        return whole, before, there

    agree(run)


def test_parts_of_conjugates_are_refused():
    x = torch.complex(table("cpu"), table("cpu") + 1).to("xla").conj().imag
    with pytest.raises(RuntimeError, match="clone"):
        x.as_strided((2,), (1,), 0)


@pytest.mark.parametrize(
    "windows",
    [
        lambda x: x.view(torch.int32).unfold(1, 2, 1)[:, 1],
        lambda x: x.view(torch.int16)[1:].unfold(1, 2, 1)[:, 1],
        lambda x: torch.view_as_complex(x.view(3, 2, 2)).conj().unfold(1, 2, 1)[:, 0],
        lambda x: x.unfold(1, 2, 1)[:, 1].view(torch.int32),
    ],
)
def test_a_write_to_one_of_overlapping_windows_of_another_dtype(windows):
    def run(device):
        whole = table(device)
        there = windows(whole)
        there.mul_(3)
        there[0] = 7
        return whole, there

    agree(run)


@pytest.mark.parametrize("shape", [(2,), (3, 5)])
def test_resize_of_a_view_of_another_dtype(shape):
    def run(device):
        whole = table(device)
        seen = whole.view(torch.int16)[1:, 2:]
        seen.resize_(shape)
        return whole, seen[:2]

    agree(run)


def test_addresses_of_views_of_another_dtype():
    for device in ("cpu", "xla"):
        x = table(device)
        seen = x.view(torch.int16)[1:, 3:]
        assert seen.data_ptr() - x.data_ptr() == 22


def test_in_inference_mode():
    x = table("xla")
    with torch.inference_mode():
        assert x[1:].as_strided((2,), (1,), 0).tolist() == [0, 1]
        assert torch.as_strided_copy(table("xla")[1:], (2,), (1,), 0).tolist() == [0, 1]


@pytest.mark.parametrize(
    "start, window", [(4, ((2,), (1,), 5)), (4, ((2, 2), (1, 2))), (6, ((2,), (1,), 4))]
)
def test_gradients_of_a_tensor_detached_from_the_middle_of_its_storage(start, window):
    def read(device):
        leaf = torch.arange(12.0).to(device)[start:].detach().requires_grad_()
        (leaf[1:].as_strided(*window) ** 2).sum().backward()
        return leaf.grad

    agree(read)


@pytest.mark.parametrize("part", [lambda x: x.t(), lambda x: x[1:], lambda x: x[:, 1:]])
def test_a_write_into_a_window_of_a_detached_part_has_no_gradient(part):
    factor = torch.tensor(3.0).to("xla").requires_grad_()
    detached = part(table("xla")).detach()
    with pytest.raises(RuntimeError, match="clone"):
        detached.as_strided((2,), (1,), 5).mul_(factor)
        (detached * detached).sum().backward()


def test_a_write_into_a_window_of_the_first_part():
    def run(device):
        factor = torch.tensor(3.0).to(device).requires_grad_()
        detached = table(device)[:2].detach()
        window = detached.as_strided((2,), (1,), 5)
        window.mul_(factor)
        (detached.sum() + (window * window).sum()).backward()
        return factor.grad, detached.detach()

    agree(run)


def test_transforms():
    def call(x):
        return (x[4:].as_strided((2,), (1,), 5) ** 2).sum()

    def grad(x):
        return torch.func.grad(call)(x)

    x = torch.arange(10.0)
    agree(lambda device: torch.func.jvp(call, (x.to(device),), (x.to(device) + 1,)))
    with pytest.raises(RuntimeError, match="slices"):
        grad(x.to("xla"))
    agree(
        lambda device: torch.func.grad(lambda x: (x.as_strided((2,), (3,), 5) ** 2).sum())(
            x.to(device)
        )
    )


@pytest.mark.parametrize("view", ["whole", "rows", "transposed"])
def test_under_torch_compile(view):
    def call(x):
        return VIEWS[view](x).as_strided((2, 2), (1, 3), 1) * 2

    part = torch.arange(24.0)
    compiled = torch.compile(call, backend="openxla")
    for piece in (lambda x: x.view(6, 4)[:3], lambda x: x[12:].view(3, 4)):
        assert_same(compiled(piece(part.to("xla"))), call(piece(part)))
