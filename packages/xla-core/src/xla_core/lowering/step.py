"""Lowers a recorded step: replays its entries through the lowering rules under jax."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xla_core.dispatch.plan import SEED
from xla_core.dtypes import numpy_dtype
from xla_core.lowering.decompose import DecomposedRule
from xla_core.lowering.driver import LoweringError, conform, run_rule
from xla_core.lowering.registry import ViewRule
from xla_core.metas import TensorMeta
from xla_core.trace import Entry, Lift, Ref


def needed_entries(entries: Sequence[Entry], outputs: Sequence[int]) -> list[Entry]:
    """The entries that the outputs depend on, in program order; inputs are always kept."""
    wanted = set(outputs)
    kept: list[Entry] = []
    for entry in reversed(entries):
        if entry.plan is None:
            kept.append(entry)
        elif any(vid in wanted for vid in range(entry.first, entry.end)):
            kept.append(entry)
            _collect_refs((entry.args, tuple(entry.kwargs.values())), wanted)
    kept.reverse()
    return kept


def _collect_refs(a: Any, found: set[int]) -> None:
    if isinstance(a, Ref):
        found.add(a.vid)
    elif isinstance(a, (list, tuple)):
        for item in a:
            _collect_refs(item, found)


def step_function(
    entries: Sequence[Entry], outputs: Sequence[int], floats: bool, ints: bool
) -> Callable[..., tuple[Any, ...]]:
    """A jax function of the step: inputs in order, then the lifted floats and ints if there are any."""
    inputs = sum(entry.plan is None for entry in entries)

    def step(*arrays: Any) -> tuple[Any, ...]:
        given = iter(arrays[:inputs])
        rest = list(arrays[inputs:])
        lifted = (rest.pop() if ints else None, rest.pop() if floats else None)
        env: dict[int, Any] = {}
        for entry in entries:
            if entry.plan is None:
                env[entry.first] = next(given)
            else:
                for offset, result in enumerate(_run(entry, env, lifted)):
                    env[entry.first + offset] = result
        return tuple(env[vid] for vid in outputs)

    return step


def _run(entry: Entry, env: dict[int, Any], lifted: tuple[Any, Any]) -> list[Any]:
    plan = entry.plan
    assert plan is not None
    args = tuple(_value(a, env, lifted) for a in entry.args)
    kwargs = {name: _value(a, env, lifted) for name, a in entry.kwargs.items() if name != SEED}
    rule = plan.rule
    try:
        with jax.named_scope(plan.name):
            if isinstance(rule, ViewRule):
                function = rule.put if plan.is_put else rule.get
                assert function is not None
                (meta,) = entry.metas
                assert meta is not None
                return [conform(function(*args, **kwargs), meta, plan.name)]
            metas = tuple(_meta(a) for a in entry.args)
            if isinstance(rule, DecomposedRule):
                named = {name: _meta(a) for name, a in entry.kwargs.items()}
                results = rule.run(args, kwargs, metas, named)
                return [
                    None if m is None else conform(r, m, plan.name)
                    for r, m in zip(results, entry.metas, strict=True)
                ]
            assert rule is not None
            key = _key(_value(entry.kwargs[SEED], env, lifted)) if plan.random else None
            return run_rule(rule, args, kwargs, metas, entry.metas, key)
    except LoweringError as error:
        error.plan = plan
        raise
    except Exception as error:
        failure = LoweringError(
            f"the lowering rule of {plan.name} failed for operands {list(map(_meta, entry.args))}: "
            f"{type(error).__name__}: {error}"
        )
        failure.plan = plan
        raise failure from error


def _key(seed: Any) -> Any:
    """A jax PRNG key from a lifted 64-bit seed."""
    unsigned = seed.astype(np.uint64)
    words = jnp.stack([unsigned >> 32, unsigned & 0xFFFFFFFF]).astype(np.uint32)
    return jax.random.wrap_key_data(words, impl="threefry2x32")


def _value(a: Any, env: dict[int, Any], lifted: tuple[Any, Any]) -> Any:
    if isinstance(a, Ref):
        return env[a.vid]
    if isinstance(a, Lift):
        value = lifted[1 if a.is_float else 0][a.position]
        return (
            value.astype(numpy_dtype(a.example.dtype))
            if isinstance(a.example, TensorMeta)
            else value
        )
    if isinstance(a, (list, tuple)):
        return [_value(item, env, lifted) for item in a]
    return a


def _meta(a: Any) -> Any:
    if isinstance(a, Ref):
        return a.meta
    if isinstance(a, Lift):
        return a.example
    if isinstance(a, (list, tuple)):
        return [_meta(item) for item in a]
    return a
