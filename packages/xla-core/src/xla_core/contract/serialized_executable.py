"""The stored form of an executable: a description of the program in front of the machine code.

Device plugins share it so that ``deserialize`` needs nothing but the bytes. It is parsed without
running anything from it; what the runtime does with the code that follows is another matter.
"""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Mapping
from typing import Final

import ml_dtypes  # noqa: F401  (makes numpy know "bfloat16" and the float8 types by name)
import numpy as np

from xla_core.contract.device_protocol import ArraySpec, Placement, Program
from xla_core.contract.foreign_values import JsonObject

__all__ = [
    "pack",
    "report",
    "unpack",
]

_MAGIC: Final = b"XLAEXE01"
_LENGTH: Final = struct.Struct("<Q")

MSG_NOT_STORED: Final = "{name}: these {count} bytes are no executable that {plugin} stored"
MSG_DAMAGED: Final = "{name}: the description in the stored executable is damaged"
MSG_OTHER_COUNT: Final = (
    "{name} was compiled for {needed} devices, the requested placement has {given}; "
    "compile it again"
)


def pack(
    plugin: str, program: Program, code: bytes, report: Mapping[str, object] | None = None
) -> bytes:
    """Description of ``program`` followed by ``code``, marked as written by ``plugin``.

    ``report`` is kept beside the description: what a compiler said of a program that no device
    here can load.
    """
    header = json.dumps({"plugin": plugin, "report": report} | _describe(program)).encode()
    return b"".join((_MAGIC, _LENGTH.pack(len(header)), header, code))


def unpack(plugin: str, payload: bytes, name: str, placement: Placement) -> tuple[Program, bytes]:
    """The program (with empty ``stablehlo``), moved to ``placement``, and the code, from ``payload``.

    ``name`` is the program's name from now on, and that which errors say.
    Raises ValueError when the bytes are not what ``pack`` made for this plugin, or when the
    program needs another number of devices than the placement has.
    """
    start = len(_MAGIC) + _LENGTH.size
    if len(payload) < start or not payload.startswith(_MAGIC):
        raise ValueError(MSG_NOT_STORED.format(name=name, count=len(payload), plugin=plugin))
    (length,) = _LENGTH.unpack_from(payload, len(_MAGIC))
    try:
        header = json.loads(payload[start : start + length])
        writer = header["plugin"]
        program = _undescribe(header, name, placement)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(MSG_DAMAGED.format(name=name)) from error
    if writer != plugin:
        raise ValueError(MSG_NOT_STORED.format(name=name, count=len(payload), plugin=plugin))
    needed, given = program.num_replicas * program.num_partitions, len(placement.devices)
    if needed != given:
        raise ValueError(MSG_OTHER_COUNT.format(name=name, needed=needed, given=given))
    return program, payload[start + length :]


def report(payload: bytes) -> JsonObject | None:
    """The report that ``pack`` was given, of a payload that ``unpack`` takes; None without one."""
    start = len(_MAGIC) + _LENGTH.size
    (length,) = _LENGTH.unpack_from(payload, len(_MAGIC))
    kept: dict[str, object] | None = json.loads(payload[start : start + length]).get("report")
    return kept


def _describe(program: Program) -> dict[str, object]:
    return {
        "inputs": [[list(s.shape), s.dtype.name, s.sharding] for s in program.inputs],
        "outputs": [[list(s.shape), s.dtype.name, s.sharding] for s in program.outputs],
        "aliases": program.aliases,
        "num_replicas": program.num_replicas,
        "num_partitions": program.num_partitions,
        "options": dict(program.options),
    }


def _undescribe(header: JsonObject, name: str, placement: Placement) -> Program:
    @functools.cache  # a model's parameters have few shapes
    def spec(shape: tuple[int, ...], dtype: str, sharding: str | None) -> ArraySpec:
        return ArraySpec(shape, np.dtype(dtype), sharding)

    return Program(
        name=name,
        stablehlo=b"",
        inputs=tuple(spec(tuple(s), d, h) for s, d, h in header["inputs"]),
        outputs=tuple(spec(tuple(s), d, h) for s, d, h in header["outputs"]),
        aliases=tuple((i, o) for i, o in header["aliases"]),
        placement=placement,
        num_replicas=int(header["num_replicas"]),
        num_partitions=int(header["num_partitions"]),
        options=dict(header["options"]),
    )
