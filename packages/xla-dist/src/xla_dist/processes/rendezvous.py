"""Communication of replicas on the host: rendezvous, reductions of Python objects, messages.

Payloads go through the coordinator's key-value store, or through memory between threads of one process. All
replicas of a set must make the same calls in the same order; a call with a different tag raises at once.
"""

from __future__ import annotations

import collections
import pickle
import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeVar

from xla_core.contract.foreign_values import ForeignObject
from xla_core.extension_api import jobs, runtime, tensors
from xla_dist.job_health.bounded_wait import BoundedWait
from xla_dist.processes import session
from xla_dist.processes.thread_replicas import Team, team_of

T = TypeVar("T")

_FOLDER: Final = "xla/rendezvous"
_TAG_LENGTH: Final = struct.Struct("<I")
# The coordinator's store refuses values that are much larger than this.
_PIECE: Final = 1 << 20

MSG_TAGS: Final = (
    "ordinal {me} is at rendezvous {mine!r}, but ordinal {other} is at {theirs!r}: every replica has to make "
    "the same calls of rendezvous in the same order"
)
MSG_NOT_IN: Final = "rendezvous({tag!r}): ordinal {me} is not among replicas={replicas}"
MSG_TAG: Final = "rendezvous takes a tag (str), got {got!r}"
MSG_PAYLOAD: Final = "`payload` must be bytes, not {kind}"

# How often each set of replicas has met: the number is part of the keys.
_rounds: Final[collections.Counter[tuple[int, ...]]] = collections.Counter()
_lock: Final = threading.Lock()


