"""Training steps of Llama-shaped transformers over a mesh of TPUs, in plain PyTorch.

    xla-plan run examples/pods/llama.py:training_step --topology v5e:4x4 --mesh fsdp=16 --set size=8b

The files beside it that are named after a size have its options.

Parameters are float32 (master weights), products are computed in bfloat16, layers are computed again in
the backward pass, the optimizer is AdamW. Axes of the mesh: ``data`` splits the batch, ``fsdp`` the batch,
parameters and optimizer state, ``sequence`` the same but positions in place of the batch (and heads inside
attention: Jacobs et al. 2023, DeepSpeed Ulysses), ``tensor`` heads, hidden units and the vocabulary; any of them
may be missing.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from functorch.compile import default_partition
from saved_values import saving_products
from torch import nn
from torch.nn import functional as F

import torch_xla.distributed.spmd as xs
from torch_xla.experimental.custom_kernel import flash_attention
from torch_xla.experimental.scan import scan
from torch_xla.utils.checkpoint import checkpoint

PARTLY: Final = ("products", "narrow")
"""Values of ``remat`` with which the backward pass has what products give, all or those as narrow as the model."""
BATCH: Final = ("data", "fsdp", "expert")
"""The axes of the mesh that a batch is split over; ``expert`` is that of ``mixture.py``."""
PLACES: Final = "sequence"
"""The axis that positions are split over."""
PARTS: Final = ("fsdp", "sequence", "expert")
"""The axes that parameters are split over, and gathered along where they are used."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes of a transformer."""

    layers: int
    width: int
    heads: int
    key_heads: int
    hidden: int
    vocabulary: int
    head: int = 128

    def feed_forward(self, how: Sharding) -> nn.Module:
        """What follows attention in a layer."""
        return GatedMLP(self, how)

    def stack(self, how: Sharding) -> nn.Module:
        """All layers."""
        return Stacked(self, how) if how.scan else Repeated(self, how)

    @property
    def feed_forward_weights(self) -> int:
        """How many weights of ``feed_forward`` a token is multiplied with."""
        return 3 * self.width * self.hidden


SIZES: Final = {
    "tiny": Shape(2, 256, 4, 2, 512, 1024, head=64),
    "8b": Shape(32, 4096, 32, 8, 14336, 128256),
    "70b": Shape(80, 8192, 64, 8, 28672, 128256),
    "405b": Shape(126, 16384, 128, 8, 53248, 128256),
    # those of MaxText's default model that its figures for v5p are of (global_parameter_scale 32 and 64)
    "maxtext-32b": Shape(32, 8192, 64, 64, 28672, 32000),
    "maxtext-64b": Shape(64, 8192, 64, 64, 28672, 32000),
}


class Sharding:
    """How tensors lie on the mesh, and how attention and recomputation are done."""

    def __init__(self, mesh: xs.Mesh, attention: str, remat: bool | str, scan: bool) -> None:
        if remat not in (True, False, *PARTLY) or (remat in PARTLY and not scan):
            raise ValueError(
                f"remat={remat!r}: True, False or, with loop=True, {' or '.join(PARTLY)}"
            )
        self.mesh = mesh
        self.attention = attention
        self.remat = remat
        self.scan = scan

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the mesh's axes."""
        return self.mesh.axis_names or ()

    def spec(self, *axes: object) -> tuple[Any, ...]:
        """``axes`` without those that the mesh lacks."""

        def kept(axis: object) -> Any:
            several = axis if isinstance(axis, tuple) else (axis,)
            there = tuple(a for a in several if a in self.axes)
            return (there if len(there) > 1 else there[0]) if there else None

        return tuple(map(kept, axes))

    def mark(self, tensor: torch.Tensor, *axes: object) -> torch.Tensor:
        """Split a parameter or an input."""
        xs.mark_sharding(tensor, self.mesh, self.spec(*axes))
        return tensor

    def held(self, value: torch.Tensor, *axes: object) -> torch.Tensor:
        """A value of the step, split with its gradient."""
        return xs.mark_sharding_with_gradients(value, self.mesh, self.spec(*axes))


