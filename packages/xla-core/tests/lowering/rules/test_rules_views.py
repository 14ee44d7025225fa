"""Reading and writing through view operators, against PyTorch's own views on the CPU."""

from __future__ import annotations

from typing import Any

import jax
import pytest
import torch

import xla_core.lowering.rules as rules
from xla_core.operators.lowering_registry import find_multi_view, find_view
from xla_core.operators.tensor_meta import tensor_meta
from xla_core.testing.rules import check
from xla_core.torch_bridge.dtypes import to_numpy

aten = torch.ops.aten
assert rules.__name__  # importing the package is what registers the rules


def _get(overload: Any, base: torch.Tensor, *args: Any) -> Any:
    rule = find_view(overload)
    assert rule is not None
    with jax.enable_x64(True):
        return jax.jit(lambda b: rule.get(b, *args))(to_numpy(base))


def _put(overload: Any, base: torch.Tensor, value: torch.Tensor, *args: Any) -> Any:
    rule = find_view(overload)
    assert rule is not None and rule.put is not None
    with jax.enable_x64(True):
        return jax.jit(lambda b, v: rule.put(b, v, *args))(to_numpy(base), to_numpy(value))


def _numbers(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    count = int(torch.Size(shape).numel())
    values = torch.arange(count).reshape(shape)
    return values % 3 == 0 if dtype == torch.bool else (values % 100).to(dtype)


def _check_view(overload: Any, base: torch.Tensor, *args: Any) -> None:
    view = overload(base, *args)
    got = _get(overload, base, *args)
    assert got.shape == tuple(view.shape)
    assert (jax.device_get(got) == to_numpy(view)).all()
    rule = find_view(overload)
    assert rule is not None
    if rule.put is None:
        return
    value = _numbers(tuple(view.shape), torch.int64)
    value = value % 2 == 0 if view.dtype == torch.bool else (value + 7).to(view.dtype)
    written = _put(overload, base, value, *args)
    wanted = base.clone()
    overload(wanted, *args).copy_(value)
    assert written.shape == tuple(wanted.shape)
    assert (jax.device_get(written) == to_numpy(wanted)).all()


SHAPED = [
    (aten.alias.default, (2, 3)),
    (aten.detach.default, ()),
    (aten.view.default, (2, 6), [3, -1]),
    (aten.view.default, (0, 3), [0, 3, 1]),
    (aten.view.default, (), [1, 1]),
    (aten._reshape_alias.default, (2, 6), [4, 3], [3, 1]),
    (aten.t.default, (2, 3)),
    (aten.t.default, (3,)),
    (aten.t.default, ()),
    (aten.transpose.int, (2, 3, 4), 0, -1),
    (aten.transpose.int, (), 0, -1),
    (aten.permute.default, (2, 3, 4), [2, -3, 1]),
    (aten.permute.default, (), []),
    (aten.select.int, (4, 5), 0, -1),
    (aten.select.int, (4, 5), -1, 2),
    (aten.slice.Tensor, (7, 3)),
    (aten.slice.Tensor, (7, 3), 0, 2, 5),
    (aten.slice.Tensor, (7, 3), 0, -3, None),
    (aten.slice.Tensor, (7, 3), 0, None, -2, 2),
    (aten.slice.Tensor, (3, 8), -1, 1, 100, 3),
    (aten.slice.Tensor, (3, 8), 1, -100, 100),
    (aten.slice.Tensor, (3, 8), 1, 5, 2),
    (aten.slice.Tensor, (3, 8), 1, 9, 12),
    (aten.slice.Tensor, (3, 8), 1, 0, 8, 100),
    (aten.slice.Tensor, (0, 8), 0, 0, 4),
    (aten.unsqueeze.default, (2, 3), -1),
    (aten.unsqueeze.default, (), 0),
    (aten.squeeze.default, (1, 3, 1)),
    (aten.squeeze.dim, (1, 3, 1), -1),
    (aten.squeeze.dim, (1, 3, 1), 1),
    (aten.squeeze.dims, (1, 3, 1), [0, -1]),
    (aten.diagonal.default, (4, 6)),
    (aten.diagonal.default, (4, 6), 2),
    (aten.diagonal.default, (6, 4), -1),
    (aten.diagonal.default, (4, 6), 9),
    (aten.diagonal.default, (2, 4, 3, 5), -1, 1, -1),
    (aten.diagonal.default, (2, 4, 3), 1, 2, 0),
    (aten.unfold.default, (9,), 0, 3, 3),
    (aten.unfold.default, (2, 10), 1, 2, 3),
    (aten.unfold.default, (3, 7, 2), -2, 3, 3),
    (aten.as_strided.default, (4, 6), [2, 3], [6, 1], 1),
    (aten.as_strided.default, (4, 6), [2, 3], [3, 1], 4),
    (aten.as_strided.default, (4, 6), [6, 4], [1, 6]),
    (aten.as_strided.default, (4, 6), [0, 4], [1, 6]),
]


@pytest.mark.parametrize("case", SHAPED, ids=lambda c: f"{c[0].name()}{c[1:]}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool], ids=str)
def test_view(case: tuple[Any, ...], dtype: torch.dtype) -> None:
    overload, shape, *args = case
    _check_view(overload, _numbers(shape, dtype), *args)


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("size", [3, 20])
def test_overlapping_unfold_reads_every_window(size: int, step: int) -> None:
    base = torch.randn(2, 25)
    assert (jax.device_get(_get(aten.unfold.default, base, 1, size, step))
            == base.unfold(1, size, step).numpy()).all()  # fmt: skip


def test_expand_reads_and_refuses_writes() -> None:
    base = torch.randn(3, 1)
    got = _get(aten.expand.default, base, [2, -1, 4])
    assert (jax.device_get(got) == base.expand(2, -1, 4).numpy()).all()
    rule = find_view(aten.expand.default)
    assert rule is not None and rule.put is None


@pytest.mark.parametrize(
    ("have", "want"),
    [
        (torch.float32, torch.int32),
        (torch.float32, torch.int16),
        (torch.int16, torch.float32),
        (torch.float64, torch.uint8),
        (torch.int8, torch.int64),
        (torch.bool, torch.uint8),
        (torch.uint8, torch.bool),
        (torch.complex64, torch.float32),
        (torch.float32, torch.complex64),
        (torch.complex64, torch.int64),
        (torch.float32, torch.float32),
    ],
    ids=str,
)
def test_view_dtype(have: torch.dtype, want: torch.dtype) -> None:
    base = _numbers((3, 16), have)
    if want == torch.bool:
        base = base % 2
    _check_view(aten.view.dtype, base, want)


def test_complex_views() -> None:
    base = torch.randn(3, 4, dtype=torch.complex64)
    _check_view(aten.view_as_real.default, base)
    _check_view(aten.view_as_complex.default, torch.randn(3, 4, 2))
    got = _get(aten._conj.default, base)
    assert (jax.device_get(got) == base.conj().resolve_conj().numpy()).all()
    _check_view(aten.real.default, base)
    _check_view(aten.imag.default, base)


@pytest.mark.parametrize(
    "case",
    [
        (aten.split.Tensor, (7, 2), 3),
        (aten.split.Tensor, (2, 6), 2, -1),
        (aten.split.Tensor, (0, 6), 2),
        (aten.split_with_sizes.default, (2, 6), [1, 0, 5], 1),
        (aten.unbind.int, (3, 4)),
        (aten.unbind.int, (3, 4), -1),
        (aten.chunk.default, (7, 2), 3),
        (aten.chunk.default, (2, 5), 4, -1),
        (aten.chunk.default, (0, 5), 3),
    ],
    ids=lambda c: f"{c[0].name()}{c[1:]}",
)
def test_several_views(case: tuple[Any, ...]) -> None:
    overload, shape, *args = case
    base = torch.randn(shape)
    rule = find_multi_view(overload)
    assert rule is not None
    parts = rule.expand(tensor_meta(shape, base.dtype), *args)
    wanted = overload(base, *args)
    assert len(parts) == len(wanted)
    for (part, part_args), want in zip(parts, wanted, strict=True):
        got = part(base, *part_args)
        assert got.shape == want.shape and torch.equal(got, want)


@pytest.mark.parametrize(
    "case",
    [
        (aten._unsafe_view.default, (2, 6), [3, -1]),
        (aten.permute_copy.default, (2, 3, 4), [2, 0, 1]),
        (aten.slice_copy.Tensor, (7, 3), 0, 1, 6, 2),
        (aten.select_copy.int, (7, 3), 0, -2),
        (aten.expand_copy.default, (3, 1), [2, 3, 4]),
        (aten.diagonal_copy.default, (4, 5), 1),
        (aten.unfold_copy.default, (9,), 0, 4, 2),
        (aten.squeeze_copy.dims, (1, 3, 1), [0, 2]),
        (aten.as_strided_copy.default, (4, 6), [2, 3], [1, 6], 3),
        (aten._reshape_copy.default, (2, 6), [3, 4]),
        (aten.slice_backward.default, (2, 3), [7, 3], 0, 1, 5, 3),
        (aten.slice_backward.default, (0, 3), [7, 3], 0, 5, 2, 1),
        (aten.select_backward.default, (3,), [7, 3], 0, -2),
        (aten.diagonal_backward.default, (3,), [4, 5], 2, 0, 1),
        (aten.unfold_backward.default, (5, 3), [11], 0, 3, 2),
        (aten.unfold_backward.default, (2, 20), [21], 0, 20, 1),
    ],
    ids=lambda c: f"{c[0].name()}{c[1:]}",
)
def test_copies_and_gradients(case: tuple[Any, ...]) -> None:
    overload, shape, *args = case
    check(overload, torch.randn(shape), *args)


def test_scatters_into_views() -> None:
    base = torch.randn(5, 6)
    check(aten.slice_scatter.default, base, torch.randn(2, 6), 0, 1, 5, 2)
    check(aten.select_scatter.default, base, torch.randn(5), 1, -1)
    check(aten.diagonal_scatter.default, base, torch.randn(4), 2)
    check(aten.as_strided_scatter.default, base, torch.randn(2, 3), [2, 3], [1, 6], 4)
