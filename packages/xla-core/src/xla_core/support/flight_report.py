"""Who waits for whom: a report of a job's processes, worked out from what each of them says of itself.

A report has ``job``, ``occasion``, ``count`` and ``processes``: a snapshot per ordinal (as text). A snapshot:

=============  =================================================================================
``time``       of day, when it was taken
``reason``     why: a failure's text, or who asked
``error``      where this process itself raised: place and error, or None
``broke``      why a collective broke in which this process was, or None; ``finished``: it has ended well
``place``      the user's line that the main thread is at; ``doing`` what it does there, ``stack``
``waiting``    what the main thread waits at on the host and the ``missing`` ordinals, or None
``inside``     what it does inside the runtime (kind, what, amount, seconds), or None
``meets``      what any of its threads waits for others at (what, seconds), and what it ``writes``
``launched``   collectives launched, in all, and ``with`` each other ordinal (as text)
``seen``       how many collectives it has seen others launch with it, by ordinal (as text)
``collectives``the last of them: number, text, groups, line, time
``calls``      the last collectives on process groups of torch.distributed: group, number, what, time
``programs``   what each run of a program over a mesh does between devices (kind, count, bytes, groups, line)
``steps``      count, seconds since the last, usual and own seconds
``records``    the ring: kind, time, seconds (None: it has not ended), thread, what, amount
``heard``      whether others said it, as the process itself did not
=============  =================================================================================
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Final, NamedTuple

from xla_core.contract.foreign_values import JsonObject, JsonValue

__all__ = [
    "Report",
    "Snapshot",
    "Wait",
    "culprits",
    "headline",
    "lines",
    "reasons",
    "record_line",
    "straggler_lines",
    "text",
    "waits",
]

Report = JsonObject
Snapshot = JsonObject

_MOST_RECORDS: Final = 12
_VALUES: Final = re.compile(r"(?:\w+\[[\d,]*\], ){4,}\w+\[[\d,]*\]")
"""Dtypes and shapes of a collective's values, where there are more than four."""
_UNKNOWN_LINE: Final = "a line that is not known"
_SLOW_FACTOR: Final = 1.5
"""A process is a straggler if its own part of a step takes this many times that of the others ..."""
_SLOW_SHARE: Final = 0.1
"""... if that is at least this share of the step."""


class Wait(NamedTuple):
    """Process ``who`` waits in ``what`` for ``whom``, at ``line``, for ``seconds``; ``number`` 0 on the host."""

    who: int
    whom: tuple[int, ...]
    what: str
    number: int
    line: str
    seconds: float


def waits(report: Report) -> list[Wait]:
    """Who waits for whom, by ordinal."""
    candidates = [_wait(report, int(n), one) for n, one in report["processes"].items()]
    return [wait for wait in candidates if wait is not None]


def _wait(report: Report, me: int, one: Snapshot) -> Wait | None:
    if _has_failed(one):
        return None
    behind = _behind(report, me, one)
    waiting = one["waiting"]
    if waiting is not None and waiting["missing"]:
        latest = one["collectives"][-1] if one["collectives"] else None
        in_collective = latest is not None and latest["text"] == waiting["what"]
        number = latest["number"] if latest is not None and in_collective else 0
        line = latest["line"] if latest is not None and in_collective else ""
        whom = tuple(waiting["missing"])
        return Wait(me, whom, waiting["what"], number, line or one["place"], waiting["seconds"])
    if not behind or (one["inside"] is None and one["broke"] is None):
        return _meeting(report, me, one)
    first = min(behind, key=lambda other: -behind[other])
    item = _first_missing(one, first, behind[first])
    if item is None:
        return None
    return Wait(
        me, tuple(behind), item["text"], item["number"], item["line"] or one["place"],
        max(one["time"] - item["time"], 0.0),
    )  # fmt: skip


def _meeting(report: Report, me: int, one: Snapshot) -> Wait | None:
    """The first meeting, of any thread, that others write for, or have not come to."""
    others = {int(n): other for n, other in report["processes"].items() if int(n) != me}
    for meeting in one["meets"]:
        what = meeting["what"]
        whom = [n for n, other in others.items() if _has(other["writes"], what)]
        whom = whom or [n for n, other in others.items() if not _has(other["meets"], what)]
        if whom:
            return Wait(me, tuple(whom), what, 0, one["place"], meeting["seconds"])
    return None


def _has(under_way: list[dict[str, object]], what: str) -> bool:
    return any(each["what"] == what for each in under_way)


def _behind(report: Report, me: int, one: Snapshot) -> dict[int, int]:
    """By how many collectives others have launched less with this process than it with them."""
    missing = {}
    for name, mine in one["launched"]["with"].items():
        other = report["processes"].get(name)
        theirs = other["launched"]["with"].get(str(me), 0) if other is not None else 0
        theirs = max(theirs, one["seen"].get(name, 0))
        if mine > theirs:
            missing[int(name)] = mine - theirs
    return missing


