"""Training steps of ``llama.py``'s models as pipelines: the axis ``stage`` of the mesh splits layers.

    xla-plan run examples/pods/pipeline.py:training_step --topology v5p:4x4x4 --mesh stage=4,fsdp=16 \\
        --set size=8b --set sequences=256 --set microbatches=16

The chips of a stage have the weights of consecutive layers. A batch comes in ``microbatches``: in each iteration of
a loop every stage computes its layers for another one of them, and gives it to the next stage (Xu et al. 2021,
GSPMD, section 3.3). All stages are one value, whose first dimension is split over ``stage``: ``torch.vmap``
computes their layers, and a shift of that dimension sends from chip to chip. In the first and last iterations some
stages compute on zeros: ``stages - 1`` of ``microbatches + stages - 1``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from llama import BATCH, SIZES, Layer, Shape, Sharding, step_of
from torch import nn

import torch_xla.distributed.spmd as xs
from torch_xla.experimental.scan import scan
from torch_xla.utils.checkpoint import checkpoint


@dataclasses.dataclass(frozen=True)
class PipelinedShape(Shape):
    """A transformer whose layers are stages, for a batch in ``microbatches``."""

    microbatches: int = 8

    def stack(self, how: Sharding) -> nn.Module:
        """The layers."""
        return Pipeline(self, how)


class InsideStages(Sharding):
    """Values of single layers are not marked: ``torch.vmap`` has no rule for that. Weights and stages are."""

    def held(self, value: torch.Tensor, *axes: object) -> torch.Tensor:
        """``value`` itself."""
        return value


class Pipeline(nn.Module):
    """The layers by stages: weights are (stages, layers of a stage, ...)."""

    def __init__(self, shape: PipelinedShape, how: Sharding) -> None:
        super().__init__()
        if how.attention != "plain" or how.remat not in (True, False):
            raise ValueError(
                f"attention={how.attention!r}, remat={how.remat!r}: a pipeline takes plain attention, as the "
                "kernel has no rule for torch.vmap, and saves the inputs of stages (remat=True) or all (False)"
            )
        self.how, self.microbatches = how, shape.microbatches
        self.stages = how.mesh.shape().get("stage", 1)
        if shape.layers % self.stages:
            raise ValueError(f"{shape.layers} layers do not divide into {self.stages} stages")
        self.count = shape.layers // self.stages
        one = Layer(shape, InsideStages(how.mesh, "plain", remat=True, scan=True))
        self.names = [name for name, _ in one.named_parameters()]
        self.weights = nn.ParameterList(
            nn.Parameter(torch.empty(self.stages, self.count, *p.shape)) for p in one.parameters()
        )
        homes = [one.get_submodule(name.rpartition(".")[0]) for name in self.names]
        self.weights.axes = [("stage", None, *home.axes) for home in homes]
        self.one = [one]  # in a list: its own parameters are none of the model's

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """Of (batch, length, width)."""

        def stage(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
            for layer in range(self.count):
                named = {n: w[layer] for n, w in zip(self.names, weights, strict=True)}
                x = torch.func.functional_call(self.one[0], named, (x, angles), strict=True)
            return x

        def iteration(
            state: torch.Tensor, entering: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            state = torch.cat(
                [entering[None], state[:-1]]
            )  # each stage gets what the one before had
            state = self.how.held(state, "stage", BATCH, None, None)
            stages = torch.vmap(stage)
            call = partial(checkpoint, stages) if self.how.remat else stages
            state = call(state, *self.weights)
            state = self.how.held(state, "stage", BATCH, None, None)
            return state, state[-1]

        # a microbatch has a part of each chip's sequences
        entering = x.unflatten(0, (-1, self.microbatches)).transpose(0, 1)
        empty = torch.zeros_like(entering[:1])
        entering = torch.cat([entering, empty.expand(self.stages - 1, *empty.shape[1:])])
        entering = self.how.held(entering, None, BATCH, None, None)
        nothing = empty.expand(self.stages, *empty.shape[1:]).clone()
        _, leaving = scan(iteration, self.how.held(nothing, "stage", BATCH, None, None), entering)
        return leaving[self.stages - 1 :].transpose(0, 1).flatten(0, 1)


def training_step(
    mesh: xs.Mesh, *, size: str = "tiny", microbatches: int = 8, **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], object], int]:
    """``llama.step_of`` a model of ``SIZES`` in stages; a batch must divide into ``microbatches``."""
    shape = PipelinedShape(**vars(SIZES[size]), microbatches=microbatches)
    return step_of(shape, mesh, **{"attention": "plain", **options})
