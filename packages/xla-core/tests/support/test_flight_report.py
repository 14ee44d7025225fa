"""What the head of a flight report says: who waits for whom, who failed, who was only interrupted."""

from __future__ import annotations

import pytest

from xla_core.support import flight_report

GRADIENTS = ", ".join(f"float32[{n},4]" for n in range(1, 29))


def snapshot(ordinal, launched, **changed):
    """Of one of two processes that has launched so many collectives with the other one."""
    what = f"all_reduce sum of {GRADIENTS} over all 2 replicas"
    collectives = [
        {"number": n, "text": what, "groups": [[0, 1]], "line": "train.py:7 in train", "time": n}
        for n in range(1, launched + 1)
    ]
    return {
        "ordinal": ordinal, "time": 9.0, "reason": "", "error": None, "broke": None, "finished": False,
        "place": f"train.py:{8 + ordinal} in train", "doing": "it sleeps", "waiting": None,
        "inside": None, "meets": [], "writes": [], "heard": False, "seen": {},
        "launched": {"all": launched, "with": {str(1 - ordinal): launched}},
        "collectives": collectives, "steps": {"own": None, "usual": None}, **changed,
    }  # fmt: skip


def head(*snapshots):
    processes = {str(n): one for n, one in enumerate(snapshots)}
    return list(flight_report.headline({"count": len(snapshots), "processes": processes}))


@pytest.mark.parametrize("error", [None, "KeyboardInterrupt: "])
def test_who_waits_for_whom_is_said_of_processes_that_were_interrupted_too(error):
    inside = {"kind": "launch", "what": "step", "amount": 0, "seconds": 5.0}
    waits, awaited = head(snapshot(0, 3, inside=inside, error=error), snapshot(1, 2, error=error))
    assert waits.startswith("ordinal 0 waits in all_reduce sum of float32[1,4], float32[2,4], ")
    assert waits.endswith(
        "float32[3,4] and 25 more over all 2 replicas (collective 3) at train.py:7 in train "
        "for ordinal 1, for 6.0 s"
    )
    how = "is" if error is None else "was interrupted"
    assert awaited.startswith(f"ordinal 1 {how} at train.py:9 in train")
    assert "float32[4,4]" not in awaited


def test_all_that_were_interrupted_are_named_and_none_has_failed():
    lines = head(*(snapshot(n, 2, error="KeyboardInterrupt: ") for n in range(2)))
    assert [line.partition(";")[0] for line in lines] == [
        f"ordinal {n} was interrupted at train.py:{8 + n} in train: KeyboardInterrupt"
        for n in range(2)
    ]


def test_who_failed_is_named_and_not_who_was_interrupted_later():
    failed = snapshot(1, 2, error="ValueError: no")
    first, second = head(snapshot(0, 2, error="KeyboardInterrupt: "), failed)
    assert first.startswith("ordinal 1 failed at train.py:9 in train: ValueError: no")
    assert second.startswith("ordinal 0 was interrupted")
