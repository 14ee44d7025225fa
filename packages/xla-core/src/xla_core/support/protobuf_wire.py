"""The wire format of protocol buffers, as far as single fields are written and read here.

jaxlib and the profiler's service take messages for which there are no Python classes to use; a few
fields are not worth generated code. Format: https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

from typing import Any, Final

_VARINT: Final = 0
_BYTES: Final = 2


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


def read_message(data: bytes) -> dict[int, Any]:
    """The numbers and byte strings of a protocol buffer by field; of repeated ones the last.

    Raises ValueError for what is no such message.
    """
    found: dict[int, Any] = {}
    position = 0
    while position < len(data):
        tag, position = _read_varint(data, position)
        kind = tag & 7
        if kind == _VARINT:
            found[tag >> 3], position = _read_varint(data, position)
        elif kind == _BYTES:
            size, position = _read_varint(data, position)
            found[tag >> 3] = data[position : position + size]
            position += size
        else:
            raise ValueError(f"field {tag >> 3} has the unknown kind {kind}")
    return found


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
        shift += 7
