"""The wire format of protocol buffers, as far as single fields are written and read here.

jaxlib and the profiler's service take messages for which there are no Python classes to use; a few
fields are not worth generated code. Format: https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from xla_core.contract.foreign_values import JsonValue

__all__ = [
    "bytes_field",
    "number_field",
    "read_delimited",
    "read_fields",
    "read_message",
    "read_numbers",
]

_VARINT: Final = 0
_FIXED64: Final = 1
_BYTES: Final = 2
_FIXED32: Final = 5

MSG_TRUNCATED: Final = "the message ends inside a field"


def number_field(field: int, value: int) -> bytes:
    """An integer (not negative) as field number ``field``."""
    return _varint(field << 3 | _VARINT) + _varint(value)


def bytes_field(field: int, value: bytes) -> bytes:
    """A string or message as field number ``field``."""
    return _varint(field << 3 | _BYTES) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def read_message(data: bytes) -> dict[int, JsonValue]:
    """The numbers and byte strings of a protocol buffer by field; of repeated ones the last.

    Raises ValueError for what is no such message.
    """
    return dict(read_fields(data))


def read_fields(data: bytes) -> Iterator[tuple[int, object]]:
    """The fields of a protocol buffer in order, by number; repeated ones come several times.

    Values are integers and byte strings, those of fixed width too. Raises ValueError for what is no such
    message.
    """
    position = 0
    while position < len(data):
        tag, position = _read_varint(data, position)
        kind = tag & 7
        value: object
        if kind == _VARINT:
            value, position = _read_varint(data, position)
        elif kind in (_BYTES, _FIXED64, _FIXED32):
            size = 8 if kind == _FIXED64 else 4
            if kind == _BYTES:
                size, position = _read_varint(data, position)
            value = data[position : position + size]
            if len(value) < size:
                raise ValueError(MSG_TRUNCATED)
            position += size
        else:
            raise ValueError(f"field {tag >> 3} has the unknown kind {kind}")
        yield tag >> 3, value


def read_delimited(data: bytes) -> Iterator[bytes]:
    """Messages that stand one after the other, each after its length. Raises ValueError for anything else."""
    position = 0
    while position < len(data):
        size, position = _read_varint(data, position)
        if position + size > len(data):
            raise ValueError(MSG_TRUNCATED)
        yield data[position : position + size]
        position += size


def read_numbers(packed: int | bytes) -> list[int]:
    """The integers of a repeated field: one by itself, or several packed together."""
    if isinstance(packed, int):
        return [packed]
    numbers, position = [], 0
    while position < len(packed):
        number, position = _read_varint(packed, position)
        numbers.append(number)
    return numbers


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if position == len(data):
            raise ValueError(MSG_TRUNCATED)
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
        shift += 7