def rendezvous(tag: str, payload: bytes = b"", replicas: Sequence[int] = ()) -> list[bytes]:
    """Wait until all ``replicas`` (ordinals; default: all of the job) have called this with the same ``tag``.

    Returns the ``payload`` (default: empty) of each of them, in the order of their ordinals. Raises RuntimeError if
    another replica calls it with another tag, has finished, or does not call it within
    ``XLA_DIST_WAIT_TIMEOUT`` seconds; TypeError unless ``tag`` is text and ``payload`` is bytes; ValueError if this
    replica is not among ``replicas``; NotImplementedError for only some of the threads of one process.
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
        members = _members(tag, replicas, current.ordinal, current.world)
        return _exchange_between_processes(tag, bytes(payload), members)
    me, world = runtime.replica_of()
    members = _members(tag, replicas, me, world)
    if world == 1:
        return [bytes(payload)]
    team = team_of(runtime.trace_of(None).backend.replicas)
    assert team is not None
    return _exchange_between_threads(team, me, tag, bytes(payload), members)


def xla_rendezvous(
    payload: bytes = b"", ordinals: Sequence[int] | None = None, tag: str | None = None
) -> list[bytes]:
    """``rendezvous`` with the order of arguments of ``torch_xla._internal.rendezvous``.

    ``ordinals`` and ``tag`` default to all replicas and the empty tag.
    """
    return rendezvous(tag or "", payload, ordinals or ())


def _members(tag: str, replicas: Sequence[int], me: int, world: int) -> tuple[int, ...]:
    """The sorted ordinals of a rendezvous. Raises ValueError if ``me`` is not among them."""
    members = tuple(sorted({int(r) for r in replicas})) if len(replicas) else tuple(range(world))
    if me not in members:
        raise ValueError(MSG_NOT_IN.format(tag=tag, me=me, replicas=list(members)))
    return members


def _exchange_between_threads(
    team: Team, me: int, tag: str, payload: bytes, members: tuple[int, ...]
) -> list[bytes]:
    if len(members) != len(team.devices):
        raise NotImplementedError(
            "rendezvous(replicas=...) takes all threads of a process, not some of them: leave replicas out, or "
            "launch processes"
        )
    payloads: list[bytes] = team.exchange(me, f"rendezvous {tag!r}", payload, list)
    return payloads


def _exchange_between_processes(tag: str, payload: bytes, members: tuple[int, ...]) -> list[bytes]:
    me = session.current().ordinal
    with _lock:
        number = _rounds[members]
        _rounds[members] += 1
    folder = f"{_FOLDER}/{'-'.join(map(str, members))}"
    _publish(f"{folder}/{number}/{me}", tag, payload)
    payloads = []
    with BoundedWait(f"rendezvous {tag!r}", me) as bounded_wait:
        for other in members:
            other_tag, data = _fetch(f"{folder}/{number}/{other}", other, bounded_wait)
            if other_tag != tag:
                text = MSG_TAGS.format(me=me, mine=tag, other=other, theirs=other_tag)
                raise RuntimeError(text)
            payloads.append(data)
    if number >= 1:
        # A member that has come to this rendezvous has read all payloads of the one before. The payload of this
        # rendezvous must stay: others may not have read it yet.
        jobs.withdraw(f"{folder}/{number - 1}/{me}")
    return payloads


def _publish(key: str, tag: str, payload: bytes) -> None:
    """Write ``tag`` and ``payload`` under ``key``, in pieces.

    The first piece contains the number of pieces. It is written last, so that a reader who finds it finds all.
    """
    whole = _TAG_LENGTH.pack(len(tag.encode())) + tag.encode() + payload
    pieces = [whole[i : i + _PIECE] for i in range(0, len(whole), _PIECE)]
    for number, piece in enumerate(pieces[1:], 1):
        jobs.publish(f"{key}/{number}", piece)
    jobs.publish(f"{key}/0", _TAG_LENGTH.pack(len(pieces)) + pieces[0])


def _fetch(key: str, other: int, bounded_wait: BoundedWait) -> tuple[str, bytes]:
    """The tag and the payload that replica ``other`` writes under ``key``; waits for them."""
    first = jobs.lookup(f"{key}/0")
    while first is None:
        bounded_wait.wait([other])
        first = jobs.lookup(f"{key}/0")
    (count,) = _TAG_LENGTH.unpack_from(first)
    pieces = [first[_TAG_LENGTH.size :]]
    pieces += [jobs.lookup(f"{key}/{n}") or b"" for n in range(1, count)]
    whole = b"".join(pieces)
    (length,) = _TAG_LENGTH.unpack_from(whole)
    end = _TAG_LENGTH.size + length
    return whole[_TAG_LENGTH.size : end].decode(), whole[end:]


def mesh_reduce(tag: str, data: object, reduce_fn: Callable[[list[ForeignObject]], T]) -> T:
    """``reduce_fn`` of the list of all replicas' ``data``, in the order of their ordinals.

    Every replica calls ``reduce_fn`` with the same list. ``data`` is any object that can be pickled;
    ``reduce_fn`` gets CPU tensors for the ``xla`` tensors in it. Raises what ``rendezvous`` raises for ``tag``.
    """
    host = tensors.map_tensors(data, lambda t: t.detach().cpu())
    return reduce_fn([pickle.loads(p) for p in rendezvous(tag, pickle.dumps(host))])


def do_on_ordinals(
    target: Callable[..., object], data: Iterable[object] = (), ordinals: Sequence[int] = (0,)
) -> None:
    """Call ``target(*data)`` on the replicas ``ordinals`` (default: 0) only; all replicas then wait for each other.

    ``target`` gets CPU tensors for the ``xla`` tensors in ``data``. Every replica must call this function.
    """
    running = _ordinal() in ordinals
    # on all replicas: reading a tensor runs its step, which may contain collectives
    host = tensors.map_tensors(tuple(data), lambda t: t.detach().cpu())
    if running:
        target(*host)
    rendezvous("torch_xla.core.xla_model.do_on_ordinals")


def _ordinal() -> int:
    return runtime.replica_of()[0]


def gather_objects(tag: str, data: T, replicas: Sequence[int] = ()) -> list[T]:
    """The ``data`` of all ``replicas`` (default: all of the job), in the order of their ordinals.

    ``data`` is any object that can be pickled. Raises what ``rendezvous`` raises for ``tag``.
    """
    return [pickle.loads(p) for p in rendezvous(tag, pickle.dumps(data), replicas)]


def put(key: str, data: bytes) -> None:
    """Send ``data`` to the one replica that calls ``take`` with the same ``key``; does not wait for it."""
    _publish(key, "", data)


def take(key: str, origin: int, bounded_wait: BoundedWait) -> bytes:
    """The data that replica ``origin`` sends under ``key`` with ``put``; waits for it, and removes it."""
    _, data = _fetch(key, origin, bounded_wait)
    jobs.withdraw(key)
    return data
