"""Training steps of mixtures of experts over a mesh of TPUs: ``llama.py`` with experts in place of its MLPs.

    xla-plan run examples/pods/mixture.py:training_step --topology v5e:4x4 --mesh fsdp=2,expert=8 --set size=8x7b

A token goes to the two experts that a router likes best, as far as these have room: an expert takes ``capacity``
times its share of a sequence, and what comes later is left out (the token keeps its value). So every value has a
constant shape (Lepikhin et al. 2020, GShard). The axis ``expert`` of the mesh splits experts, and the batch
outside of them: between the two the compiler sends tokens from all chips to all. The loss that keeps experts
equally busy is not in the example; it costs next to nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Final

import torch
from llama import BATCH, PARTS, PLACES, Linear, Shape, Sharding, step_of
from torch import nn
from torch.nn import functional as F

import torch_xla.distributed.spmd as xs

OTHERS: Final = ("data", "fsdp")
"""The axes that the batch lies on inside the experts."""
INSIDE: Final = ("fsdp", "sequence")
"""The axes that an expert's weights are split over."""


@dataclasses.dataclass(frozen=True)
class MixtureShape(Shape):
    """A transformer with ``experts`` in each layer, of which a token visits ``chosen``."""

    experts: int = 8
    chosen: int = 2
    capacity: float = 1.25

    def feed_forward(self, how: Sharding) -> nn.Module:
        """The router and the experts."""
        return Mixture(self, how)

    @property
    def feed_forward_weights(self) -> int:
        """Those of the experts that a token visits, and the router's."""
        return self.chosen * super().feed_forward_weights + self.width * self.experts


SIZES: Final = {
    "tiny": MixtureShape(2, 256, 4, 2, 512, 1024, head=64),
    "8x7b": MixtureShape(32, 4096, 32, 8, 14336, 32000),
    "8x22b": MixtureShape(56, 6144, 48, 8, 16384, 32768),
}


class ExpertLinear(nn.Module):
    """A product of each expert's tokens with its own float32 weight, computed in bfloat16."""

    def __init__(self, experts: int, inputs: int, outputs: int, axes: tuple[Any, Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs))
        self.axes = ("expert", *axes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` (experts, batch, places, in) to (experts, batch, places, out)."""
        return torch.einsum("ebci,eoi->ebco", x, self.weight.to(x.dtype))


class Mixture(nn.Module):
    """The experts of one layer: each is a SwiGLU."""

    def __init__(self, shape: MixtureShape, how: Sharding) -> None:
        super().__init__()
        self.shape, self.how = shape, how
        count = shape.experts
        self.router = Linear(shape.width, count, (None, PARTS))
        self.gate = ExpertLinear(count, shape.width, shape.hidden, ("tensor", INSIDE))
        self.up = ExpertLinear(count, shape.width, shape.hidden, ("tensor", INSIDE))
        self.down = ExpertLinear(count, shape.hidden, shape.width, (INSIDE, "tensor"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of (batch, length, width)."""
        weights = self.how.held(self._weights(x), BATCH, None, None, None).to(x.dtype)
        # a place that nobody has gets zeros
        visits = torch.einsum("bsec,bsd->ebcd", (weights != 0).to(x.dtype), x)
        visits = self.how.held(visits, "expert", OTHERS, None, None)
        hidden = F.silu(self.gate(visits)) * self.up(visits)
        hidden = self.how.held(hidden, "expert", OTHERS, None, "tensor")
        back = self.how.held(self.down(hidden), "expert", OTHERS, None, None)
        return self.how.held(torch.einsum("bsec,ebcd->bsd", weights, back), BATCH, PLACES, None)

    def _weights(self, x: torch.Tensor) -> torch.Tensor:
        """How much of an expert's place each token gets: (batch, length, experts, places), in float32."""
        length = x.shape[1]
        count, chosen = self.shape.experts, self.shape.chosen
        places = min(length, math.ceil(self.shape.capacity * chosen * length / count))
        likes, experts = torch.topk(torch.softmax(self.router(x).float(), -1), chosen)
        likes = likes / likes.sum(-1, keepdim=True)
        taken = F.one_hot(experts, count).flatten(1, 2)  # (batch, length * chosen, experts)
        place = ((taken.cumsum(1) - 1) * taken).sum(-1)
        # a place beyond the last one is none: its row has no one
        where = (place[..., None] == torch.arange(places, device=x.device)).float()
        both = taken.float()[..., None] * where[..., None, :]
        both = both.unflatten(1, (length, chosen))
        return (both * likes[..., None, None]).sum(2)


def training_step(
    mesh: xs.Mesh, *, size: str = "tiny", experts: int = 0, **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], object], int]:
    """``llama.step_of`` a model of ``SIZES``, with ``experts`` of them in each layer if that is not 0."""
    shape = SIZES[size]
    if experts:
        shape = dataclasses.replace(shape, experts=experts)
    return step_of(shape, mesh, **options)
