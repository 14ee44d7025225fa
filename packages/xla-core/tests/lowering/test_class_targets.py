"""Targets of classification losses in a dtype that is no class number: the CPU's error, at the call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pytest
import torch
from torch.nn import functional as F

import torch_xla  # noqa: F401 - registers the device

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

# The loss, the shape of what was predicted, and of the target.
LOSSES: Final[dict[str, tuple[Loss, tuple[int, ...], tuple[int, ...]]]] = {
    "nll_loss": (F.nll_loss, (3, 4), (3,)),
    "nll_loss of one": (F.nll_loss, (4,), ()),
    "nll_loss of an image": (F.nll_loss, (3, 4, 2, 2), (3, 2, 2)),
    "cross_entropy": (F.cross_entropy, (3, 4), (3,)),
    "cross_entropy of one": (F.cross_entropy, (4,), ()),
    "cross_entropy of an image": (F.cross_entropy, (3, 4, 2, 2), (3, 2, 2)),
    "smoothed cross_entropy": (
        lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1),
        *((3, 4), (3,)),
    ),
    "multi_margin_loss": (F.multi_margin_loss, (3, 4), (3,)),
    "multilabel_margin_loss": (F.multilabel_margin_loss, (3, 4), (3, 4)),
}


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.bool]
)
@pytest.mark.parametrize("name", LOSSES)
def test_a_target_of_another_dtype_is_refused(name: str, dtype: torch.dtype) -> None:
    loss, predicted, target = LOSSES[name]
    told = []
    for device in ("cpu", "xla"):
        with pytest.raises(RuntimeError) as caught:
            loss(
                torch.zeros(predicted, device=device), torch.zeros(target, device=device).to(dtype)
            )
        told.append(str(caught.value))
    assert told[0] == told[1]
