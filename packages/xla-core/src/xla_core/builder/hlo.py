"""Computations built from HLO operations: builders, operations with their shapes, computations.

An operation is a function on jax arrays, with operands. Its shape is inferred as soon as it is created, so that
mistakes are reported there. Lowering a computation evaluates the operations that its root depends on.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import jax
import numpy as np
import torch

from xla_core.computations.computation import Computation
from xla_core.contract.foreign_values import JsonValue
from xla_core.execution import runtime
from xla_core.jax_bridge import hlo_primitives, jax_private
from xla_core.jax_bridge.traced_values import JaxObject
from xla_core.operators.tensor_meta import TensorMeta, tensor_meta
from xla_core.recording.xla_tensor import XLATensor
from xla_core.torch_bridge.dtypes import NUMPY_DTYPES

MSG_ARGUMENTS: Final = "the computation {name} takes {wanted} arguments, got {got}"
MSG_MATCH: Final = (
    "Call parameter must match argument; got parameter {number} shape: {wanted}, argument shape: "
    "{got}. (computation {name})"
)
MSG_BUILDERS: Final = (
    "{name} of {operands}: the operands belong to different builders; all operations of a computation need one "
    "builder"
)
MSG_PARAMETERS: Final = "the computation {name} has no parameter {number}, but one after it"
MSG_OPERATION: Final = "{name} of {operands}: {error}"
MSG_TYPE: Final = "unknown XLA type {name!r}; use one of {known}"
MSG_DYNAMIC: Final = (
    "dynamic dimensions are not supported: XLA's programs here have fixed shapes. Pad to the largest "
    "size, or call with each size (a program per size)"
)

TORCH_TYPES: Final = {
    "f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16, "f16": torch.float16,
    "u8": torch.uint8, "s8": torch.int8, "u16": torch.uint16, "s16": torch.int16,
    "u32": torch.uint32, "s32": torch.int32, "u64": torch.uint64, "s64": torch.int64,
    "c64": torch.complex64, "c128": torch.complex128, "pred": torch.bool,
}  # fmt: skip
"""XLA's names of element types."""

XLA_TYPES: Final = {dtype: name for name, dtype in TORCH_TYPES.items()}
_OF_NUMPY: Final = {NUMPY_DTYPES[dtype]: name for name, dtype in TORCH_TYPES.items()}

Described: TypeAlias = JsonValue
"""A shape as torch_xla writes it: ``{"type": "f32", "sizes": (2, 3)}``, or a tuple of such."""

Struct: TypeAlias = JaxObject
"""A shape as jax has it: a ``jax.ShapeDtypeStruct``, or a tuple of such."""


def numpy_type(name: str) -> np.dtype:
    """The numpy dtype of an XLA element type. Raises ValueError for an unknown name."""
    if name not in TORCH_TYPES:
        raise ValueError(MSG_TYPE.format(name=name, known=", ".join(TORCH_TYPES)))
    return NUMPY_DTYPES[TORCH_TYPES[name]]


def struct_of(shape: Described) -> Struct:
    """A shape as jax has it: a struct, or a tuple of structs. Raises RuntimeError for dynamic dimensions."""
    if isinstance(shape, (tuple, list)):
        return tuple(map(struct_of, shape))
    if any(shape.get("dynamic_dimensions") or ()):
        raise RuntimeError(MSG_DYNAMIC)
    return jax.ShapeDtypeStruct(tuple(shape["sizes"]), numpy_type(shape["type"]))


def describe(struct: Struct) -> Described:
    """A jax struct as torch_xla writes shapes."""
    if isinstance(struct, (tuple, list)):
        return tuple(map(describe, struct))
    return {"type": _OF_NUMPY[np.dtype(struct.dtype)], "sizes": tuple(struct.shape)}


def text_of(struct: Struct) -> str:
    """A shape as HLO's text has it: ``f32[2,3]``."""
    if isinstance(struct, (tuple, list)):
        return f"({', '.join(map(text_of, struct))})"
    return f"{_OF_NUMPY[np.dtype(struct.dtype)]}[{','.join(map(str, struct.shape))}]"


class XlaBuilder:
    """The common part of the operations of one computation: its name, their order, its parameters."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.numbers = itertools.count()
        self.parameters: dict[int, XlaOp] = {}


class XlaOp:
    """One operation, whose value is ``evaluate`` of its operands' values.

    ``parameter`` is its number, and ``struct`` its shape, if it is a parameter of the computation. Raises
    RuntimeError, which names the operation and its operands' shapes, if the operands do not fit or belong to
    another builder.
    """

    def __init__(
        self,
        builder: XlaBuilder,
        name: str,
        operands: Sequence[XlaOp],
        evaluate: Callable[..., object],
        parameter: int | None = None,
        struct: Struct = None,
    ) -> None:
        self.builder: XlaBuilder = builder
        if any(operand.builder is not builder for operand in operands):
            raise RuntimeError(MSG_BUILDERS.format(name=name, operands=_texts_of(operands)))
        self.operands = tuple(operands)
        self.evaluate = evaluate
        self.parameter = parameter
        self.number = next(builder.numbers)
        self.struct: Struct = struct
        if parameter is not None:
            builder.parameters[parameter] = self
        else:
            try:
                with jax.enable_x64(True):
                    self.struct = jax.eval_shape(evaluate, *(o.struct for o in operands))
            except Exception as error:
                text = MSG_OPERATION.format(name=name, operands=_texts_of(operands), error=error)
                raise RuntimeError(text) from error

    def build(self, name: str) -> XlaComputation:
        """The computation that returns this operation's value. Raises RuntimeError if a parameter is missing."""
        ops: dict[int, XlaOp] = {}
        pending = [self]
        while pending:
            op = pending.pop()
            if op.number not in ops:
                ops[op.number] = op
                pending += op.operands
        ordered = [ops[number] for number in sorted(ops)]
        parameters = self.builder.parameters
        structs = []
        for number in range(max(parameters, default=-1) + 1):
            if number not in parameters:
                raise RuntimeError(MSG_PARAMETERS.format(name=name, number=number))
            structs.append(parameters[number].struct)

        def evaluate(*arguments: jax.Array) -> jax.Array:
            values: dict[int, jax.Array] = {}
            for op in ordered:
                if op.parameter is not None:
                    values[op.number] = arguments[op.parameter]
                else:
                    values[op.number] = op.evaluate(*(values[o.number] for o in op.operands))
            return values[self.number]

        return XlaComputation(name, structs, evaluate, self.struct)


