"""Evaluates recorded operations with their lowering rules, in the scope of one function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np

from xla_core.lowering.program_failures import place_of
from xla_core.lowering.repeat_graph import FILLS, Graph, OpInstance
from xla_core.lowering.source_scopes import scope_name
from xla_core.operators.decompositions import DecomposedRule
from xla_core.operators.inlining import calls_of
from xla_core.operators.lowering_registry import ViewRule
from xla_core.operators.plan import SEED
from xla_core.operators.run_rule import LoweringError, conform, run_rule
from xla_core.operators.tensor_meta import TensorMeta
from xla_core.recording.entry import Operation
from xla_core.recording.step_key import Lift, Ref, map_operands
from xla_core.torch_bridge.dtypes import numpy_dtype
from xla_core.torch_bridge.operands import Operand


class Lifted:
    """The step's lifted numbers: vectors of floats and of ints, or lists, and the positions of numbers in them.

    ``positions`` maps a recorded ``(is_float, position)`` to a jax integer, for numbers whose position differs from
    call to call. Each number is read once per scope.
    """

    def __init__(
        self,
        floats: jax.Array | Sequence[jax.Array],
        ints: jax.Array | Sequence[jax.Array],
        positions: Mapping[tuple[bool, int], jax.Array] | None = None,
    ) -> None:
        self.vectors = (ints, floats)
        self.positions = positions or {}
        self._read: dict[tuple[bool, int], jax.Array] = {}

    def read(self, lift: Lift) -> jax.Array:
        """The scalar's value; if it was passed as a CPU tensor, in the dtype of that tensor."""
        slot = (lift.is_float, lift.position)
        value = self._read.get(slot)
        if value is None:
            value = self._read[slot] = self._element(slot)
        example = lift.example
        return (
            value.astype(numpy_dtype(example.dtype)) if isinstance(example, TensorMeta) else value
        )

    def _element(self, slot: tuple[bool, int]) -> jax.Array:
        vector = self.vectors[slot[0]]
        where = self.positions.get(slot)
        if where is None:
            if not isinstance(vector, jax.Array):
                return vector[slot[1]]
            # the same of an array would look at many kinds of indices first
            if vector.shape[0] > 1:
                vector = jax.lax.slice(vector, (slot[1],), (slot[1] + 1,))
            return jax.lax.squeeze(vector, (0,))
        return jax.lax.dynamic_slice(vector, (where,), (1,)).reshape(())


Exported = tuple[jax.Array, str]
"""A value that is passed from one scope to another: an array, and the form in which it represents the value."""

PLAIN: Final = ""
"""The form of an array that is the value itself. Classes of scopes define other forms."""


class Scope(dict[int, jax.Array]):
    """Maps value numbers to jax arrays inside one function; ``lazy`` operations are computed when they are read."""

    def __init__(self, lazy: Mapping[int, Operation], lifted: Lifted) -> None:
        super().__init__()
        self.lazy = lazy
        self.lifted = lifted

    def __missing__(self, vid: int) -> jax.Array:
        self.compute(OpInstance(self.lazy[vid]))
        return self[vid]

    def export_value(self, vid: int) -> Exported:
        """A value for another scope of the same class."""
        return self[vid], PLAIN

    def import_value(self, vid: int, exported: Exported) -> None:
        """Store a value that ``export_value`` of another scope returned."""
        self[vid], _ = exported

    def compute(self, part: OpInstance) -> None:
        """Evaluate one operation and store its results."""
        with calls_of(part.entry.plan.rule):
            results = self._run(part)
        for vid, result in zip(part.results(), results, strict=True):
            self[vid] = result

    def value(self, a: Operand) -> Operand:
        """An argument with references and lifted scalars replaced by arrays."""
        return map_operands(self._array, a)

    def _array(self, a: object) -> object:
        if isinstance(a, Ref):
            return self[a.vid]
        return self.lifted.read(a) if isinstance(a, Lift) else a

    def _run(self, part: OpInstance) -> list[jax.Array]:
        plan = part.entry.plan
        recorded, recorded_named = part.arguments()
        outputs = part.metas()
        rule = plan.rule
        # A fill reads only the shape of its operand, which need not be in this scope.
        fill = plan.name in FILLS
        args = tuple(
            zeros(a.meta) if fill and isinstance(a, Ref) else self.value(a) for a in recorded
        )
        kwargs = {name: self.value(a) for name, a in recorded_named.items() if name != SEED}
        try:
            with jax.named_scope(scope_name(part.entry)):
                if isinstance(rule, ViewRule):
                    function = rule.put if plan.is_put else rule.get
                    assert function is not None
                    (meta,) = outputs
                    assert meta is not None
                    return [conform(function(*args, **kwargs), meta, plan.name)]
                metas = tuple(map(_meta, recorded))
                if isinstance(rule, DecomposedRule):
                    named = {name: _meta(a) for name, a in recorded_named.items()}
                    results = rule.run(args, kwargs, metas, named)
                    return [
                        None if m is None else conform(r, m, plan.name)
                        for r, m in zip(results, outputs, strict=True)
                    ]
                assert rule is not None
                key = random_key(self.value(recorded_named[SEED])) if plan.random else None
                return run_rule(rule, args, kwargs, metas, outputs, key)
        except LoweringError as error:
            error.plan, error.entry = plan, part.entry
            raise
        except Exception as error:
            failure = LoweringError(
                f"the lowering rule of {plan.name} failed for operands "
                f"{list(map(_meta, recorded))}{place_of(part.entry)}: {type(error).__name__}: {error}"
            )
            failure.plan, failure.entry = plan, part.entry
            raise failure from error


def graph_function(
    graph: Graph,
    outputs: Sequence[int],
    floats: bool,
    ints: bool,
    scope_class: type[Scope],
    emit: Callable[[Scope], None],
) -> Callable[..., tuple[jax.Array, ...]]:
    """A jax function of a step: inputs in order, then the lifted floats and ints if there are any.

    ``emit`` computes the values of the graph's nodes in a scope of ``scope_class``, ``outputs`` are the numbers of
    those that are wanted, and ``floats`` and ``ints`` say which vectors exist.
    """

    def step(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        count = len(graph.inputs)
        rest = list(arrays[count:])
        ints_vector = rest.pop() if ints else None
        floats_vector = rest.pop() if floats else None
        scope = scope_class(graph.lazy | graph.early, Lifted(floats_vector, ints_vector))
        scope.update(zip(graph.inputs, arrays[:count], strict=True))
        emit(scope)
        return tuple(scope[vid] for vid in outputs)

    return step


def zeros(meta: TensorMeta) -> jax.Array:
    """Zeros in place of a value of which only shape and dtype matter."""
    return jnp.zeros(meta.shape, numpy_dtype(meta.dtype))


def random_key(seed: jax.Array) -> jax.Array:
    """A jax PRNG key from a lifted 64-bit seed."""
    unsigned = seed.astype(np.uint64)
    words = jnp.stack([unsigned >> 32, unsigned & 0xFFFFFFFF]).astype(np.uint32)
    return jax.random.wrap_key_data(words, impl="threefry2x32")


def _meta(a: object) -> object:
    return map_operands(_meta_or_example, a)


def _meta_or_example(a: object) -> object:
    if isinstance(a, Ref):
        return a.meta
    return a.example if isinstance(a, Lift) else a
