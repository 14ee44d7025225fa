"""Rules that pass varying lengths through loops, whose number of steps or carried values may vary.

The body of a loop is traced once, so all values that enter or leave a step have one layout: elements contiguous,
padding at the end.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from xla_core.jax_bridge.jax_private import Equation, scan_operands
from xla_core.jax_bridge.symbolic_sizes import is_symbolic
from xla_core.jax_bridge.traced_values import JaxObject
from xla_core.varying.interpreter import laid, padding_rule, run
from xla_core.varying.padded import Dim, Frame, Padded, Value, as_padded, dim_of, unwrapped


def _plain_dims(variables: Sequence[JaxObject]) -> list[tuple[Dim, ...]]:
    """The dimensions of a jaxpr's variables in the contiguous layout."""
    return [tuple(map(dim_of, variable.aval.shape)) for variable in variables]


def _arrays(frame: Frame, values: Sequence[Value], dims: Sequence[tuple[Dim, ...]]) -> list[object]:
    return [
        jnp.asarray(laid(frame, as_padded(value), own).array)
        for value, own in zip(values, dims, strict=True)
    ]


def _body(
    frame: Frame,
    closed: JaxObject,
    consts: Sequence[Padded],
    dims: Sequence[tuple[Dim, ...]],
    arrays: Sequence[Array],
) -> list[object]:
    """Runs a loop's body or condition on ``arrays`` of these dimensions; returns contiguous arrays."""
    within = frame.inside()
    given = [unwrapped(Padded(array, own)) for array, own in zip(arrays, dims, strict=True)]
    results = run(within, closed.jaxpr, closed.consts, [*map(unwrapped, consts), *given])
    return _arrays(within, results, _plain_dims(closed.jaxpr.outvars))


@padding_rule("scan")
def scan(frame: Frame, equation: Equation, values: list[Padded]) -> list[Padded]:
    """Runs as many steps as the bound; steps at or beyond the true length leave the carried values unchanged.

    A reverse scan runs those steps first.
    """
    params = equation.params
    closed, length = params["jaxpr"], params["length"]
    first, count_carried = scan_operands(equation)
    end = first + count_carried
    own = _plain_dims(closed.jaxpr.invars[first:])
    carried_dims, item_dims = own[: end - first], own[end - first :]
    carried = _arrays(frame, values[first:end], carried_dims)
    along = dim_of(length)
    items = _arrays(frame, values[end:], [(along, *dims) for dims in item_dims])
    places, count = frame.bound(length), frame.number(length)

    def step(
        state: list[Array], item: tuple[Array, list[Array]]
    ) -> tuple[list[Array], list[Array]]:
        place, arrays = item
        results = _body(frame, closed, values[:first], own, [*state, *arrays])
        after = results[: len(state)]
        if is_symbolic(length):
            after = [jnp.where(place < count, a, b) for a, b in zip(after, state, strict=True)]
        return after, results[len(state) :]

    numbers = lax.iota(np.int32, places)
    last, given = lax.scan(step, carried, (numbers, items), reverse=params["reverse"])
    given_dims = _plain_dims(closed.jaxpr.outvars[len(carried) :])
    return [
        *map(Padded, last, carried_dims),
        *(Padded(array, (along, *dims)) for array, dims in zip(given, given_dims, strict=True)),
    ]


@padding_rule("while")
def while_loop(frame: Frame, equation: Equation, values: list[Padded]) -> list[Padded]:
    """Evaluates the condition on the carried values, whose elements are those of the unpadded loop."""
    params = equation.params
    asked, stepped = params["cond_nconsts"], params["body_nconsts"]
    for_condition, for_body = values[:asked], values[asked : asked + stepped]
    dims = _plain_dims(params["body_jaxpr"].jaxpr.outvars)
    start = _arrays(frame, values[asked + stepped :], dims)

    def goes_on(state: list[Array]) -> object:
        (answer,) = _body(frame, params["cond_jaxpr"], for_condition, dims, state)
        return answer

    def step(state: list[Array]) -> list[Array]:
        return _body(frame, params["body_jaxpr"], for_body, dims, state)

    return list(map(Padded, lax.while_loop(goes_on, step, start), dims))
