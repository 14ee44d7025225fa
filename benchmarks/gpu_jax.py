"""The models of ``gpu_models.py`` in plain jax, as jax is usually written, from the same weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import torch

from gpu_models import Size, batch_of, model_of

RATE, MOMENTUM = 1e-4, 0.9
BETA1, BETA2, EPSILON, WEIGHT_DECAY = 0.9, 0.999, 1e-8, 0.01  # torch.optim.AdamW's defaults
_STATISTICS: Final = ("running_mean", "running_var")

Values = dict[str, Any]


def build(size: Size) -> tuple[Callable[[], Any], Callable[[Any], float]]:
    """A training step, and what reads its loss."""
    model = model_of(size)
    state = {n: _array(v) for n, v in model.state_dict().items() if "num_batches" not in n}
    statistics = {n: v for n, v in state.items() if n.endswith(_STATISTICS)}
    weights = {n: v for n, v in state.items() if n not in statistics}
    inputs, labels = map(_array, batch_of(size))
    slots = 1 if size.family == "resnet" else 2
    moments = [{n: jnp.zeros_like(v) for n, v in weights.items()} for _ in range(slots)]

    def update(weights: Values, moments: list[Values], statistics: Values, count: jax.Array) -> Any:
        compute = jax.value_and_grad(_loss, has_aux=True)
        (loss, statistics), gradients = compute(weights, statistics, size, inputs, labels)
        rule = _momentum if size.family == "resnet" else _adamw
        made = {
            n: rule(weights[n], [m[n] for m in moments], g, count) for n, g in gradients.items()
        }
        weights = {n: new[0] for n, new in made.items()}
        return (
            weights,
            [{n: m[i] for n, (_, m) in made.items()} for i in range(slots)],
            statistics,
            loss,
        )

    program = jax.jit(update, donate_argnums=(0, 1, 2))
    count = 0

    def step() -> Any:
        nonlocal weights, moments, statistics, count
        count += 1
        weights, moments, statistics, loss = program(
            weights, moments, statistics, np.float32(count)
        )
        return loss

    return step, float


def _array(tensor: torch.Tensor) -> jax.Array:
    if tensor.dtype == torch.bfloat16:
        return jnp.asarray(tensor.float().numpy()).astype(jnp.bfloat16)
    return jnp.asarray(tensor.numpy())


def _adamw(
    p: jax.Array, moments: list[jax.Array], gradient: jax.Array, count: jax.Array
) -> tuple[Any, list[Any]]:
    first, second = moments
    first = BETA1 * first + (1 - BETA1) * gradient
    second = BETA2 * second + (1 - BETA2) * gradient**2
    root = jnp.sqrt(second) / jnp.sqrt(1 - BETA2**count) + EPSILON
    changed = p * (1 - RATE * WEIGHT_DECAY) - RATE / (1 - BETA1**count) * first / root
    return changed.astype(p.dtype), [first.astype(p.dtype), second.astype(p.dtype)]


def _momentum(
    p: jax.Array, moments: list[jax.Array], gradient: jax.Array, _count: jax.Array
) -> tuple[Any, list[Any]]:
    velocity = MOMENTUM * moments[0] + gradient
    return p - RATE * velocity, [velocity]


def _loss(
    w: Values, statistics: Values, size: Size, inputs: jax.Array, labels: jax.Array
) -> tuple[Any, Values]:
    if size.family == "resnet":
        logits, statistics = _resnet(w, statistics, inputs)
    else:
        logits = (_bert if size.family == "bert" else _gpt)(w, size, inputs)
    likely = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.take_along_axis(likely, labels[..., None], axis=-1).mean(), statistics


def _linear(w: Values, name: str, x: jax.Array) -> jax.Array:
    y = x @ w[f"{name}.weight"].T
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def _norm(w: Values, name: str, x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    scaled = (wide - wide.mean(-1, keepdims=True)) * jax.lax.rsqrt(
        wide.var(-1, keepdims=True) + 1e-5
    )
    return (scaled * w[f"{name}.weight"] + w[f"{name}.bias"]).astype(x.dtype)


def _attention(w: Values, name: str, x: jax.Array, size: Size, causal: bool) -> jax.Array:
    parts = jnp.split(_linear(w, f"{name}.queries_keys_values", x), 3, axis=-1)
    query, key, value = (p.reshape(*x.shape[:2], size.heads, -1) for p in parts)
    kernel = "cudnn" if jax.default_backend() == "gpu" and x.dtype == jnp.bfloat16 else None
    seen = jax.nn.dot_product_attention(query, key, value, is_causal=causal, implementation=kernel)
    return _linear(w, f"{name}.out", seen.reshape(x.shape))


def _embedded(w: Values, tokens: jax.Array) -> jax.Array:
    return w["tokens.weight"][tokens] + w["positions.weight"][: tokens.shape[1]]


def _gpt(w: Values, size: Size, tokens: jax.Array) -> jax.Array:
    x = _embedded(w, tokens)
    for i in range(size.layers):
        block = f"blocks.{i}"
        x = x + _attention(w, f"{block}.attention", _norm(w, f"{block}.norm1", x), size, True)
        h = _linear(w, f"{block}.mlp.0", _norm(w, f"{block}.norm2", x))
        x = x + _linear(w, f"{block}.mlp.2", jax.nn.gelu(h, approximate=False))
    return _linear(w, "head", _norm(w, "norm", x))


def _bert(w: Values, size: Size, tokens: jax.Array) -> jax.Array:
    x = _norm(w, "norm", _embedded(w, tokens))
    for i in range(size.layers):
        block = f"blocks.{i}"
        x = _norm(w, f"{block}.norm1", x + _attention(w, block, x, size, False))
        h = jax.nn.gelu(_linear(w, f"{block}.wide", x), approximate=False)
        x = _norm(w, f"{block}.norm2", x + _linear(w, f"{block}.narrow", h))
    return _linear(w, "head", x)


def _conv(w: Values, name: str, x: jax.Array, stride: int, pad: int) -> jax.Array:
    pads = [(pad, pad)] * 2
    layout = ("NCHW", "OIHW", "NCHW")
    kernel = w[f"{name}.weight"]
    return jax.lax.conv_general_dilated(x, kernel, (stride,) * 2, pads, dimension_numbers=layout)


def _resnet(w: Values, statistics: Values, x: jax.Array) -> tuple[Any, Values]:
    changed: Values = {}

    def norm(name: str, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        mean, variance = wide.mean((0, 2, 3)), wide.var((0, 2, 3))
        count = x.size // x.shape[1]
        found = dict(zip(_STATISTICS, (mean, variance * count / (count - 1)), strict=True))
        for kind, value in found.items():
            old = statistics[f"{name}.{kind}"]
            changed[f"{name}.{kind}"] = (0.9 * old + 0.1 * value).astype(old.dtype)
        scale = jax.lax.rsqrt(variance + 1e-5) * w[f"{name}.weight"]
        shift = w[f"{name}.bias"] - mean * scale
        return (wide * scale[:, None, None] + shift[:, None, None]).astype(x.dtype)

    x = jax.nn.relu(norm("norm", _conv(w, "conv", x, 2, 3)))
    low = np.array(-np.inf, x.dtype)  # no tracer: jax differentiates it as a maximum
    pads = ((0, 0), (0, 0), (1, 1), (1, 1))
    x = jax.lax.reduce_window(x, low, jax.lax.max, (1, 1, 3, 3), (1, 1, 2, 2), pads)
    number = 0
    for stage, count in enumerate((3, 4, 6, 3)):
        for place in range(count):
            block, stride = f"blocks.{number}", 2 if stage > 0 and place == 0 else 1
            y = jax.nn.relu(norm(f"{block}.norm1", _conv(w, f"{block}.conv1", x, 1, 0)))
            y = jax.nn.relu(norm(f"{block}.norm2", _conv(w, f"{block}.conv2", y, stride, 1)))
            y = norm(f"{block}.norm3", _conv(w, f"{block}.conv3", y, 1, 0))
            if f"{block}.shortcut.0.weight" in w:
                x = norm(f"{block}.shortcut.1", _conv(w, f"{block}.shortcut.0", x, stride, 0))
            x = jax.nn.relu(y + x)
            number += 1
    return _linear(w, "head", x.mean((2, 3))), changed