def _first_missing(one: Snapshot, other: int, count: int) -> JsonObject | None:
    """The first of the last ``count`` collectives with ``other``."""
    me = one["ordinal"]
    shared = [c for c in one["collectives"] if any(me in g and other in g for g in c["groups"])]
    return shared[-count] if len(shared) >= count else shared[0] if shared else None


def culprits(report: Report) -> list[int]:
    """The ordinals that failed; otherwise those that are awaited and wait for no other; otherwise silent ones."""
    processes = report["processes"]
    failed = [int(n) for n, one in processes.items() if _has_failed(one)]
    if failed:
        return failed
    all_waits = waits(report)
    waiting = {wait.who for wait in all_waits}
    awaited = {other for wait in all_waits for other in wait.whom}
    silent = [n for n in range(report["count"]) if _is_silent(report, n)]
    return sorted(awaited - waiting) or silent


def _has_failed(one: Snapshot) -> bool:
    """Whether it ends by an error that is its own: Ctrl-C is not, it found the process where it was."""
    return one["error"] is not None and not one["error"].startswith(KeyboardInterrupt.__name__)


def _is_silent(report: Report, ordinal: int) -> bool:
    one = report["processes"].get(str(ordinal))
    return one is None or one["heard"]


def text(report: Report) -> str:
    """The page, as text."""
    return "\n".join(lines(report)) + "\n"


def lines(report: Report) -> Iterator[str]:
    """The page's lines: what is the matter, then every process."""
    processes = report["processes"]
    heard_of = f"{len(processes)} of {report['count']} processes"
    yield f"Flight report of job {report['job']}, {report['occasion']}: {heard_of}"
    for reason in reasons(report):
        yield from (f"  {line}" for line in reason.rstrip().splitlines())
    yield ""
    yield from headline(report)
    for number, one in processes.items():
        yield ""
        yield from _process(int(number), one)


def reasons(report: Report) -> list[str]:
    """Why there is a report: in the words of who failed, or of all."""
    snapshots = list(report["processes"].values())
    failed = [s for s in snapshots if s["error"] is not None] or snapshots
    return list(dict.fromkeys(one["reason"] for one in failed if one["reason"]))


def headline(report: Report) -> Iterator[str]:
    """Who waits for whom, and what those do that are waited for: a line each."""
    all_waits = waits(report)
    for wait in all_waits:
        number = f" (collective {wait.number})" if wait.number else ""
        yield (
            f"ordinal {wait.who} waits in {_short(wait.what)}{number} at {wait.line} for ordinal "
            f"{', '.join(map(str, wait.whom))}, for {wait.seconds:.1f} s"
        )
    guilty = culprits(report)
    known = {*guilty, *(wait.who for wait in all_waits)}
    interrupted = [int(n) for n, one in report["processes"].items() if one["error"] is not None]
    guilty += [ordinal for ordinal in interrupted if ordinal not in known]
    for ordinal in guilty:
        yield _says(ordinal, report["processes"].get(str(ordinal)), report)
    if not all_waits and not guilty:
        yield "no process waits for another"
    yield from _groups(report)
    yield from _stragglers(report)


def _groups(report: Report) -> Iterator[str]:
    """A line for each process group of torch.distributed whose processes are not at the same call."""
    last: dict[str, dict[int, tuple[int, str]]] = {}
    for name, one in report["processes"].items():
        for call in one.get("calls", ()):
            last.setdefault(call["group"], {})[int(name)] = (call["number"], call["what"])
    for group, at in last.items():
        if len(set(at.values())) > 1:
            places = (f"ordinal {n} at call {number}, {what}" for n, (number, what) in at.items())
            yield f"process group {group} of torch.distributed: {'; '.join(places)}"


def _short(what: str) -> str:
    """A collective with three of its values, where it has many: all gradients of a model are one."""

    def few(found: re.Match[str]) -> str:
        values = found[0].split(", ")
        return f"{', '.join(values[:3])} and {len(values) - 3} more"

    return _VALUES.sub(few, what)


def _says(ordinal: int, one: Snapshot | None, report: Report) -> str:
    if one is None:
        return f"ordinal {ordinal} has never been heard of"
    if one["error"] is not None:
        how = "failed" if _has_failed(one) else "was interrupted"
        # an error without a text ends with a colon
        first = one["error"].splitlines()[0].rstrip(": ")
        what = f"{how} at {one['place']}: {first}"
    elif one["heard"]:
        ago = max(_latest(report) - one["time"], 0.0)
        what = f"says nothing; {ago:.1f} s before, it was at {one['place']}"
    elif one["finished"]:
        what = "has finished"
    elif one["writes"]:
        written = one["writes"][0]
        what = f"is at {one['place']}, and writes {written['what']}, for {written['seconds']:.1f} s"
    else:
        what = f"is at {one['place']}, {one['doing']}; it waits for no other process"
    return f"ordinal {ordinal} {what}; {_last_launched(ordinal, one, report)}"


