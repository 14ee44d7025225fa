"""A GPT over eight CPU devices: xla-spmd against the same model and shardings written in jax.

    python benchmarks/spmd_against_jax.py [--strategy fsdp] [--rounds 5] [--steps 8] [--json FILE]

Each system trains in a process of its own, which stays while rounds of ``--steps`` steps go from one
to the other and back (torch jax, jax torch, ...), so that noise of the machine meets both. Printed
are, per strategy, the median step time over all rounds, the memory of the compiled step on each
device, and their ratios; the JSON file has every round. The exit status is 1 if the last losses
differ.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from child import private_stdout

DEVICES = 8
VOCABULARY, HEADS = 512, 8
LAYERS, WIDTH, LENGTH, BATCH = (
    int(n) for n in os.environ.get("SPMD_BENCHMARK_SIZE", "4 256 64 16").split()
)
STRATEGIES = {
    "data": ((8,), ("data",), ("data", None)),
    "fsdp": ((8,), ("data",), ("data", None)),
    "tensor": ((8,), ("model",), (None, None)),
    "2d": ((4, 2), ("data", "model"), ("data", None)),
}
COLUMN, ROW = ("q", "k", "v", "up", "head"), ("out", "down")
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
WARM_UP = 3
LOSS_TOLERANCE = 1e-3
"""Relative; some forty steps of float32 training, sums in another order."""
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


def torch_system(strategy: str) -> tuple[Callable[[], float], Callable[[], Any]]:
    """Training with xla-spmd: a step that returns its loss, and the program's memory and text."""
    import numpy as np
    import torch

    import torch_xla
    import torch_xla.distributed.spmd as xs
    import torch_xla.runtime as xr
    from xla_core.extension_api.programs import all_programs

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

    def step() -> float:
        logits = model(ids[:, :-1]).flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync(wait=True)
        return loss.item()

    def compiled() -> tuple[Any, str]:
        executable = max(all_programs(), key=lambda p: p.runs).executable
        return executable.memory_analysis(), executable.optimized_hlo()

    return step, compiled


# -- with jax ----------------------------------------------------------------------------------------


def jax_system(strategy: str) -> tuple[Callable[[], float], Callable[[], Any]]:
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
    program = jax.jit(step, donate_argnums=0, out_shardings=layouts).lower(state, ids).compile()
    holder = [state]

    def run() -> float:
        holder[0], loss = program(holder[0], ids)
        jax.block_until_ready((holder[0], loss))
        return float(loss)

    def compiled() -> tuple[Any, str]:
        stats = program.memory_analysis()
        memory = {
            "arguments": stats.argument_size_in_bytes,
            "outputs": stats.output_size_in_bytes,
            "temporaries": stats.temp_size_in_bytes,
            "aliased": stats.alias_size_in_bytes,
        }
        return memory, program.as_text()

    return run, compiled


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


def device_bytes(memory: Any) -> int:
    """Bytes of a compiled step on each device: arguments, what is not in their place, temporaries."""
    return int(memory["arguments"] + memory["outputs"] - memory["aliased"] + memory["temporaries"])


def serve(system: str, strategy: str) -> None:
    """Be one system: for every number on stdin take so many steps, and answer with their figures."""
    answer = private_stdout()
    step, compiled = (torch_system if system == "torch" else jax_system)(strategy)
    for _ in range(WARM_UP):
        loss = step()
    memory, hlo = compiled()
    kinds = {kind: len(re.findall(rf" {kind}(-start)?\(", hlo)) for kind in COLLECTIVES}
    answer(
        {
            "bytes": device_bytes(memory), "memory": memory, "loss": loss,
            "collectives": {kind: count for kind, count in kinds.items() if count},
        }
    )  # fmt: skip
    folder = os.environ.get("SPMD_BENCHMARK_HLO")
    if folder:
        Path(folder, f"{strategy}-{system}.hlo").write_text(hlo)
    for line in sys.stdin:
        seconds = []
        for _ in range(int(line)):
            started = time.perf_counter()
            loss = step()
            seconds.append(time.perf_counter() - started)
        answer({"seconds": seconds, "loss": loss})


@contextlib.contextmanager
def started(system: str, strategy: str) -> Iterator[subprocess.Popen[str]]:
    """One system in a process of its own."""
    command = [sys.executable, __file__, "--serve", system, "--strategy", strategy]
    environment = {**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(DEVICES)}
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        yield process
    finally:
        process.terminate()
        process.communicate()


def answer_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The next answer. Raises RuntimeError when the process is gone; it said why on stderr."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a measuring process ended early: {process.args!r}")
    found: dict[str, Any] = json.loads(line)
    return found


def compare(strategy: str, rounds: int, steps: int) -> dict[str, Any]:
    """Both systems by turns under one strategy."""
    figures: dict[str, Any] = {}
    with started("torch", strategy) as torch, started("jax", strategy) as jax:
        processes = {"torch": torch, "jax": jax}
        for system, process in processes.items():
            figures[system] = {**answer_of(process), "rounds": []}
        for number in range(rounds):
            for system in list(processes)[:: 1 if number % 2 == 0 else -1]:
                process = processes[system]
                assert process.stdin is not None
                process.stdin.write(f"{steps}\n")
                process.stdin.flush()
                found = answer_of(process)
                figures[system]["rounds"].append(found["seconds"])
                figures[system]["loss"] = found["loss"]
    for one in figures.values():
        one["seconds"] = statistics.median(s for seconds in one["rounds"] for s in seconds)
    for name, key in (("time_ratio", "seconds"), ("memory_ratio", "bytes")):
        figures[name] = figures["torch"][key] / figures["jax"][key]
    return figures


def show(strategy: str, figures: dict[str, Any]) -> None:
    """One strategy's figures as text."""
    print(f"{strategy}: {LAYERS} layers of width {WIDTH} on {DEVICES} CPU devices")
    for system in ("torch", "jax"):
        one = figures[system]
        medians = ", ".join(f"{statistics.median(r) * 1e3:.1f}" for r in one["rounds"])
        kinds = ", ".join(f"{count} {kind}" for kind, count in one["collectives"].items())
        print(f"  {system:<6} {one['seconds'] * 1e3:.1f} ms a step (rounds: {medians})")
        print(f"         {one['bytes'] / 2**20:.2f} MiB a device, loss {one['loss']:.5f}; {kinds}")
    print(
        f"  torch / jax: time {figures['time_ratio']:.3f}, memory {figures['memory_ratio']:.3f}",
        flush=True,
    )


def main() -> int:
    """Compare the systems, or be one of them (``--serve``)."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategy", choices=list(STRATEGIES), action="append")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", choices=["torch", "jax"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    strategies = options.strategy or list(STRATEGIES)
    if options.serve:
        serve(options.serve, strategies[0])
        return 0
    began = time.strftime("%Y-%m-%dT%H:%M:%S")
    found = {}
    for strategy in strategies:
        found[strategy] = compare(strategy, options.rounds, options.steps)
        show(strategy, found[strategy])
    if options.json:
        size = {"layers": LAYERS, "width": WIDTH, "length": LENGTH, "batch": BATCH}
        machine = {"cpus": os.cpu_count(), "devices": DEVICES}
        everything = {"began": began, "machine": machine, "model": size, "strategies": found}
        options.json.write_text(json.dumps(everything, indent=1) + "\n")
    losses = [(f["torch"]["loss"], f["jax"]["loss"]) for f in found.values()]
    return int(any(not math.isclose(a, b, rel_tol=LOSS_TOLERANCE) for a, b in losses))


if __name__ == "__main__":
    sys.exit(main())
