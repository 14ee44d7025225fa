"""List operators whose elements repeat: results, dtypes and errors are those of every single element."""

from __future__ import annotations

import pytest
import torch

from xla_core.operators.foreach import distinct_elements, is_per_element

SHAPES = ((2, 3), (4,), (2, 3), (), (4,), (2, 3), (4,))
DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.int64) * 2


def lists(device: str, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.rand(shape, generator=generator) * 9).to(dtype).to(device)
        for shape, dtype in zip(SHAPES, DTYPES, strict=False)
    ]


def test_elements_that_differ_are_kept_once() -> None:
    kept = distinct_elements(([1, 2, 1, 2], 5, (3, 4, 3, 3), []), lambda pair: pair)
    assert kept == ([[1, 2, 2], 5, [3, 4, 3], []], [0, 1, 0, 2])


@pytest.mark.parametrize("args", [([1, 2],), (3,), ([1, 1], [2, 2, 2]), ([],)])
def test_nothing_to_shorten(args: tuple[object, ...]) -> None:
    assert distinct_elements(args, lambda element: element) is None


def test_numbers_in_a_tensor_do_not_go_in_step() -> None:
    assert is_per_element("aten._foreach_addcmul_.ScalarList")
    assert not is_per_element("aten._foreach_addcmul_.Tensor")
    assert not is_per_element("aten.add.Tensor")


@pytest.mark.parametrize("scalars", [[0.5, 2, 1.5, 3, 2, 0.5, 4], 2.5, 3])
def test_results_of_interleaved_elements(scalars: object) -> None:
    on_cpu = torch._foreach_mul(torch._foreach_add(lists("cpu", 0), lists("cpu", 1)), scalars)
    on_xla = torch._foreach_mul(torch._foreach_add(lists("xla", 0), lists("xla", 1)), scalars)
    for expected, got in zip(on_cpu, on_xla, strict=True):
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
        torch.testing.assert_close(got.cpu(), expected)


def test_written_elements_keep_their_own_shapes() -> None:
    expected, got = [[*lists(d, 0)[:3], *lists(d, 1)[:3]] for d in ("cpu", "xla")]
    for items in (expected, got):
        torch._foreach_addcdiv_(items, [t + 1 for t in items], [t + 2 for t in items])
    for left, right in zip(expected, got, strict=True):
        torch.testing.assert_close(right.cpu(), left)


@pytest.mark.parametrize("which", [0, 4])
def test_the_error_of_one_element(which: int) -> None:
    messages = []
    for device in ("cpu", "xla"):
        left = [torch.ones(2, 3, device=device) for _ in range(6)]
        right = [torch.ones(2, 3, device=device) for _ in range(6)]
        right[which] = torch.ones(2, 4, device=device)
        with pytest.raises(RuntimeError) as caught:
            torch._foreach_add_(left, right)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
