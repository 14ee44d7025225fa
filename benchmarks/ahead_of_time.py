"""A transformer of 8 billion parameters compiled for a slice of TPUs, on a machine that has none.

    python benchmarks/ahead_of_time.py [--topology v5p:2x2x4] [--layers 32] [--train] [--json FILE]

The model has Llama 3's shape (width 4096, 32 query and 8 key heads, SwiGLU of 14336, 128256 tokens).
It is made on ``meta``, and split over all chips (FSDP) by xla-spmd. The logits of a batch, or with
``--train`` a training step with AdamW, are traced, lowered and compiled with libtpu. Printed and written as
JSON: the host's seconds and peak memory, each chip's memory by use, FLOPs, and the collectives.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import platform
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch_xla.distributed.spmd import debugging
from xla_core.extension_api.programs import all_programs, program_figures
from xla_core.extension_api.runtime import use_topology
from xla_core.support import counters

WIDTH, HEADS, KEY_HEADS, HIDDEN, VOCABULARY = 4096, 32, 8, 14336, 128256
HEAD = WIDTH // HEADS


class Layer(nn.Module):
    """Attention with grouped key heads and rotary positions, then a gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k = nn.Linear(WIDTH, KEY_HEADS * HEAD, bias=False)
        self.v = nn.Linear(WIDTH, KEY_HEADS * HEAD, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """``x`` is (batch, length, width), ``angles`` (length, half a head)."""
        h = self.norm1(x)
        q, k, v = (f(h).unflatten(-1, (-1, HEAD)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(
            rotated(q, angles), rotated(k, angles), v, is_causal=True, enable_gqa=True
        )
        x = x + self.out(y.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """``x`` with its halves turned by the angles of its positions (Su et al. 2021)."""
    first, second = x.chunk(2, dim=-1)
    sin, cos = angles.sin().to(x.dtype), angles.cos().to(x.dtype)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Transformer(nn.Module):
    """Llama 3's shape: 8.03 billion parameters with 32 layers."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits (batch, length, vocabulary) of ``ids`` (batch, length)."""
        places = torch.arange(ids.shape[1], device=ids.device)
        rates = 500000.0 ** (-torch.arange(0, HEAD, 2, device=ids.device) / HEAD)
        angles = places[:, None] * rates
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x, angles)
        return self.head(self.norm(x))


def on_device(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor of the device that is a shape only."""
    return torch.empty(sizes, dtype=dtype, device="meta").to("xla")


def make_model(layers: int, mesh: xs.Mesh) -> nn.Module:
    """The model in bfloat16, split over the mesh."""
    with torch.device("meta"):
        model = Transformer(layers).to(torch.bfloat16)
    model.to_empty(device="xla")
    for parameter in model.parameters():
        xs.mark_sharding(parameter, mesh, split(parameter))
    return model


def make_optimizer(model: nn.Module, mesh: xs.Mesh) -> torch.optim.Optimizer:
    """AdamW with the state of a later step, split like the parameters."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        state["step"] = torch.tensor(1.0)
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = on_device(*parameter.shape, dtype=parameter.dtype)
            xs.mark_sharding(state[name], mesh, split(parameter))
    return optimizer


def split(tensor: torch.Tensor) -> tuple[str | None, ...]:
    """Over the chips by the first dimension."""
    return ("fsdp",) + (None,) * (tensor.dim() - 1)


def record(model: nn.Module, optimizer: torch.optim.Optimizer | None, ids: torch.Tensor) -> Any:
    """The logits, or with an optimizer a training step; a result that nobody holds is not computed."""
    if optimizer is None:
        with torch.no_grad():
            return model(ids[:, :-1])
    logits = model(ids[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return None


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Build, trace and compile; the figures."""
    began = time.perf_counter()
    xr.use_spmd()
    use_topology(options.topology)
    chips = xr.global_runtime_device_count()
    mesh = xs.Mesh(np.arange(chips), (chips,), ("fsdp",))
    model = make_model(options.layers, mesh)
    optimizer = make_optimizer(model, mesh) if options.train else None
    ids = on_device(options.batch, options.length + 1, dtype=torch.int64)
    xs.mark_sharding(ids, mesh, ("fsdp", None))
    built = time.perf_counter()
    before = peak_bytes()
    kept = record(model, optimizer, ids)
    traced = time.perf_counter()
    torch_xla.sync()
    compiled = time.perf_counter()
    del kept
    program, figures = all_programs()[-1], program_figures()[-1]
    kinds = collections.Counter(c.kind for c in debugging.collectives(program))
    samples = counters.all_metrics()
    return {
        "topology": options.topology, "chips": chips,
        "train": options.train, "layers": options.layers, "batch": options.batch, "length": options.length,
        "parameters": sum(p.numel() for p in model.parameters()),
        "parameter_bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
        "operations": program.operations,
        "seconds": {
            "build": built - began, "trace": traced - built, "sync": compiled - traced,
            **{name: samples[metric].accumulator / 1e9 for name, metric in METRICS.items()},
        },
        "host_peak_bytes": {"built": before, "compiled": peak_bytes()},
        "chip_bytes": {
            use: getattr(figures, use)
            for use in ("arguments", "outputs", "temporaries", "aliased", "code", "total", "limit")
        },
        "flops": figures.flops, "bytes_accessed": figures.bytes_accessed,
        "collectives": dict(kinds),
        "machine": {
            "platform": platform.platform(), "cpus": os.cpu_count(), "torch": torch.__version__,
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        },
    }  # fmt: skip


METRICS = {"lower": "LoweringTime", "compile": "CompileTime"}


def peak_bytes() -> int:
    """The process's largest resident memory so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--topology", default="v5p:2x2x4")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--train", action="store_true", help="a training step, not only logits")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = measure(options)
    text = json.dumps(found, indent=1)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
