"""The GPT workloads of ``workloads.py`` in plain jax, as jax is usually written, from the same weights.

``jax.jit`` sees all layers side by side, forward, backward and AdamW: this is what XLA does with a
deep model when nobody tells it what repeats.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import torch

from workloads import (
    BATCHES,
    GPT_HEADS,
    RATE,
    SMALL_GPTS,
    WEIGHT_DECAY,
    small_gpt_parts,
    warmup_then_cosine,
)

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8  # torch.optim.AdamW's defaults
_MSG_NOT_WRITTEN: Final = "{name} is not written in jax; these are: {known}"

Parameters = dict[str, Any]


def build(name: str) -> Callable[[], jax.Array]:
    """The training step of workload ``name``. SystemExit where it is not a GPT."""
    if name not in SMALL_GPTS:
        raise SystemExit(_MSG_NOT_WRITTEN.format(name=name, known=", ".join(SMALL_GPTS)))
    layers = SMALL_GPTS[name]
    torch.manual_seed(0)
    model, batches = small_gpt_parts(torch.device("cpu"), layers)
    values = {name: jnp.asarray(p.detach().numpy()) for name, p in model.named_parameters()}
    state: list[object] = [
        values,
        *({n: jnp.zeros_like(v) for n, v in values.items()} for _ in range(2)),
    ]
    texts = [tuple(jnp.asarray(part.numpy()) for part in next(batches)) for _ in range(BATCHES)]
    counts = itertools.count(1)
    endless = itertools.cycle(texts)

    def update(state: list[Any], count: jax.Array, rate: jax.Array, batch: jax.Array) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(state[0], layers, *batch)
        p, first, second = state
        updated = {
            n: adamw(p[n], first[n], second[n], g, count, rate) for n, g in gradients.items()
        }
        return [{n: u[i] for n, u in updated.items()} for i in range(3)], loss

    program = jax.jit(update, donate_argnums=0)

    def step() -> jax.Array:
        nonlocal state
        count = next(counts)
        rate = RATE * warmup_then_cosine(count - 1)
        state, loss = program(state, np.float32(count), np.float32(rate), next(endless))
        return loss

    return step


def adamw(
    p: jax.Array,
    first: jax.Array,
    second: jax.Array,
    gradient: jax.Array,
    count: jax.Array,
    rate: jax.Array,
) -> tuple[object, ...]:
    """A parameter and its moments after one update (Loshchilov and Hutter 2019)."""
    first = BETA1 * first + (1 - BETA1) * gradient
    second = BETA2 * second + (1 - BETA2) * gradient**2
    root = jnp.sqrt(second) / jnp.sqrt(1 - BETA2**count) + EPSILON
    p = p * (1 - rate * WEIGHT_DECAY) - rate / (1 - BETA1**count) * first / root
    return p, first, second


def loss_of(
    parameters: Parameters, layers: int, tokens: jax.Array, following: jax.Array
) -> jax.Array:
    """Mean cross-entropy of the following tokens (N, T)."""

    def norm(x: jax.Array, name: str) -> jax.Array:
        centred = x - x.mean(-1, keepdims=True)
        scale, shift = parameters[f"{name}.weight"], parameters[f"{name}.bias"]
        return centred * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * scale + shift

    def linear(x: jax.Array, name: str) -> jax.Array:
        return x @ parameters[f"{name}.weight"].T + parameters[f"{name}.bias"]

    length = tokens.shape[1]
    mask = jnp.tril(jnp.ones((length, length), bool))
    x = parameters["tokens.weight"][tokens] + parameters["positions.weight"][:length]
    for i in range(layers):
        block = f"blocks.{i}"
        h = norm(x, f"{block}.norm1")
        query, key, value = (
            part.reshape(*h.shape[:2], GPT_HEADS, -1).swapaxes(1, 2)
            for part in jnp.split(linear(h, f"{block}.attention.queries_keys_values"), 3, axis=-1)
        )
        scores = query @ key.swapaxes(-1, -2) / math.sqrt(query.shape[-1])
        seen = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1) @ value
        x = x + linear(seen.swapaxes(1, 2).reshape(h.shape), f"{block}.attention.out")
        h = jax.nn.gelu(linear(norm(x, f"{block}.norm2"), f"{block}.mlp.0"), approximate=False)
        x = x + linear(h, f"{block}.mlp.2")
    logits = norm(x, "norm") @ parameters["head.weight"].T
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), following[..., None], axis=-1)
    return -chosen.mean()
