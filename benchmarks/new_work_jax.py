"""The work of ``new_work.py`` in plain jax, as its users write it: one ``jax.jit`` for each call."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Parameters = dict[str, Any]

_programs = [0]


def programs() -> int:
    """Programs that were compiled so far."""
    return _programs[0]


def run(function: Callable[..., Any], *arguments: Any) -> Any:
    """One call of a new program; its results on the host."""
    _programs[0] += 1
    return jax.tree.map(np.asarray, jax.jit(function)(*arguments))


def numbers(*shape: int) -> np.ndarray:
    """The values that the torch systems are given."""
    return np.linspace(-1.0, 1.0, math.prod(shape), dtype=np.float32).reshape(shape)


def layer_norm(x: jax.Array) -> jax.Array:
    """Over the last dimension, without weights."""
    return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def attention(p: Parameters, x: jax.Array, heads: int, cache: Any = None) -> tuple[Any, Any]:
    """Causal attention of (T, width); with a cache, of one token to all before it."""
    parts = jnp.split(layer_norm(x) @ p["qkv"], 3, axis=1)
    query, key, value = (a.reshape(len(x), heads, -1).swapaxes(0, 1) for a in parts)
    if cache is not None:
        key, value = (jnp.concatenate(pair, 1) for pair in zip(cache, (key, value), strict=True))
    scores = query @ key.swapaxes(1, 2) / math.sqrt(query.shape[-1])
    if cache is None:
        scores = jnp.where(jnp.tri(len(x), dtype=bool), scores, -jnp.inf)
    y = jax.nn.softmax(scores) @ value
    return y.swapaxes(0, 1).reshape(x.shape) @ p["out"], (key, value)


def gpt(
    p: Parameters, tokens: jax.Array, start: jax.Array, heads: int, caches: Any = None
) -> tuple[Any, Any]:
    """Logits of tokens (T,) at positions from ``start``, and the keys and values."""
    x = p["tokens"][tokens] + lax.dynamic_slice_in_dim(p["positions"], start, tokens.shape[0])
    grown = []
    for layer, block in enumerate(p["blocks"]):
        y, pair = attention(block, x, heads, None if caches is None else caches[layer])
        grown.append(pair)
        x = x + y
        x = x + jax.nn.gelu(layer_norm(x) @ block["up"], approximate=False) @ block["down"]
    return layer_norm(x) @ p["head"], grown


def resnet(p: Sequence[Any], images: jax.Array) -> Any:
    """A ResNet-18 with its batch norms as they are at evaluation: a factor and a summand."""

    def convolve(x: jax.Array, layer: Any, stride: int = 1) -> Any:
        kernel, factor, summand = layer
        pad = [(kernel.shape[-1] // 2,) * 2] * 2
        y = lax.conv_general_dilated(x, kernel, (stride, stride), pad)
        return y * factor[:, None, None] + summand[:, None, None]

    x = jax.nn.relu(convolve(images, p[0]))
    for first, second, shortcut in p[1]:
        stride = 1 if shortcut is None else 2
        y = convolve(jax.nn.relu(convolve(x, first, stride)), second)
        x = jax.nn.relu(y + (x if shortcut is None else convolve(x, shortcut, 2)))
    return x.mean((2, 3)) @ p[2]


def resnet_parameters(width: int) -> Any:
    """Kernels, factors and summands, by stage."""

    def layer(given: int, made: int, size: int) -> Any:
        return numbers(made, given, size, size), np.ones(made, np.float32), numbers(made)

    blocks = []
    channels = width
    for stage in range(4):
        made = width * 2**stage
        for number in range(2):
            shortcut = layer(channels, made, 1) if stage and not number else None
            blocks.append((layer(channels, made, 3), layer(made, made, 3), shortcut))
            channels = made
    return layer(3, width, 3), blocks, numbers(channels, 10)


def kinds(
    rows: int, width: int, heads: int, vocabulary: int
) -> Mapping[str, Callable[[int], float]]:
    """The calls, by the same names."""
    operators: list[Callable[[Any], Any]] = [
        lambda x: x + x, jnp.exp, lambda x: x.sum(0), lambda x: x @ x.T, jax.nn.softmax,
        lambda x: jnp.where(x > 0, x, -x), lambda x: jnp.concatenate([x, x]), jnp.transpose,
        layer_norm, lambda x: x[1:, ::2] * 2,
    ]  # fmt: skip
    block = {
        "qkv": numbers(width, 3 * width), "out": numbers(width, width),
        "up": numbers(width, 4 * width), "down": numbers(4 * width, width),
    }  # fmt: skip
    model = {
        "tokens": numbers(vocabulary, width), "positions": numbers(512, width),
        "blocks": [block, block], "head": numbers(width, vocabulary),
    }  # fmt: skip
    images = resnet_parameters(8)
    cache: list[Any] = []

    def operator(number: int) -> float:
        found = run(operators[number % len(operators)], numbers(rows, 8 + number))
        return float(found.astype(np.float64).sum())

    def chain(number: int) -> float:
        return float(run(lambda: (jnp.ones((3 + number, 5 + number)) * 2 + 1.5).sum()))

    def linear(number: int) -> float:
        def loss(weight: jax.Array, bias: jax.Array, x: jax.Array) -> jax.Array:
            return jnp.square(x @ weight.T + bias).mean()

        shapes = ((8, 4 + number), (8,), (rows, 4 + number))
        weight, bias = run(jax.grad(loss, (0, 1)), *(numbers(*shape) for shape in shapes))
        return float(weight.sum() + bias.sum())

    def transformer(number: int) -> float:
        def loss(p: Parameters, tokens: jax.Array) -> jax.Array:
            logits, _ = gpt(p, tokens[:-1], 0, heads)
            picked = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[1:, None], 1)
            return -picked.mean()

        found, _ = run(jax.value_and_grad(loss), model, np.arange(4 + number) % vocabulary)
        return float(found)

    def resnet18(number: int) -> float:
        return float(run(resnet, images, numbers(1 + number, 3, 16, 16)).sum())

    def generation(number: int) -> float:
        if not cache:
            cache.extend([(numbers(heads, number, width // heads),) * 2] * 2)
        token = np.array([number % vocabulary])
        step = functools.partial(gpt, heads=heads)
        logits, grown = run(
            lambda *a: step(a[0], a[1], a[2], caches=a[3]), model, token, number, cache
        )
        cache[:] = grown
        return float(logits.sum())

    return {
        "operator": operator, "chain": chain, "linear": linear, "transformer": transformer,
        "resnet18": resnet18, "generation": generation,
    }  # fmt: skip
