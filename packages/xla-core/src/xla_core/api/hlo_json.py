"""An HLO module as JSON, in the JSON form of protocol buffers: camel-case names, 64-bit numbers as text.

The fields that say what a program computes are read: names, shapes, instructions with their operands and
dimensions. Fields that are not in the tables below (tiles of layouts, backend configurations) are left out.
"""

from __future__ import annotations

from typing import Final

from xla_core.contract.foreign_values import JsonObject, JsonValue
from xla_core.support import protobuf_wire

# For each message, by field number: the field's name, the kind of its value, and whether it is repeated. A kind is
# the name of another message, "text", "bool", "int64" (text in JSON), or a dict of an enumeration's names.
_TYPES: Final = {
    0: "PRIMITIVE_TYPE_INVALID", 1: "PRED", 2: "S8", 3: "S16", 4: "S32", 5: "S64", 6: "U8", 7: "U16",
    8: "U32", 9: "U64", 10: "F16", 11: "F32", 12: "F64", 13: "TUPLE", 14: "OPAQUE_TYPE", 15: "C64",
    16: "BF16", 17: "TOKEN", 18: "C128", 19: "F8E5M2", 20: "F8E4M3FN", 21: "S4", 22: "U4",
}  # fmt: skip
_Field = tuple[str, str | dict[int, str], bool]
_SCHEMA: Final[dict[str, dict[int, _Field]]] = {
    "module": {
        1: ("name", "text", False),
        2: ("entryComputationName", "text", False),
        3: ("computations", "computation", True),
        4: ("hostProgramShape", "program_shape", False),
        5: ("id", "int64", False),
        6: ("entryComputationId", "int64", False),
    },
    "computation": {
        1: ("name", "text", False),
        2: ("instructions", "instruction", True),
        4: ("programShape", "program_shape", False),
        5: ("id", "int64", False),
        6: ("rootId", "int64", False),
    },
    "instruction": {
        1: ("name", "text", False),
        2: ("opcode", "text", False),
        3: ("shape", "shape", False),
        7: ("metadata", "metadata", False),
        9: ("parameterNumber", "int64", False),
        13: ("tupleIndex", "int64", False),
        14: ("dimensions", "int64", True),
        28: ("customCallTarget", "text", False),
        35: ("id", "int64", False),
        36: ("operandIds", "int64", True),
        37: ("controlPredecessorIds", "int64", True),
        38: ("calledComputationIds", "int64", True),
        63: ("comparisonDirection", "text", False),
    },
    "program_shape": {
        1: ("parameters", "shape", True),
        2: ("result", "shape", False),
        3: ("parameterNames", "text", True),
    },
    "shape": {
        2: ("elementType", _TYPES, False),
        3: ("dimensions", "int64", True),
        4: ("tupleShapes", "shape", True),
        5: ("layout", "layout", False),
        6: ("isDynamicDimension", "bool", True),
    },
    "layout": {1: ("minorToMajor", "int64", True)},
    "metadata": {1: ("opType", "text", False), 2: ("opName", "text", False)},
}


def module_of(proto: bytes) -> dict[str, object]:
    """The fields of a serialized HloModuleProto. Raises ValueError for other bytes."""
    return _read("module", proto)


def _read(kind: str, data: bytes) -> dict[str, object]:
    message: JsonObject = {}
    schema = _SCHEMA[kind]
    for number, value in protobuf_wire.read_fields(data):
        if number not in schema:
            continue
        name, inner, repeated = schema[number]
        values = _values(inner, value)
        if repeated:
            message.setdefault(name, []).extend(values)
        else:
            message[name] = values[-1]
    return message


def _values(kind: str | dict[int, str], value: JsonValue) -> list[object]:
    if isinstance(kind, dict):
        return [kind.get(n, str(n)) for n in protobuf_wire.read_numbers(value)]
    if kind == "text":
        return [value.decode()]
    if kind == "bool":
        return [bool(n) for n in protobuf_wire.read_numbers(value)]
    if kind == "int64":
        return [str(n) for n in protobuf_wire.read_numbers(value)]
    return [_read(kind, value)]
