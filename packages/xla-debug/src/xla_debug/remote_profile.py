"""Requests a profile from another process's profiler server, by gRPC.

TensorFlow, jax and torch_xla have the same service: ``/tensorflow.ProfilerService/Profile``, with the messages of
``profiler_service.proto``, of which a few fields are needed.
"""

from __future__ import annotations

import importlib
import platform
import time
from pathlib import Path
from typing import Final

from xla_core.support.protobuf_wire import bytes_field, number_field, read_message

METHOD: Final = "/tensorflow.ProfilerService/Profile"
MSG_GRPC: Final = (
    "xp.trace() of another process needs grpcio, which is not installed; "
    "pip install xla-debug[remote]"
)
MSG_FAILED: Final = (
    "{address} gave no profile in {attempts} attempts: {error}. Is xp.start_server() called there?"
)
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
    """Let the server at ``address`` record for ``duration_ms``, and write the xplane file below ``logdir``.

    Makes up to ``attempts`` attempts, ``interval`` seconds apart, and waits up to ``timeout`` seconds for each.
    ``host_level`` is the level of detail on the host. Raises ImportError without grpcio, and RuntimeError if all
    attempts fail.
    """
    try:
        grpc = importlib.import_module("grpc")
    except ModuleNotFoundError:
        raise ImportError(MSG_GRPC, name="grpc") from None
    session = time.strftime("%Y_%m_%d_%H_%M_%S")
    request = _request(duration_ms, host_level, session)
    error: object = "nothing was recorded"
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
    options = (
        number_field(5, 1)
        + number_field(2, host_level)
        + number_field(7, 1)
        + number_field(9, duration_ms)
    )
    # ProfileRequest: duration_ms 1, tools 3, opts 4, session_id 6, emit_xspace 9
    return (
        number_field(1, duration_ms)
        + bytes_field(3, b"xspace")
        + bytes_field(4, options)
        + bytes_field(6, session.encode())
        + number_field(9, 1)
    )
