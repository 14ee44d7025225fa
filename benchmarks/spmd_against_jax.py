"""A GPT over eight CPU devices: xla-spmd against the same model and shardings written in jax.

    python benchmarks/spmd_against_jax.py [--strategy fsdp] [--steps 20] [--rounds 3]

Each system trains in a process of its own, in alternating rounds; printed are the median step times,
the memory of the compiled step on each device, and their ratios.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

DEVICES = 8
VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH, BATCH = 512, 256, 8, 4, 64, 16
STRATEGIES = {
    "data": ((8,), ("data",), ("data", None)),
    "fsdp": ((8,), ("data",), ("data", None)),
    "tensor": ((8,), ("model",), (None, None)),
    "2d": ((4, 2), ("data", "model"), ("data", None)),
}
COLUMN, ROW = ("q", "k", "v", "up", "head"), ("out", "down")
RATE, BETA1, BETA2, EPSILON, DECAY = 1e-3, 0.9, 0.999, 1e-8, 1e-2


def spec(strategy: str, name: str, rank: int) -> tuple[str | None, ...] | None:
    """How the parameter called ``name`` (``blocks.0.q.weight``) is split, weights as ``[out, in]``."""
    *_, module, kind = f".{name}".split(".")
    if strategy == "data":
        return None
    if strategy == "fsdp":
        return ("data",) + (None,) * (rank - 1)
    second = "data" if strategy == "2d" else None
    if name == "tokens.weight":
        return ("model", None)
    if kind == "weight" and module in COLUMN:
        return ("model", second)
    if kind == "weight" and module in ROW:
        return (second, "model")
    if kind == "bias" and module in COLUMN:
        return ("model",)
    return None


# -- with PyTorch ------------------------------------------------------------------------------------


def torch_model() -> Any:
    """The GPT as a PyTorch module."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
            self.out = nn.Linear(WIDTH, WIDTH)
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x: Any) -> Any:
            h = self.ln1(x)
            q, k, v = (
                f(h).view(*h.shape[:2], HEADS, -1).transpose(1, 2) for f in (self.q, self.k, self.v)
            )
            att = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(att.transpose(1, 2).reshape(h.shape))
            return x + self.down(F.gelu(self.up(self.ln2(x)), approximate="tanh"))

    class GPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(VOCABULARY, WIDTH)
            self.places = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)
            self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
            self.norm = nn.LayerNorm(WIDTH)
            self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

        def forward(self, ids: Any) -> Any:
            x = self.tokens(ids) + self.places
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    torch.manual_seed(0)
    return GPT()


def run_torch(strategy: str, steps: int) -> dict[str, Any]:
    """Train with xla-spmd; median seconds of a step, bytes on a device, the last loss."""
    import numpy as np
    import torch

    import torch_xla
    import torch_xla.distributed.spmd as xs
    import torch_xla.runtime as xr
    from xla_core import programs

    xr.use_spmd()
    mesh_shape, axes, batch = STRATEGIES[strategy]
    mesh = xs.Mesh(np.arange(DEVICES), mesh_shape, axes)
    model = torch_model().to("xla")
    for name, parameter in model.named_parameters():
        wanted = spec(strategy, name, parameter.dim())
        if wanted is not None:
            xs.mark_sharding(parameter, mesh, wanted)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)
    ids = torch.from_numpy(tokens()).to("xla")
    xs.mark_sharding(ids, mesh, batch)

    def step() -> Any:
        logits = model(ids[:, :-1]).flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync(wait=True)
        return loss.detach()

    seconds, loss = timed(step, steps)
    program = max(programs.all_programs(), key=lambda p: p.runs)
    return {
        "seconds": seconds,
        "bytes": device_bytes(program.executable.memory_analysis()),
        "loss": loss.item(),
    }


# -- with jax ----------------------------------------------------------------------------------------