def _last_launched(ordinal: int, one: Snapshot, report: Report) -> str:
    last = _last_seen(ordinal, one, report)
    if last is not None:
        what = f"{_short(last['text'])} (collective {last['number']}) at {last['line'] or _UNKNOWN_LINE}"
        return f"the last that others saw it launch is {what}"
    if not one["collectives"]:
        return "it launched no collective"
    last = one["collectives"][-1]
    return (
        f"the last that it launched is {_short(last['text'])} (collective {last['number']}) at "
        f"{last['line'] or _UNKNOWN_LINE}, {max(one['time'] - last['time'], 0.0):.1f} s before"
    )


def _last_seen(ordinal: int, one: Snapshot, report: Report) -> JsonObject | None:
    """The collective that others saw a process launch after what it said last, as one of them has it."""
    collective = None
    for name, other in report["processes"].items():
        seen = other["seen"].get(str(ordinal), 0)
        ahead = other["launched"]["with"].get(str(ordinal), 0) - seen
        if seen > one["launched"]["with"].get(name, 0) and ahead >= 0:
            collective = _first_missing(other, ordinal, ahead + 1)
    return collective


def _latest(report: Report) -> float:
    return float(max(one["time"] for one in report["processes"].values()))


def _stragglers(report: Report) -> Iterator[str]:
    """A line for each process whose own part of a step is longer than that of the others."""
    own = {
        int(n): (one["steps"]["own"], one["steps"]["usual"])
        for n, one in report["processes"].items()
        if one["steps"]["own"] is not None
    }
    return straggler_lines(own)


def straggler_lines(times: dict[int, tuple[float, float]]) -> Iterator[str]:
    """The same from own and usual seconds of a step, by ordinal."""
    for ordinal, (own, usual) in times.items():
        others = sorted(t for n, (t, _) in times.items() if n != ordinal)
        if not others:
            continue
        middle = others[(len(others) - 1) // 2]
        if own > _SLOW_FACTOR * middle and own - middle > _SLOW_SHARE * usual:
            yield (
                f"ordinal {ordinal} is slow: of a step of {usual * 1e3:.1f} ms its host works "
                f"{own * 1e3:.1f} ms, that of the others {middle * 1e3:.1f} ms; they wait for it"
            )


def _process(ordinal: int, one: Snapshot) -> Iterator[str]:
    source = "as others heard last" if one["heard"] else "its own words"
    yield f"ordinal {ordinal}: process {one['pid']} on {one['host']}, {_of_day(one['time'])} ({source})"
    if one["error"] is not None:
        yield f"  failed: {one['error'].splitlines()[0]}"
    yield f"  at {one['place']}" + (f", {one['doing']}" if one["doing"] else "")
    if one["inside"] is not None:
        inside = one["inside"]
        what = " ".join(str(w) for w in (inside["kind"], inside["what"]) if w)
        yield f"  inside the runtime: {what}, for {inside['seconds']:.1f} s"
    for doing in ("meets", "writes"):
        yield from (f"  {doing}: {w['what']}, for {w['seconds']:.1f} s" for w in one[doing])
    steps = one["steps"]
    usual = f", usually {steps['usual'] * 1e3:.1f} ms" if steps["usual"] is not None else ""
    last = f", the last ended {steps['since']:.1f} s before" if steps["ended"] else ""
    yield f"  steps: {steps['ended']}{last}{usual}"
    yield f"  collectives: {one['launched']['all']}"
    yield from (f"    {_collective(c)}" for c in one["collectives"][-3:])
    for call in one.get("calls", ())[-3:]:
        at = _of_day(call["time"])
        yield f"  torch.distributed, group {call['group']}: {call['number']}. {call['what']}, {at}"
    for name, rows in one["programs"].items():
        yield f"  between devices, in each run of {name}:"
        yield from (f"    {_mesh_collective(row)}" for row in rows)
    yield "  did last:"
    yield from (f"    {record_line(r)}" for r in one["records"][-_MOST_RECORDS:])
    if one["stack"]:
        yield "  stack:"
        yield from (f"    {line}" for line in one["stack"].rstrip().splitlines())


def _collective(item: JsonObject) -> str:
    line = f" at {item['line']}" if item["line"] else ""
    return f"{item['number']}. {item['text']}{line}, {_of_day(item['time'])}"


def _mesh_collective(row: dict[str, object]) -> str:
    line = f", for {row['line']}" if row["line"] else ""
    return f"{row['count']} x {row['kind']}, {row['bytes']} bytes, groups {row['groups'] or 'all'}{line}"


def record_line(record: list[JsonValue]) -> str:
    """One record of the ring, as the page shows it."""
    kind, began, seconds, thread, what, amount = record
    took = "has not ended" if seconds is None else f"{seconds * 1e3:.3f} ms" if seconds else ""
    size = f"{amount} {'operations' if kind == 'compile' else 'bytes'}" if amount else ""
    words = [_of_day(began), kind, *(w for w in (what, size, took) if w)]
    return " ".join(map(str, words)) + (f" ({thread})" if thread != "MainThread" else "")


def _of_day(moment: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(moment)) + f".{int(moment % 1 * 1000):03d}"
