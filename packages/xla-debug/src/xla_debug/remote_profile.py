"""Asks another process's profiler server for a profile, over gRPC.

The service is the one of TensorFlow, jax and torch_xla: ``/tensorflow.ProfilerService/Profile`` with
the messages of ``profiler_service.proto``. Four fields are needed, so they are written by hand and no
generated code is carried along.
"""

from __future__ import annotations

import importlib
import platform
import time
from pathlib import Path
from typing import Any, Final

METHOD: Final = "/tensorflow.ProfilerService/Profile"
MSG_GRPC: Final = (
    "xp.trace() of another process needs grpcio, which is not installed; "
    "pip install xla-debug[remote]"
)
MSG_FAILED: Final = (
    "{address} gave no profile in {attempts} attempts: {error}. Is xp.start_server() called there?"
)
_VARINT: Final = 0
_BYTES: Final = 2
_EMPTY: Final = 7  # ProfileResponse.empty_trace
_XSPACE: Final = 8  # ProfileResponse.xspace


def record(
    address: str,
    logdir: str,
    duration_ms: int,
    *,
    attempts: int,
    host_level: int,
    timeout: float,
    interval: float,
) -> None:
    """Have ``address`` record for ``duration_ms`` and write the xplane file below ``logdir``.

    Raises ImportError without grpcio, RuntimeError when all attempts failed.
    """
    try:
        grpc = importlib.import_module("grpc")
    except ModuleNotFoundError:
        raise ImportError(MSG_GRPC, name="grpc") from None
    session = time.strftime("%Y_%m_%d_%H_%M_%S")
    request = _request(duration_ms, host_level, session)
    error: Any = "nothing was recorded"
    for attempt in range(attempts):
        if attempt:
            time.sleep(interval)
        try:
            with grpc.insecure_channel(
                address, options=[("grpc.max_receive_message_length", -1)]
            ) as channel:
                answer = channel.unary_unary(METHOD)(request, timeout=timeout + duration_ms / 1000)
        except grpc.RpcError as failure:
            error = failure.details() if hasattr(failure, "details") else failure
            continue
        fields = read_message(answer)
        if _XSPACE in fields and not fields.get(_EMPTY):
            _save(fields[_XSPACE], Path(logdir), session, address)
            return
    raise RuntimeError(MSG_FAILED.format(address=address, attempts=attempts, error=error))


def _save(xspace: bytes, logdir: Path, session: str, address: str) -> None:
    folder = logdir / "plugins" / "profile" / session
    folder.mkdir(parents=True, exist_ok=True)
    host = address.rpartition(":")[0].strip("[]") or platform.node()
    (folder / f"{host}.xplane.pb").write_bytes(xspace)


def _request(duration_ms: int, host_level: int, session: str) -> bytes:
    # ProfileOptions: version 5, host_tracer_level 2, enable_hlo_proto 7, duration_ms 9
    options = _number(5, 1) + _number(2, host_level) + _number(7, 1) + _number(9, duration_ms)
    # ProfileRequest: duration_ms 1, tools 3, opts 4, session_id 6, emit_xspace 9
    return (
        _number(1, duration_ms)
        + _text(3, b"xspace")
        + _text(4, options)
        + _text(6, session.encode())
        + _number(9, 1)
    )


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3 | _VARINT) + _varint(value)


def _text(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | _BYTES) + _varint(len(value)) + value


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
