"""Meetings of replicas outside of programs: rendezvous, reductions of Python objects, turns.

Payloads go through the coordinator's key-value store (threads of one process: through memory). All
replicas of a set make the same calls in the same order; different tags are an error at once.
"""

from __future__ import annotations

import collections
import pickle
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

from xla_core.extension_api import jobs, runtime, tensors
from xla_dist.job_health.bounded_wait import BoundedWait
from xla_dist.processes import session
from xla_dist.processes.thread_replicas import Team, team_of

_FOLDER: Final = "xla/rendezvous"
_TAG_LENGTH: Final = struct.Struct("<I")
# The store refuses values that are much larger.
_PIECE: Final = 1 << 20

MSG_TAGS: Final = (
    "ordinal {me} is at rendezvous {mine!r}, ordinal {other} at {theirs!r}: every replica has to come "
    "to the same rendezvous in the same order"
)
MSG_NOT_IN: Final = "rendezvous({tag!r}): ordinal {me} is not among replicas={replicas}"
MSG_TAG: Final = "rendezvous takes a tag (str), got {got!r}"
MSG_PAYLOAD: Final = "`payload` must be bytes, not {kind}"

_rounds: Final[collections.Counter[tuple[int, ...]]] = collections.Counter()
_lock: Final = threading.Lock()


def rendezvous(tag: str, payload: bytes = b"", replicas: Sequence[int] = ()) -> list[bytes]:
    """Wait until all replicas (default) or those named come to the rendezvous ``tag``.

    Returns everyone's payload, in ordinal order. Raises RuntimeError when another replica is at a
    rendezvous with another tag, has finished, or does not come for ``XLA_DIST_WAIT_TIMEOUT`` seconds.
    """
    if not isinstance(tag, str):
        raise TypeError(MSG_TAG.format(got=tag))
    if not isinstance(payload, bytes):
        raise TypeError(MSG_PAYLOAD.format(kind=type(payload)))
    connection = jobs.connection()
    if connection is None and not runtime.started():
        runtime.client()  # joins the job that the environment names, if there is one
        connection = jobs.connection()
    if connection is not None:
        current = session.current()
        named = _named(tag, replicas, current.ordinal, current.world)
        return _meet_processes(tag, bytes(payload), named)
    me, world = runtime.replica_of()
    named = _named(tag, replicas, me, world)
    if world == 1:
        return [bytes(payload)]
    team = team_of(runtime.trace_of(None).backend.replicas)
    assert team is not None
    return _meet_threads(team, me, tag, bytes(payload), named)


def xla_rendezvous(
    payload: bytes = b"", ordinals: Sequence[int] | None = None, tag: str | None = None
) -> list[bytes]:
    """``rendezvous`` with torch_xla's other order of arguments."""
    return rendezvous(tag or "", payload, ordinals or ())


def _named(tag: str, replicas: Sequence[int], me: int, world: int) -> tuple[int, ...]:
    named = tuple(sorted({int(r) for r in replicas})) if len(replicas) else tuple(range(world))
    if me not in named:
        raise ValueError(MSG_NOT_IN.format(tag=tag, me=me, replicas=list(named)))
    return named


def _meet_threads(
    team: Team, me: int, tag: str, payload: bytes, named: tuple[int, ...]
) -> list[bytes]:
    if len(named) != len(team.devices):
        raise NotImplementedError(
            "rendezvous(replicas=...) of some threads: launch processes, or let all threads meet"
        )
    everyone: list[bytes] = team.meet(me, f"rendezvous {tag!r}", payload, list)
    return everyone


def _meet_processes(tag: str, payload: bytes, named: tuple[int, ...]) -> list[bytes]:
    me = session.current().ordinal
    with _lock:
        number = _rounds[named]
        _rounds[named] += 1
    folder = f"{_FOLDER}/{'-'.join(map(str, named))}"
    _publish(f"{folder}/{number}/{me}", tag, payload)
    payloads = []
    with BoundedWait(f"rendezvous {tag!r}", me) as patience:
        for other in named:
            theirs, data = _fetch(f"{folder}/{number}/{other}", other, patience)
            if theirs != tag:
                text = MSG_TAGS.format(me=me, mine=tag, other=other, theirs=theirs)
                raise RuntimeError(text)
            payloads.append(data)
    if number >= 1:
        # everyone here has read what was published one rendezvous before
        jobs.withdraw(f"{folder}/{number - 1}/{me}")
    return payloads


def _publish(key: str, tag: str, payload: bytes) -> None:
    """Write a payload in pieces, the first, which says how many there are, last."""
    whole = _TAG_LENGTH.pack(len(tag.encode())) + tag.encode() + payload
    pieces = [whole[i : i + _PIECE] for i in range(0, len(whole), _PIECE)]
    for number, piece in enumerate(pieces[1:], 1):
        jobs.publish(f"{key}/{number}", piece)
    jobs.publish(f"{key}/0", _TAG_LENGTH.pack(len(pieces)) + pieces[0])


def _fetch(key: str, other: int, patience: BoundedWait) -> tuple[str, bytes]:
    first = jobs.lookup(f"{key}/0")
    while first is None:
        patience.wait([other])
        first = jobs.lookup(f"{key}/0")
    (count,) = _TAG_LENGTH.unpack_from(first)
    pieces = [first[_TAG_LENGTH.size :]]
    pieces += [jobs.lookup(f"{key}/{n}") or b"" for n in range(1, count)]
    whole = b"".join(pieces)
    (length,) = _TAG_LENGTH.unpack_from(whole)
    end = _TAG_LENGTH.size + length
    return whole[_TAG_LENGTH.size : end].decode(), whole[end:]


def mesh_reduce(tag: str, data: object, reduce_fn: Callable[[list[object]], object]) -> Any:
    """``reduce_fn`` of the list of every replica's ``data``, in ordinal order; the same on each.

    ``data`` is any object that pickles; ``xla`` tensors in it come as CPU tensors.
    """
    host = tensors.map_tensors(data, lambda t: t.detach().cpu())
    return reduce_fn([pickle.loads(p) for p in rendezvous(tag, pickle.dumps(host))])


def do_on_ordinals(
    target: Callable[..., object], data: Any = (), ordinals: Sequence[int] = (0,)
) -> None:
    """Call ``target(*data)`` on the replicas ``ordinals`` only, and wait for one another.

    ``xla`` tensors in ``data`` come as CPU tensors.
    """
    running = _ordinal() in ordinals
    host = tensors.map_tensors(tuple(data), lambda t: t.detach().cpu())
    if running:
        target(*host)
    rendezvous("torch_xla.core.xla_model.do_on_ordinals")


def _ordinal() -> int:
    return runtime.replica_of()[0]


def gather_objects(tag: str, data: object, replicas: Sequence[int] = ()) -> list[Any]:
    """Every replica's ``data`` (which pickles), in ordinal order."""
    return [pickle.loads(p) for p in rendezvous(tag, pickle.dumps(data), replicas)]


def put(key: str, data: bytes) -> None:
    """Leave ``data`` for the one replica that takes ``key``."""
    _publish(key, "", data)


def take(key: str, origin: int, patience: BoundedWait) -> bytes:
    """What replica ``origin`` puts under ``key``; waits for it, and removes it."""
    _, data = _fetch(key, origin, patience)
    jobs.withdraw(key)
    return data
