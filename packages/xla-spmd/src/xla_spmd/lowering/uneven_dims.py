"""Dimensions that do not divide evenly over a mesh: programs take and return such values padded.

The devices hold equal parts, so the last parts contain padding, or consist of it. XLA's partitioner Shardy would
replicate arguments and results that do not divide, so a program declares them with the padded shape. It first
cuts the value out of each argument and annotates it with the argument's sharding: then no data moves between
devices, and the partitioner knows where the value ends. Finally it pads the results with zeros.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import Array

from xla_core.contract.device_protocol import ArraySpec
from xla_core.extension_api import shardings
from xla_core.extension_api.lowering import JaxObject
from xla_spmd.sharding.hlo_sharding import parse

Function: TypeAlias = Callable[..., Sequence[Array]]
Texts: TypeAlias = Sequence[str | None]


def padding(
    inputs: Texts,
    outputs: Texts,
    function: Function,
    specs: Sequence[ArraySpec],
) -> tuple[Function, tuple[ArraySpec, ...]]:
    """``function`` with padded arguments and results, and the specs of the padded arguments.

    ``specs`` describes the arguments of ``function``. ``inputs`` and ``outputs`` are the HLO shardings of arguments
    and results. If no argument needs
    padding and no result is split, the returned function is ``function`` itself.
    """
    shapes = [_padded(spec.shape, text) for spec, text in zip(specs, inputs, strict=True)]
    cuts = [
        None if shape == spec.shape else (spec.shape, text)
        for shape, spec, text in zip(shapes, specs, inputs, strict=True)
    ]
    padded = tuple(
        dataclasses.replace(spec, shape=shape) for spec, shape in zip(specs, shapes, strict=True)
    )
    if not any(cuts) and not any(parse(text).tiles for text in outputs):
        return function, padded
    return functools.partial(_padded_call, function, cuts, outputs), padded


def _padded_call(
    function: Function,
    cuts: Sequence[tuple[tuple[int, ...], JaxObject] | None],
    outputs: Texts,
    *arguments: Array,
) -> list[Array]:
    values = [a if cut is None else _cut(a, *cut) for a, cut in zip(arguments, cuts, strict=True)]
    results = function(*values)
    return [_fill(value, text) for value, text in zip(results, outputs, strict=True)]


def _cut(value: Array, shape: Sequence[int], text: str) -> Array:
    return shardings.annotate_sharding(value[tuple(map(slice, shape))], text)


def _fill(value: Array, text: str | None) -> Array:
    shape = _padded(value.shape, text)
    # XLA replicates a value without elements, whatever its annotation says: there is no part to pad
    if text is None or shape == value.shape or value.size == 0:
        return value
    annotated = shardings.annotate_sharding(value, text)
    return jnp.pad(annotated, [(0, n - m) for n, m in zip(shape, value.shape, strict=True)])


def filled_up(array: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """``array``, padded with zeros at the end of each dimension to ``shape``."""
    widths = [(0, n - m) for n, m in zip(shape, array.shape, strict=True)]
    return np.pad(array, widths) if any(n for _, n in widths) else array


def _padded(shape: tuple[int, ...], text: str | None) -> tuple[int, ...]:
    return parse(text).padded_shape(shape)
