"""Dimensions that a mesh does not divide: programs take and return such values padded.

The devices keep equal parts, so the last ones hold something that is no element of the value, or nothing
else. A program's arguments and results have to divide (XLA's partitioner Shardy lays others out whole), so
they are declared in the padded shape. Right behind an argument the value is cut out, and laid out
as its argument: each device keeps what it has, and from there on the partitioner knows where the value
ends. Results are padded with zeros last of all.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import Array

from xla_core.contract.device_protocol import ArraySpec
from xla_core.extension_api import shardings
from xla_spmd.sharding.hlo_sharding import parse

Function: TypeAlias = Callable[..., Any]
Texts: TypeAlias = Sequence[str | None]


def padding(
    inputs: Texts,
    outputs: Texts,
    input_annotations: Texts,
    output_annotations: Texts,
    function: Function,
    specs: Sequence[ArraySpec],
) -> tuple[Function, tuple[ArraySpec, ...]]:
    """``function``, of arguments like ``specs``, between padded arguments and results; their specs.

    ``inputs`` and ``outputs`` are HLO shardings; the annotations say the same to the partitioner. Where
    everything divides the function comes back as it is.
    """
    shapes = [_padded(spec.shape, text) for spec, text in zip(specs, inputs, strict=True)]
    cuts = [
        None if shape == spec.shape else (spec.shape, annotation)
        for shape, spec, annotation in zip(shapes, specs, input_annotations, strict=True)
    ]
    padded = tuple(
        dataclasses.replace(spec, shape=shape) for spec, shape in zip(specs, shapes, strict=True)
    )
    if not any(cuts) and not any(parse(text).tiles for text in outputs):
        return function, padded
    return functools.partial(_between, function, cuts, outputs, output_annotations), padded


def _between(
    function: Function, cuts: Sequence[Any], outputs: Texts, annotations: Texts, *arguments: Any
) -> list[Array]:
    values = [a if cut is None else _cut(a, *cut) for a, cut in zip(arguments, cuts, strict=True)]
    results = function(*values)
    return [
        _fill(value, text, annotation)
        for value, text, annotation in zip(results, outputs, annotations, strict=True)
    ]


def _cut(value: Array, shape: Sequence[int], annotation: str) -> Array:
    return shardings.annotate_sharding(value[tuple(map(slice, shape))], annotation)


def _fill(value: Array, text: str | None, annotation: str | None) -> Array:
    shape = _padded(value.shape, text)
    # XLA lays a value without elements out whole, whatever its annotation says: no part is to be filled
    if annotation is None or shape == value.shape or value.size == 0:
        return value
    laid = shardings.annotate_sharding(value, annotation)
    return jnp.pad(laid, [(0, n - m) for n, m in zip(shape, value.shape, strict=True)])


def filled_up(array: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """A part of a host array with zeros behind its elements, so that it has ``shape``."""
    missing = [(0, n - m) for n, m in zip(shape, array.shape, strict=True)]
    return np.pad(array, missing) if any(n for _, n in missing) else array


def _padded(shape: tuple[int, ...], text: str | None) -> tuple[int, ...]:
    return parse(text).padded_shape(shape)
