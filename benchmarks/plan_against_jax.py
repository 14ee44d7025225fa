"""A training step of examples/pods/llama.py beside the same step written in jax, both compiled by libtpu.

    python benchmarks/plan_against_jax.py [--topology v5e:4x4] [--mesh fsdp=16] [--size 8b]
        [--layers 2] [--loop] [--results ours|names] [--json FILE]

The shape is one of the example's ``SIZES``, with ``--layers`` of its layers. Weights are float32, products
bfloat16, layers are computed again in the backward pass, attention is the same kernel with the same blocks, and
shardings are the same for every parameter, moment, input and held value. Programs return parameters and moments in
the same order, or jax's in the order of their names with ``--results names``: XLA's scheduler starts from the
results. The loss multiplies by one-hot targets, as MaxText's does. Each side is compiled in a process of its own.
Printed: HBM of one chip by use, collectives by kind with their bytes, FLOPs, the compiler's cycles, and how far the
two differ.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "pods" / "llama.py"
STEP = f"{EXAMPLE}:training_step"
BLOCKS = {
    "block_q": 512, "block_k_major": 512, "block_k": 512, "block_b": 1, "block_q_major_dkv": 512,
    "block_k_major_dkv": 512, "block_q_dkv": 512, "block_k_dkv": 512, "block_q_dq": 1024, "block_k_dq": 256,
    "block_k_major_dq": 512,
}  # fmt: skip
"""Those of ``torch_xla.experimental.custom_kernel.flash_attention`` for long sequences."""
BATCH = ("data", "fsdp")
Weights = dict[str, tuple[tuple[int, ...], tuple[str | None, ...]]]


def weights_of(shape: Any) -> tuple[Weights, Weights]:
    """The weights of a layer and those around the layers: their shapes, and the axes that split them.

    In the order in which the example's program returns them: what its step met last comes first.
    """
    width, heads, key_heads = shape.width, shape.heads * shape.head, shape.key_heads * shape.head
    layer: Weights = {
        "down": ((width, shape.hidden), ("fsdp", "tensor")),
        "up": ((shape.hidden, width), ("tensor", "fsdp")),
        "gate": ((shape.hidden, width), ("tensor", "fsdp")),
        "out": ((width, heads), ("fsdp", "tensor")),
        "v": ((key_heads, width), ("tensor", "fsdp")),
        "k": ((key_heads, width), ("tensor", "fsdp")),
        "q": ((heads, width), ("tensor", "fsdp")),
        "norm2": ((width,), (None,)),
        "norm1": ((width,), (None,)),
    }
    ends: Weights = {
        "head": ((shape.vocabulary, width), ("tensor", "fsdp")),
        "norm": ((width,), (None,)),
        "tokens": ((shape.vocabulary, width), ("tensor", "fsdp")),
    }
    return layer, ends


RATE, BETA1, BETA2, EPSILON, DECAY = 3e-4, 0.9, 0.95, 1e-8, 0.1


class Model:
    """The decoder and its training step in jax, over a mesh."""

    def __init__(self, jax: Any, shape: Any, mesh: Any, loop: bool, results: str) -> None:
        self.jax, self.jnp, self.mesh, self.loop = jax, jax.numpy, mesh, loop
        self.shape, self.results = shape, results
        lies = self.spec(BATCH, "tensor", None, None)
        self.attention = jax.shard_map(
            attention, mesh=mesh, in_specs=(lies,) * 3, out_specs=lies, check_vma=False
        )

    def spec(self, *wanted: Any) -> Any:
        """The axes of the mesh among those wanted."""
        names = self.mesh.axis_names

        def kept(axis: Any) -> Any:
            own = tuple(a for a in (axis if isinstance(axis, tuple) else (axis,)) if a in names)
            return (own if len(own) > 1 else own[0]) if own else None

        return self.jax.sharding.PartitionSpec(*map(kept, wanted))

    def place(self, *wanted: Any) -> Any:
        """How something lies that is split so."""
        return self.jax.sharding.NamedSharding(self.mesh, self.spec(*wanted))

    def held(self, x: Any, *wanted: Any) -> Any:
        """A value of the step that lies so."""
        return self.jax.lax.with_sharding_constraint(x, self.place(*wanted))

    def product(self, x: Any, weight: Any) -> Any:
        """With a float32 weight (out, in), in the dtype of ``x``."""
        return self.jnp.einsum("...i,oi->...o", x, weight.astype(x.dtype))

    def norm(self, x: Any, weight: Any) -> Any:
        """Root mean square norm in float32."""
        y = x.astype(self.jnp.float32)
        y = y * self.jax.lax.rsqrt(self.jnp.mean(y * y, -1, keepdims=True) + 1e-5)
        return (y * weight).astype(x.dtype)

    def rotated(self, x: Any, angles: Any) -> Any:
        """With its halves turned."""
        first, second = self.jnp.split(x, 2, -1)
        sin, cos = self.jnp.sin(angles).astype(x.dtype), self.jnp.cos(angles).astype(x.dtype)
        return self.jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    def layer(self, x: Any, weights: dict[str, Any], angles: Any) -> Any:
        """Attention, then the MLP."""
        h = self.norm(x, weights["norm1"])
        q, k, v = (
            self.product(h, weights[n]).reshape(*h.shape[:2], -1, self.shape.head).swapaxes(1, 2)
            for n in "qkv"
        )
        q, k = self.rotated(q, angles), self.rotated(k, angles)
        times = self.shape.heads // self.shape.key_heads
        k, v = (self.jnp.repeat(t, times, 1) for t in (k, v))
        q, k, v = (self.held(t, BATCH, "tensor", None, None) for t in (q, k, v))
        y = self.attention(q, k, v).swapaxes(1, 2).reshape(*h.shape[:2], -1)
        x = self.held(x + self.product(y, weights["out"]), BATCH, None, None)
        h = self.norm(x, weights["norm2"])
        gate, up = (self.product(h, weights[n]) for n in ("gate", "up"))
        hidden = self.held(self.jax.nn.silu(gate) * up, BATCH, None, "tensor")
        return self.held(x + self.product(hidden, weights["down"]), BATCH, None, None)

    def cross_entropy(self, x: Any, head: Any, targets: Any) -> Any:
        """The mean over all tokens."""
        logits = self.held(self.product(x, head), BATCH, None, "tensor").astype(self.jnp.float32)
        logs = self.jax.nn.log_softmax(logits)
        wanted = self.jax.nn.one_hot(targets, logits.shape[-1])
        return -(logs * wanted).sum() / targets.size

    def loss(self, weights: dict[str, Any], ids: Any, targets: Any) -> Any:
        """Of a batch; layers and loss are computed again in the backward pass."""
        jax, jnp = self.jax, self.jnp
        exponents = -jnp.arange(0, self.shape.head, 2) / self.shape.head
        angles = jnp.arange(ids.shape[1])[:, None] * 500000.0**exponents
        x = self.held(weights["tokens"][ids].astype(jnp.bfloat16), BATCH, None, None)
        again = jax.checkpoint(self.layer)
        if self.loop:
            x, _ = jax.lax.scan(lambda x, w: (again(x, w, angles), None), x, weights["layers"])
        else:
            for index in range(len(weights["layers"])):
                x = again(x, weights["layers"][index], angles)
        x = self.norm(x, weights["norm"])
        return jax.checkpoint(self.cross_entropy)(x, weights["head"], targets)

    def step(self, state: Any, ids: Any, targets: Any) -> Any:
        """One step of AdamW: the next state, and the loss."""
        tree, (weights, first, second, count) = self.jax.tree, state
        loss, gradients = self.jax.value_and_grad(self.loss)(weights, ids, targets)
        count = count + 1
        first = tree.map(lambda m, g: BETA1 * m + (1 - BETA1) * g, first, gradients)
        second = tree.map(lambda m, g: BETA2 * m + (1 - BETA2) * g * g, second, gradients)

        def moved(p: Any, m: Any, n: Any) -> Any:
            root = self.jnp.sqrt(n) / self.jnp.sqrt(1 - BETA2**count) + EPSILON
            return p * (1 - RATE * DECAY) - RATE / (1 - BETA1**count) * m / root

        return (tree.map(moved, weights, first, second), first, second, count), loss

    def arguments(self, layers: int, length: int) -> tuple[Any, Any]:
        """Shapes of a state, and of a batch with one sequence for each part of it."""
        jnp = self.jnp

        def shaped(shape: tuple[int, ...], wanted: Any, dtype: Any = jnp.float32) -> Any:
            return self.jax.ShapeDtypeStruct(shape, dtype, sharding=self.place(*wanted))

        # jax returns what a dict has in the order of its keys, what an OrderedDict has in its own
        kind = dict if self.results == "names" else OrderedDict
        layer, ends = weights_of(self.shape)
        stack: Any
        if self.loop:
            stack = kind((n, shaped((layers, *s), (None, *axes))) for n, (s, axes) in layer.items())
        else:
            one = kind((name, shaped(*row)) for name, row in layer.items())
            stack = kind((index, one) for index in reversed(range(layers)))
        outer = {name: shaped(*row) for name, row in ends.items()}
        weights = kind(
            (n, {**outer, "layers": stack}[n]) for n in ("head", "norm", "layers", "tokens")
        )
        parts = math.prod(self.mesh.shape[axis] for axis in BATCH if axis in self.mesh.shape)
        ids = shaped((parts, length), (BATCH, None), jnp.int32)
        return (weights, weights, weights, shaped((), ())), ids


def attention(q: Any, k: Any, v: Any) -> Any:
    """The kernel that ours uses."""
    from jax.experimental.pallas.ops.tpu import flash_attention as kernel

    sizes = kernel.BlockSizes(**BLOCKS)
    return kernel.flash_attention(
        q, k, v, causal=True, sm_scale=q.shape[-1] ** -0.5, block_sizes=sizes
    )


def jax_side(options: argparse.Namespace) -> dict[str, Any]:
    """The step in jax: what ``figures_of`` says of its program."""
    import jax
    import numpy as np
    from jax.experimental import topologies

    from xla_core.pjrt.executable import memory_figures
    from xla_plan.compiled import figures

    axes = [part.split("=") for part in options.mesh.split(",")]
    chips = topologies.get_topology_desc(platform="tpu", topology_name=options.topology).devices
    grid = np.array(sorted(chips, key=lambda d: d.id)).reshape([int(n) for _, n in axes])
    mesh = jax.sharding.Mesh(grid, [name for name, _ in axes])
    sys.path.insert(0, str(EXAMPLE.parent))
    from llama import SIZES

    model = Model(jax, SIZES[options.size], mesh, options.loop, options.results)
    state, ids = model.arguments(options.layers, options.length)
    places = jax.tree.map(lambda s: s.sharding, state)
    jitted = jax.jit(model.step, donate_argnums=0, out_shardings=(places, None))
    program = jitted.lower(state, ids, ids).compile()
    # jax hands on what PJRT reports, with the gaps between temporaries counted twice
    executable = program.runtime_executable()
    memory = memory_figures(executable, executable.serialize)
    return figures.of_texts(program.as_text(), memory, {}, len(chips))


def our_side(options: argparse.Namespace) -> dict[str, Any]:
    """The same by xla-plan, in this process."""
    from xla_plan.steps.candidate import Candidate, parse_mesh
    from xla_plan.steps.measure import measure

    chosen = {
        "size": options.size,
        "layers": options.layers,
        "length": options.length,
        "loop": options.loop,
    }
    return measure(STEP, Candidate(options.topology, parse_mesh(options.mesh), chosen))


def asked(side: str, options: argparse.Namespace) -> dict[str, Any]:
    """What one side says, from a process of its own."""
    environment = {**os.environ, "PJRT_DEVICE": "TPU", "XLA_AOT_TOPOLOGY": options.topology}
    if side == "jax":
        # the topology is compiled for without a client of it, also beside other processes that have libtpu loaded
        alone = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", **alone}
    command = [sys.executable, __file__, "--side", side, *(["--loop"] if options.loop else [])]
    for name in ("topology", "mesh", "size", "layers", "length", "results"):
        command += [f"--{name}", str(getattr(options, name))]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def side(options: argparse.Namespace) -> dict[str, Any]:
    """One side's figures with what they cost the host."""
    began = time.perf_counter()
    answer = jax_side(options) if options.side == "jax" else our_side(options)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    for row in answer["collectives"]:
        row.pop("lines")
    memory = answer["memory"]
    memory["total"] = (
        sum(memory[k] for k in ("arguments", "outputs", "temporaries", "code")) - memory["aliased"]
    )
    kept = {k: answer[k] for k in ("memory", "collectives", "sent", "work", "instructions")}
    host = {
        "wall seconds": time.perf_counter() - began,
        "processor seconds": usage.ru_utime + usage.ru_stime,
        "peak bytes": usage.ru_maxrss * 1024,
    }
    return {**kept, "host": host}


