"""Index tensors and masks of a wrong dtype raise where they are used, not when the step is lowered."""

from __future__ import annotations

import pytest
import torch

X = torch.arange(5.0)

INDEXED = {
    "x[i]": lambda x, i: x[i],
    "x[i] = 1": lambda x, i: x.__setitem__(i, 1.0),
    "x[i] = y": lambda x, i: x.__setitem__(i, x[:2].clone()),
    "index_put": lambda x, i: x.index_put((i,), x[:2], accumulate=True),
    "index_select": lambda x, i: x.index_select(0, i),
    "index_fill": lambda x, i: x.index_fill(0, i, 1.0),
    "index_fill, tensor": lambda x, i: x.index_fill(0, i, x[0]),
    "index_fill_": lambda x, i: x.index_fill_(0, i, 1.0),
    "index_add": lambda x, i: x.index_add(0, i, x[:2]),
    "index_copy": lambda x, i: x.index_copy(0, i, x[:2]),
    "index_reduce": lambda x, i: x.index_reduce(0, i, x[:2], "mean"),
    "gather": lambda x, i: x.gather(0, i),
    "scatter": lambda x, i: x.scatter(0, i, 1.0),
    "scatter_add": lambda x, i: x.scatter_add(0, i, x),
    "take": lambda x, i: x.take(i),
    "put": lambda x, i: x.put(i, x[:2]),
    "put_": lambda x, i: x.put_(i, x[:2]),
    "embedding": lambda x, i: torch.nn.functional.embedding(i, x.reshape(5, 1)),
}
MASKED = {
    "masked_fill": lambda x, m: x.masked_fill(m, 0.0),
    "masked_fill_": lambda x, m: x.masked_fill_(m, 0.0),
    "masked_fill_, tensor": lambda x, m: x.masked_fill_(m, torch.tensor(2.0, device=x.device)),
    "masked_scatter": lambda x, m: x.masked_scatter(m, x),
    "where": lambda x, m: torch.where(m, x, x),
}


def raised(call, device, index):
    try:
        call(X.clone().to(device), index.to(device))
    except Exception as error:
        return type(error), str(error)
    return None


def agrees(call, index):
    expected = raised(call, "cpu", index)
    assert raised(call, "xla", index) == expected
    return expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.bool], ids=str)
@pytest.mark.parametrize("name", INDEXED)
def test_index_tensors(name, dtype):
    if dtype == torch.bool and name.startswith(("x[", "index_put")):
        pytest.skip("indices of bool are a mask")
    agrees(INDEXED[name], torch.tensor([0, 1], dtype=dtype))


def test_wrong_index_tensors_are_refused():
    for name in ("x[i] = 1", "index_select", "put_"):
        assert agrees(INDEXED[name], torch.zeros(2)) is not None
    assert agrees(INDEXED["x[i] = 1"], torch.zeros(2))[0] is IndexError


@pytest.mark.filterwarnings("ignore:.*uint8.*is now deprecated")
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize("name", MASKED)
def test_masks(name, dtype):
    agrees(MASKED[name], torch.tensor([1, 0, 1, 0, 0]).to(dtype))


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.float32], ids=str)
def test_class_targets(dtype):
    loss = torch.nn.functional.nll_loss
    agrees(lambda x, i: loss(x.reshape(1, 5).expand(2, 5), i), torch.tensor([0, 1]).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["mul_", "add_", "sub_", "div_", "pow_"])
def test_fractions_do_not_fit_into_integers(name, dtype):
    def call(x, other):
        getattr(x.long(), name)(other)

    agrees(call, torch.ones(5, dtype=dtype))
    agrees(call, torch.tensor(0.5, dtype=dtype))


@pytest.mark.parametrize(
    "shape", [((2, 2), (1, 2), 10), ((6,), (1,), 0), ((2,), (1,), 4), ((0,), (1,), 9)]
)
@pytest.mark.parametrize("name", ["as_strided", "as_strided_copy", "as_strided_scatter"])
def test_strides_that_leave_the_tensor(name, shape):
    def call(x, other):
        size, stride, offset = shape
        given = [other.new_ones(size)] if name.endswith("scatter") else []
        getattr(torch, name)(x, *given, size, stride, offset)

    agrees(call, X)