def _texts_of(operands: Sequence[XlaOp]) -> str:
    return ", ".join(text_of(o.struct) for o in operands) or "nothing"


class XlaComputation:
    """A function of arrays (and tuples of arrays) with fixed shapes."""

    def __init__(
        self,
        name: str,
        parameters: Sequence[Struct],
        evaluate: Callable[..., object],
        result: Struct,
    ) -> None:
        self.name = name
        self.parameters = list(parameters)
        self.result = result
        self._evaluate = evaluate
        self._computations: dict[str, Computation] = {}

    def __call__(self, *arguments: jax.Array) -> jax.Array:
        """The value for these jax arrays. Raises RuntimeError if their number or shapes do not fit."""
        if len(arguments) != len(self.parameters):
            wanted, got = len(self.parameters), len(arguments)
            raise RuntimeError(MSG_ARGUMENTS.format(name=self.name, wanted=wanted, got=got))
        for number, (a, p) in enumerate(zip(arguments, self.parameters, strict=True)):
            if text_of(a) != text_of(p):
                text = MSG_MATCH.format(
                    number=number, wanted=text_of(p), got=text_of(a), name=self.name
                )
                raise RuntimeError(text)
        return self._evaluate(*arguments)

    def stablehlo(self, platform: str) -> bytes:
        """The computation as a StableHLO module for one of jax's platforms, tuples flattened."""
        leaves, structure = jax.tree.flatten(tuple(self.parameters))

        def flat(*arrays: jax.Array) -> jax.Array:
            return jax.tree.leaves(self(*jax.tree.unflatten(structure, arrays)))

        name = "".join(c if c.isalnum() or c in "_." else "_" for c in self.name)
        return jax_private.lower(flat, leaves, (), platform, name)

    def hlo_text(self) -> str:
        """The computation as HLO text, for the current device's platform."""
        return jax_private.hlo_text(self.stablehlo(runtime.trace_of(None).backend.platform))

    def module_proto(self) -> bytes:
        """Its serialized HloModuleProto, which ``from_module`` reads."""
        platform = runtime.trace_of(None).backend.platform
        return hlo_primitives.hlo_proto(self.stablehlo(platform))

    def run(self, name: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Record the computation on ``tensors`` as one operation of the step, called ``name``.

        Returns the results, all arrays of a tuple. Raises RuntimeError if the tensors' shapes do not fit.
        """
        given = [jax.ShapeDtypeStruct(tuple(t.shape), NUMPY_DTYPES[t.dtype]) for t in tensors]
        with jax.enable_x64(True):
            jax.eval_shape(self, *given)
        device = next((t._s.trace for t in tensors if isinstance(t, XLATensor)), None)
        platform = (device or runtime.trace_of(None)).backend.platform
        key = f"{platform} {name}"
        computation = self._computations.get(key)
        if computation is None:
            computation = self._computations[key] = self._computation(name, platform)
        return computation(tensors)

    def _computation(self, name: str, platform: str) -> Computation:
        dtypes = [p.dtype for p in self.parameters]

        def evaluate(
            tensors: jax.Array, _floats: jax.Array, _ints: jax.Array, _key: jax.Array
        ) -> list[jax.Array]:
            arrays = [t.astype(dtype) for t, dtype in zip(tensors, dtypes, strict=True)]
            return list(jax.tree.leaves(self(*arrays)))

        metas = [_meta(leaf) for leaf in jax.tree.leaves(self.result)]
        text = platform.encode() + self.stablehlo(platform)
        return Computation(name.rpartition("::")[2], text, metas, evaluate)


def _meta(struct: Struct) -> TensorMeta:
    dtype = TORCH_TYPES[_OF_NUMPY[np.dtype(struct.dtype)]]
    return tensor_meta(tuple(struct.shape), dtype)


def from_module(name: str, module: bytes) -> XlaComputation:
    """The computation of a serialized HLO module (or of StableHLO bytecode).

    Raises ValueError for other bytes, and for a module with dynamic shapes.
    """
    stablehlo = hlo_primitives.to_stablehlo(module)
    arguments, results = hlo_primitives.signature(stablehlo)

    def structs(avals: Sequence[hlo_primitives.Aval]) -> list[Struct]:
        return [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]

    def evaluate(*arrays: jax.Array) -> jax.Array:
        outcome = tuple(hlo_primitives.call_module(stablehlo, name, arrays, results))
        return outcome[0] if len(outcome) == 1 else outcome

    result = tuple(structs(results))
    return XlaComputation(
        name, structs(arguments), evaluate, result[0] if len(result) == 1 else result
    )