class Linear(nn.Module):
    """A product with a float32 weight, computed in bfloat16; ``axes`` split the weight (out, in)."""

    def __init__(self, inputs: int, outputs: int, axes: tuple[object, object]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.axes = axes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` (..., in) to (..., out)."""
        return F.linear(x, self.weight.to(x.dtype))


class Norm(nn.Module):
    """Root mean square norm, computed in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.axes = (None,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of the last dimension."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight, 1e-5).to(x.dtype)


class Attention(nn.Module):
    """Attention with grouped key heads and rotary positions."""

    def __init__(self, shape: Shape, how: Sharding) -> None:
        super().__init__()
        self.shape, self.how = shape, how
        inner, outer = shape.heads * shape.head, shape.key_heads * shape.head
        self.q = Linear(shape.width, inner, ("tensor", PARTS))
        self.k = Linear(shape.width, outer, ("tensor", PARTS))
        self.v = Linear(shape.width, outer, ("tensor", PARTS))
        self.out = Linear(inner, shape.width, (PARTS, "tensor"))

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """``x`` is (batch, length, width), ``angles`` (length, half a head)."""
        q, k, v = (f(x).unflatten(-1, (-1, self.shape.head)).transpose(1, 2)
                   for f in (self.q, self.k, self.v))  # fmt: skip
        q, k = rotated(q, angles), rotated(k, angles)
        times = self.shape.heads // self.shape.key_heads
        k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
        axes = (BATCH, ("tensor", PLACES), None, None)
        q, k, v = (self.how.held(t, *axes) for t in (q, k, v))
        scale = self.shape.head**-0.5
        if self.how.attention == "flash":
            spec = self.how.spec(*axes)
            y = flash_attention(
                q, k, v, causal=True, sm_scale=scale, partition_spec=spec, mesh=self.how.mesh
            )
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        y = y.transpose(1, 2).flatten(2)
        if PLACES in self.how.axes:  # from heads back to positions
            y = self.how.held(y, BATCH, PLACES, "tensor")
        return self.out(y)


def rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """``x`` with its halves turned by the angles of its positions (Su et al. 2021)."""
    first, second = x.chunk(2, dim=-1)
    sin, cos = angles.sin().to(x.dtype), angles.cos().to(x.dtype)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class GatedMLP(nn.Module):
    """SwiGLU (Shazeer 2020)."""

    def __init__(self, shape: Shape, how: Sharding) -> None:
        super().__init__()
        self.how = how
        self.gate = Linear(shape.width, shape.hidden, ("tensor", PARTS))
        self.up = Linear(shape.width, shape.hidden, ("tensor", PARTS))
        self.down = Linear(shape.hidden, shape.width, (PARTS, "tensor"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of (batch, length, width)."""
        return self.down(self.how.held(F.silu(self.gate(x)) * self.up(x), BATCH, PLACES, "tensor"))


class Layer(nn.Module):
    """Attention, then the MLP."""

    def __init__(self, shape: Shape, how: Sharding) -> None:
        super().__init__()
        self.shape, self.how = shape, how
        self.norm1, self.norm2 = Norm(shape.width), Norm(shape.width)
        self.attention = Attention(shape, how)
        self.mlp = shape.feed_forward(how)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """Of (batch, length, width)."""
        x = self.how.held(x + self.attention(self.norm1(x), angles), BATCH, PLACES, None)
        return self.how.held(x + self.mlp(self.norm2(x)), BATCH, PLACES, None)


class Repeated(nn.ModuleList):
    """The layers one after the other: each of them is in the program."""

    def __init__(self, shape: Shape, how: Sharding) -> None:
        super().__init__(Layer(shape, how) for _ in range(shape.layers))
        self.how = how

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """Of (batch, length, width)."""
        for layer in self:
            x = checkpoint(layer, x, angles) if self.how.remat else layer(x, angles)
        return x


class Stacked(nn.Module):
    """The layers as a loop over parameters that are stacked: the program has one layer, whatever the depth."""

    def __init__(self, shape: Shape, how: Sharding) -> None:
        super().__init__()
        self.how = how
        one = Layer(shape, how)
        self.names = [name for name, _ in one.named_parameters()]
        self.weights = nn.ParameterList(
            nn.Parameter(torch.empty(shape.layers, *p.shape)) for p in one.parameters()
        )
        homes = [one.get_submodule(name.rpartition(".")[0]) for name in self.names]
        self.weights.axes = [(None, *home.axes) for home in homes]
        self.one = [one]  # in a list: its own parameters are none of the model's

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """Of (batch, length, width)."""

        def layer(x: torch.Tensor, angles: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
            named = dict(zip(self.names, weights, strict=True))
            return torch.func.functional_call(self.one[0], named, (x, angles), strict=True)

        def body(x: torch.Tensor, weights: list[torch.Tensor]) -> tuple[torch.Tensor, None]:
            again = self.how.remat is True
            call = partial(checkpoint, layer) if again else layer
            return call(x, angles, *weights), None

        saved = default_partition
        if self.how.remat in PARTLY:
            shape = self.one[0].shape
            saved = saving_products(shape.width if self.how.remat == "narrow" else None)
        return scan(body, x, list(self.weights), saved)[0]


class Transformer(nn.Module):
    """A decoder in Llama 3's shape."""

    def __init__(self, shape: Shape, how: Sharding) -> None:
        super().__init__()
        self.shape, self.how = shape, how
        self.tokens = nn.Parameter(torch.empty(shape.vocabulary, shape.width))
        self.axes = ("tensor", PARTS)
        self.layers = shape.stack(how)
        self.norm = Norm(shape.width)
        self.head = Linear(shape.width, shape.vocabulary, ("tensor", PARTS))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Hidden states (batch, length, width) of ``ids`` (batch, length); ``loss`` takes them on."""
        places = torch.arange(ids.shape[1], device=ids.device)
        half = torch.arange(0, self.shape.head, 2, device=ids.device)
        angles = places[:, None] * 500000.0 ** (-half / self.shape.head)
        x = F.embedding(ids, self.tokens).to(torch.bfloat16)
        x = self.how.held(x, BATCH, PLACES, None)
        return self.norm(self.layers(x, angles))

    def loss(self, x: torch.Tensor, targets: torch.Tensor, chunks: int) -> torch.Tensor:
        """The mean cross entropy, of ``chunks`` parts of the length one after the other.

        The logits of one part at a time are in memory, and computed again in the backward pass.
        """
        parts = zip(x.chunk(chunks, 1), targets.chunk(chunks, 1), strict=True)
        return torch.stack([checkpoint(self._loss, a, b) for a, b in parts]).sum() / targets.numel()

    def _loss(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self.how.held(self.head(x), BATCH, PLACES, "tensor").float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def on_device(*sizes: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of the device: only a shape if programs are compiled ahead of time, otherwise zeros."""
    if "XLA_AOT_TOPOLOGY" in os.environ:
        return torch.empty(sizes, dtype=dtype, device="meta").to("xla")
    return torch.zeros(sizes, dtype=dtype, device="xla")


def model_flops(shape: Shape, batch: int, length: int) -> int:
    """Multiplications and additions of one step without what is computed again; hidden positions count.

    Two for each weight of a product and token in the forward pass, and attention's two products; the backward
    pass has twice as many.
    """
    inner, outer = shape.heads * shape.head, shape.key_heads * shape.head
    layer = shape.width * (2 * inner + 2 * outer) + shape.feed_forward_weights + 2 * length * inner
    return 6 * batch * length * (shape.layers * layer + shape.width * shape.vocabulary)


def batch_parts(mesh: xs.Mesh) -> int:
    """The number of parts that a batch is split into."""
    return math.prod(mesh.shape().get(axis, 1) for axis in BATCH)


def axes_of(module: nn.Module, count: int) -> list[tuple[Any, ...]]:
    """How each of a module's own parameters is split."""
    axes: object = getattr(module, "axes", ())
    return axes if isinstance(axes, list) else [axes] * count


def training_step(
    mesh: xs.Mesh, *, size: str = "tiny", **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], object], int]:
    """``step_of`` a model of ``SIZES``, with its options."""
    return step_of(SIZES[size], mesh, **options)


def step_of(
    shape: Shape,
    mesh: xs.Mesh,
    *,
    layers: int = 0,
    batch: int = 1,
    sequences: int = 0,
    length: int = 2048,
    attention: str = "flash",
    remat: bool | str = True,
    loss_chunks: int = 1,
    loop: bool = False,
) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], object], int]:
    """The model over ``mesh``, its optimizer, a function that records one training step, and its model FLOPs.

    ``layers`` of it, if not 0. ``batch`` sequences of ``length`` tokens for
    each part that the batch is split into, or ``sequences`` in all. ``attention`` is ``flash`` (a kernel) or
    ``plain``. With ``remat`` layers are computed again in the backward pass, with ``products`` or ``narrow`` all
    but what products and attention give (``narrow``: but not the hidden units of the MLP), with False nothing. The
    loss always is, in ``loss_chunks`` parts. With ``loop`` the layers are a loop over stacked parameters, which
    compiles in a time that does not grow with them.
    """
    if layers:
        shape = dataclasses.replace(shape, layers=layers)
    how = Sharding(mesh, attention, remat, loop)
    with torch.device("meta"):
        model = Transformer(shape, how)
    model.to_empty(device="xla")
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        for parameter, axes in zip(own, axes_of(module, len(own)), strict=True):
            how.mark(parameter, *axes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
    total = sequences or batch * batch_parts(mesh)
    ids, targets = (on_device(total, length, dtype=torch.int64) for _ in range(2))
    how.mark(ids, BATCH, PLACES)
    how.mark(targets, BATCH, PLACES)

    def step(ids: torch.Tensor = ids, targets: torch.Tensor = targets) -> torch.Tensor:
        loss = model.loss(model(ids), targets, loss_chunks)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, optimizer, step, model_flops(shape, total, length)