def run_jax(strategy: str, steps: int) -> dict[str, Any]:
    """The same with jax; parameters come from the PyTorch module."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    mesh_shape, axes, batch = STRATEGIES[strategy]
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(mesh_shape), axes)
    values = {name: p.detach().numpy() for name, p in torch_model().named_parameters()}
    places = {
        name: NamedSharding(mesh, PartitionSpec(*(spec(strategy, name, v.ndim) or ())))
        for name, v in values.items()
    }
    parameters = {name: jax.device_put(v, places[name]) for name, v in values.items()}
    moments = [
        {name: jax.device_put(np.zeros_like(v), places[name]) for name, v in values.items()}
        for _ in range(2)
    ]
    ids = jax.device_put(tokens(), NamedSharding(mesh, PartitionSpec(*batch)))

    def step(state: Any, ids: Any) -> Any:
        parameters, first, second, count = state
        loss, gradients = jax.value_and_grad(jax_loss)(parameters, ids)
        count = count + 1
        for name, gradient in gradients.items():
            first[name] = BETA1 * first[name] + (1 - BETA1) * gradient
            second[name] = BETA2 * second[name] + (1 - BETA2) * gradient**2
            rate = RATE / (1 - BETA1**count)
            root = jnp.sqrt(second[name]) / jnp.sqrt(1 - BETA2**count) + EPSILON
            parameters[name] = parameters[name] * (1 - RATE * DECAY) - rate * first[name] / root
        return (parameters, first, second, count), loss

    whole = NamedSharding(mesh, PartitionSpec())
    state = (parameters, *moments, jax.device_put(np.float32(0), whole))
    layouts = ((places, places, places, whole), whole)
    compiled = jax.jit(step, donate_argnums=0, out_shardings=layouts).lower(state, ids).compile()
    holder = [state]

    def run() -> Any:
        holder[0], loss = compiled(holder[0], ids)
        jax.block_until_ready((holder[0], loss))
        return loss

    seconds, loss = timed(run, steps)
    stats = compiled.memory_analysis()
    memory = {
        "arguments": stats.argument_size_in_bytes,
        "outputs": stats.output_size_in_bytes,
        "temporaries": stats.temp_size_in_bytes,
        "aliased": stats.alias_size_in_bytes,
    }
    return {"seconds": seconds, "bytes": device_bytes(memory), "loss": float(loss)}


def jax_loss(parameters: dict[str, Any], ids: Any) -> Any:
    """Mean cross-entropy of the next token."""
    import jax
    import jax.numpy as jnp

    def norm(x: Any, name: str) -> Any:
        mean = x.mean(-1, keepdims=True)
        spread = jnp.square(x - mean).mean(-1, keepdims=True)
        scale, shift = parameters[f"{name}.weight"], parameters[f"{name}.bias"]
        return (x - mean) * jax.lax.rsqrt(spread + 1e-5) * scale + shift

    def linear(x: Any, name: str) -> Any:
        return x @ parameters[f"{name}.weight"].T + parameters[f"{name}.bias"]

    inputs, targets = ids[:, :-1], ids[:, 1:]
    x = parameters["tokens.weight"][inputs] + parameters["places"]
    mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    for i in range(LAYERS):
        block = f"blocks.{i}"
        h = norm(x, f"{block}.ln1")
        q, k, v = (
            linear(h, f"{block}.{n}").reshape(*h.shape[:2], HEADS, -1).swapaxes(1, 2) for n in "qkv"
        )
        scores = q @ k.swapaxes(-1, -2) / math.sqrt(WIDTH / HEADS)
        weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1)
        x = x + linear((weights @ v).swapaxes(1, 2).reshape(h.shape), f"{block}.out")
        h = jax.nn.gelu(linear(norm(x, f"{block}.ln2"), f"{block}.up"), approximate=True)
        x = x + linear(h, f"{block}.down")
    logits = norm(x, "norm") @ parameters["head.weight"].T
    logs = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(logs, targets[..., None], axis=-1).mean()


# -- both --------------------------------------------------------------------------------------------


def tokens() -> Any:
    """One batch, the same in both."""
    import numpy as np

    return np.random.default_rng(0).integers(VOCABULARY, size=(BATCH, LENGTH + 1))


def timed(step: Callable[[], Any], steps: int) -> tuple[float, Any]:
    """Median seconds of a step after three that are not counted, and the last loss."""
    for _ in range(3):
        loss = step()
    seconds = []
    for _ in range(steps):
        started = time.perf_counter()
        loss = step()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds), loss


def device_bytes(memory: Any) -> int:
    """Bytes of a compiled step on each device: arguments, what is not in their place, temporaries."""
    return int(memory["arguments"] + memory["outputs"] - memory["aliased"] + memory["temporaries"])


def child(system: str, strategy: str, steps: int) -> dict[str, Any]:
    """Run one system in a process of its own."""
    command = [sys.executable, __file__, "--child", system, "--strategy", strategy]
    environment = {
        **os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(DEVICES),
    }  # fmt: skip
    done = subprocess.run(
        [*command, "--steps", str(steps)], env=environment, stdout=subprocess.PIPE, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Compare the systems, or be one of them (``--child``)."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategy", choices=list(STRATEGIES), default="fsdp")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", choices=["torch", "jax"])
    options = parser.parse_args()
    if options.child:
        run = run_torch if options.child == "torch" else run_jax
        print(json.dumps(run(options.strategy, options.steps)))
        return
    found: dict[str, list[dict[str, Any]]] = {"torch": [], "jax": []}
    for _ in range(options.rounds):
        for system, runs in found.items():
            runs.append(child(system, options.strategy, options.steps))
    print(f"{options.strategy}: {LAYERS} layers of width {WIDTH} on {DEVICES} CPU devices")
    best = {system: min(run["seconds"] for run in runs) for system, runs in found.items()}
    for system, runs in found.items():
        times = ", ".join(f"{run['seconds'] * 1e3:.1f}" for run in runs)
        size = runs[0]["bytes"] / 2**20
        print(
            f"  {system:<6} {times} ms a step, {size:.2f} MiB a device, loss {runs[0]['loss']:.5f}"
        )
    memory = found["torch"][0]["bytes"] / found["jax"][0]["bytes"]
    print(f"  torch / jax: time {best['torch'] / best['jax']:.3f}, memory {memory:.3f}")


if __name__ == "__main__":
    main()
