"""PyTorch still says what errors are told apart by; a version that says it in other words fails here."""

from __future__ import annotations

import os

import pytest
import torch

from xla_core.torch_bridge import error_texts


def test_a_write_to_a_leaf():
    leaf = torch.ones(2, requires_grad=True)
    with pytest.raises(RuntimeError) as caught:
        leaf.add_(1)
    assert error_texts.is_write_to_leaf(caught.value)
    assert not error_texts.is_limit_of_cpu_kernels(caught.value)


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.ones(2, 3).t().view(6),
        lambda: torch.ones(2).gather(0, torch.tensor([5])),
        lambda: torch.ones(2, dtype=torch.int64).softmax(0),
    ],
    ids=["strides", "indices", "dtypes"],
)
def test_what_only_kernels_of_the_cpu_refuse(call):
    with pytest.raises((RuntimeError, IndexError)) as caught:
        call()
    assert error_texts.is_limit_of_cpu_kernels(caught.value)
    assert not error_texts.is_write_to_leaf(caught.value)


def test_a_pipe_whose_other_end_is_gone():
    """In the C library's words, which gloo repeats."""
    reading, writing = os.pipe()
    os.close(reading)
    with pytest.raises(OSError) as caught:
        os.write(writing, b"words")
    os.close(writing)
    assert error_texts.is_lost_connection(caught.value)
    assert not error_texts.is_lost_connection(RuntimeError("shapes differ"))
