"""Computes recorded operations on values whose lengths vary: their lowering rules, traced with symbolic sizes."""

from __future__ import annotations

import jax

from xla_core.jax_bridge.pallas_kernels import expanded
from xla_core.jax_bridge.traced_values import TracedValue
from xla_core.lowering.evaluate import Lifted, Scope
from xla_core.lowering.program_failures import place_of
from xla_core.operators.run_rule import LoweringError
from xla_core.varying import interpreter
from xla_core.varying.padded import Frame, NotCoveredError, Padded, Value
from xla_core.varying.skeletons import VaryingPart

MSG_OPERATOR = "{operator}{place}: {reason}"


class VaryingScope:
    """Value numbers to arrays and ``Padded`` values inside one program.

    ``floats`` and ``ints`` are the vectors of lifted numbers, or None.
    """

    def __init__(self, frame: Frame, floats: jax.Array | None, ints: jax.Array | None) -> None:
        self.frame = frame
        self.vectors = (floats, ints)
        self.plain = Scope({}, Lifted(floats, ints))
        self.padded: dict[int, Padded] = {}

    def give(self, vid: int, value: Value) -> None:
        """Keep a value: an array, or a ``Padded`` one."""
        if isinstance(value, Padded):
            self.padded[vid] = value
        else:
            self.plain[vid] = value

    def __getitem__(self, vid: int) -> Value:
        padded = self.padded.get(vid)
        return self.plain[vid] if padded is None else padded

    def compute(self, part: VaryingPart) -> None:
        """Run one operation and keep its results.

        Raises NotCoveredError, which names operator and line, if no rule covers the varying length.
        """
        if not part.varies:
            self.plain.compute(part)
            return
        try:
            results = self._varying(part)
        except NotCoveredError as error:
            raise NotCoveredError(_named(part, error)) from error
        except LoweringError as error:
            raise NotCoveredError(_named(part, error.__cause__ or error)) from error
        for vid, result in results:
            self.give(vid, result)

    def _varying(self, part: VaryingPart) -> list[tuple[int, object]]:
        vids = [ref.vid for ref in part.operands()]
        values = [self[vid] for vid in vids]
        wanted = [v for v, m in zip(part.results(), part.metas(), strict=True) if m is not None]

        def function(
            floats: jax.Array | None, ints: jax.Array | None, *arrays: TracedValue
        ) -> list[TracedValue]:
            scope = Scope({}, Lifted(floats, ints))
            scope.update(zip(vids, arrays, strict=True))
            scope.compute(part)
            return [scope[vid] for vid in wanted]

        vectors = [v if v is None else jax.ShapeDtypeStruct(v.shape, v.dtype) for v in self.vectors]
        closed = expanded(jax.make_jaxpr(function)(*vectors, *map(_struct, values)))
        given = [v for v in self.vectors if v is not None]
        results = interpreter.run(self.frame, closed.jaxpr, closed.consts, [*given, *values])
        return list(zip(wanted, results, strict=True))


def _struct(value: Value) -> jax.ShapeDtypeStruct:
    if isinstance(value, Padded):
        return jax.ShapeDtypeStruct(value.sizes, value.array.dtype)
    return jax.ShapeDtypeStruct(value.shape, value.dtype)


def _named(part: VaryingPart, reason: BaseException) -> str:
    line = str(reason).strip().partition("\n")[0]
    return MSG_OPERATOR.format(
        operator=part.entry.plan.name, place=place_of(part.entry), reason=line
    )