def show(ours: dict[str, Any], jaxs: dict[str, Any]) -> None:
    """Both, side by side."""

    def line(name: str, a: float, b: float, unit: float, suffix: str) -> None:
        apart = f"{(a / b - 1) * 100:+.2f} %" if b else ""
        print(f"{name:36}{a / unit:14.3f}{b / unit:14.3f} {suffix:6}{apart}")

    print(f"{'':36}{'PyTorch':>14}{'jax':>14}")
    for use in ("arguments", "temporaries", "code", "total"):
        line(f"HBM of one chip, {use}", ours["memory"][use], jaxs["memory"][use], 2**30, "GiB")
    for name, unit, suffix in (
        ("flops", 1e12, "TFLOP"),
        ("cycles", 1e6, "Mcyc"),
        ("hbm_bytes", 2**30, "GiB"),
    ):
        line(name, ours["work"][name], jaxs["work"][name], unit, suffix)
    rows = [{row["kind"]: row for row in one["collectives"]} for one in (ours, jaxs)]
    for kind in sorted({*rows[0], *rows[1]}):
        for name, unit, suffix in (
            ("count", 1, ""),
            ("bytes", 2**20, "MiB"),
            ("sent", 2**20, "MiB"),
        ):
            a, b = (r.get(kind, {}).get(name, 0) for r in rows)
            line(f"{kind}, {name}", a, b, unit, suffix)
    for name in ours["host"]:
        line(f"host, {name}", ours["host"][name], jaxs["host"][name], 1, "")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--topology", default="v5e:4x4")
    parser.add_argument("--mesh", default="fsdp=16")
    parser.add_argument("--size", default="8b")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--loop", action="store_true", help="the layers as a loop")
    parser.add_argument(
        "--results", choices=("ours", "names"), default="ours", help="the order of jax's results"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--side", choices=("ours", "jax"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        print(json.dumps(side(options)))
        return
    ours, jaxs = asked("ours", options), asked("jax", options)
    show(ours, jaxs)
    if options.json is not None:
        said = {k: v for k, v in vars(options).items() if k not in ("json", "side")}
        options.json.write_text(json.dumps({**said, "PyTorch": ours, "jax": jaxs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
