"""Reports: who waits for whom, and files that several processes write at once."""

from __future__ import annotations

import json
import os
import threading

import pytest

from xla_core.support import flight_files, flight_report


def snapshot(ordinal, count=2, **changed):
    """A process that does nothing in particular."""
    return {
        "ordinal": ordinal, "count": count, "pid": 100 + ordinal, "host": "here", "time": 50.0 + ordinal,
        "reason": "", "error": None, "broke": None, "finished": False, "place": f"a.py:{ordinal}",
        "doing": "it sleeps", "stack": "", "waiting": None, "inside": None,
        "meets": [], "writes": [], "programs": {},
        "launched": {"all": 0, "with": {}}, "seen": {}, "collectives": [],
        "steps": {"ended": 3, "since": 1.0, "usual": None, "own": None}, "records": [],
        "heard": False, **changed,
    }  # fmt: skip


def collective(number, groups, text="all_reduce"):
    return {
        "number": number, "text": f"{text} {number}", "groups": groups, "line": f"b.py:{number}",
        "time": 40.0,
    }  # fmt: skip


def report(*snapshots):
    return {
        "job": "j", "occasion": "o", "count": snapshots[0]["count"],
        "processes": {str(one["ordinal"]): one for one in snapshots},
    }  # fmt: skip


INSIDE = {"kind": "wait", "what": "", "amount": 0, "seconds": 9.0}


def test_who_waits_for_whom_in_groups():
    """Process 0 shares collectives 1 and 3 with 1, and 2 with 2: it waits in 3, as 1 has launched one."""
    pairs = [collective(1, [[0, 1]]), collective(2, [[0, 2], [1]]), collective(3, [[0, 1], [2]])]
    waiting = snapshot(
        0, 3, inside=INSIDE, collectives=pairs, launched={"all": 3, "with": {"1": 2, "2": 1}}
    )
    late = snapshot(1, 3, collectives=pairs[:1], launched={"all": 1, "with": {"0": 1}})
    other = snapshot(2, 3, collectives=pairs[1:2], launched={"all": 1, "with": {"0": 1}})
    made = report(waiting, late, other)
    (wait,) = flight_report.waits(made)
    assert wait == (0, (1,), "all_reduce 3", 3, "b.py:3", 10.0)
    assert flight_report.culprits(made) == [1]
    first, second = flight_report.headline(made)
    assert first == (
        "ordinal 0 waits in all_reduce 3 (collective 3) at b.py:3 for ordinal 1, for 10.0 s"
    )
    assert second.startswith(
        "ordinal 1 is at a.py:1, it sleeps; it waits for no other process; the last that"
    )


def test_what_others_have_seen_counts_for_one_that_died():
    pairs = [collective(n, [[0, 1]]) for n in (1, 2, 3)]
    waiting = snapshot(
        0, inside=INSIDE, collectives=pairs, launched={"all": 3, "with": {"1": 3}}, seen={"1": 2}
    )
    dead = snapshot(1, heard=True, launched={"all": 0, "with": {}})
    made = report(waiting, dead)
    (wait,) = flight_report.waits(made)
    assert wait.number == 3
    text = flight_report.text(made)
    assert "the last that others saw it launch is all_reduce 2 (collective 2) at b.py:2" in text


def test_who_waits_on_the_host_and_a_circle():
    waiting = {"what": "rendezvous 'a'", "missing": [1], "seconds": 4.0}
    other = {"what": "rendezvous 'b'", "missing": [0], "seconds": 3.0}
    made = report(snapshot(0, waiting=waiting), snapshot(1, waiting=other))
    assert [(w.who, w.whom, w.what, w.line) for w in flight_report.waits(made)] == [
        (0, (1,), "rendezvous 'a'", "a.py:0"),
        (1, (0,), "rendezvous 'b'", "a.py:1"),
    ]
    assert flight_report.culprits(made) == []


def test_who_writes_is_waited_for_by_who_meets():
    """Also where a thread does it; without one that writes, who has not come is."""
    meets = {"what": "the checkpoint of step 4", "seconds": 6.0}
    writes = {"what": "the checkpoint of step 4", "seconds": 7.0}
    made = report(snapshot(0, 3, meets=[meets]), snapshot(1, 3, writes=[writes]), snapshot(2, 3))
    (wait,) = flight_report.waits(made)
    assert wait == (0, (1,), "the checkpoint of step 4", 0, "a.py:0", 6.0)
    assert flight_report.culprits(made) == [1]
    text = flight_report.text(made)
    assert "ordinal 1 is at a.py:1, and writes the checkpoint of step 4, for 7.0 s; it" in text
    assert "  meets: the checkpoint of step 4, for 6.0 s" in text
    (wait,) = flight_report.waits(report(snapshot(0, 2, meets=[meets]), snapshot(1, 2)))
    assert wait.whom == (1,)
    both = snapshot(0, 2, meets=[meets]), snapshot(1, 2, meets=[meets])
    assert flight_report.waits(report(*both)) == []


def test_what_programs_over_a_mesh_do_between_devices_is_shown():
    row = {"kind": "all-reduce", "count": 2, "bytes": 8, "groups": "{{0,1}}", "line": "a.py:7"}
    text = flight_report.text(report(snapshot(0, 1, programs={"step_1": [row]})))
    assert "  between devices, in each run of step_1:\n" in text
    assert "    2 x all-reduce, 8 bytes, groups {{0,1}}, for a.py:7\n" in text


def test_what_was_kept_of_processes_that_were_aborted_becomes_a_report(monkeypatch, tmp_path):
    monkeypatch.setenv("XLA_FLIGHT_DIR", str(tmp_path))
    for ordinal in (0, 1):
        flight_files.keep("j", snapshot(ordinal))
    page = flight_files.conclude("j", "end", "the coordinator is gone")
    made = flight_files.merged(page.parent)
    assert flight_report.reasons(made) == ["the coordinator is gone"]
    assert [one["heard"] for one in made["processes"].values()] == [True, True]
    assert page.read_text() == flight_report.text(made)
    assert not (tmp_path / "j" / flight_files.RUNNING).exists()
    flight_files.keep("j", snapshot(0))
    assert flight_files.conclude("j", "end", "again") is None
    assert flight_report.reasons(flight_files.merged(page.parent)) == ["the coordinator is gone"]


def test_what_processes_had_shown_stays_until_the_page_is_there(tmp_path, monkeypatch):
    """Who waits for a page waits as long as there are such files."""
    monkeypatch.setenv("XLA_FLIGHT_DIR", str(tmp_path))
    flight_files.keep("j", snapshot(0))
    text, seen = flight_report.text, []

    def writes_page(merged):
        seen.extend((tmp_path / "j" / flight_files.RUNNING).glob("*.json"))
        return text(merged)

    monkeypatch.setattr(flight_report, "text", writes_page)
    assert flight_files.conclude("j", "end", "the coordinator is gone").exists()
    assert [path.name for path in seen] == ["0.json"] and not seen[0].exists()


def test_a_failure_is_the_culprit_and_its_words_the_reason():
    made = report(
        snapshot(
            0, reason="ends because of 1", waiting={"what": "x", "missing": [1], "seconds": 1.0}
        ),
        snapshot(1, reason="ValueError: no", error="ValueError: no\nmore"),
    )
    assert flight_report.culprits(made) == [1]
    assert flight_report.reasons(made) == ["ValueError: no"]
    assert "ordinal 1 failed at a.py:1: ValueError: no; it launched no collective" in list(
        flight_report.headline(made)
    )


@pytest.mark.parametrize(
    ("times", "slow"),
    [
        ({0: (0.01, 0.1), 1: (0.08, 0.1), 2: (0.01, 0.1)}, [1]),
        ({0: (0.010, 0.1), 1: (0.019, 0.1)}, []),  # twice as long, and nothing to a step
        ({0: (0.08, 0.1), 1: (0.08, 0.1)}, []),
        ({0: (0.08, 0.1)}, []),
    ],
)
def test_stragglers(times, slow):
    lines = list(flight_report.straggler_lines(times))
    assert [int(line.split()[1]) for line in lines] == slow


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLIGHT_DIR", str(tmp_path / "flight"))
    return tmp_path / "flight"


def test_processes_that_write_at_once_make_one_report(folder):
    threads = [
        threading.Thread(target=flight_files.write, args=("j", "o", snapshot(n, 8), {}))
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (place,) = flight_files.occasions()
    assert place == folder / "j" / "o"
    assert sorted(flight_files.merged(place)["processes"]) == list("01234567")
    assert (place / flight_files.PAGE).read_text().count(" on here, ") == 8
    assert oct(folder.stat().st_mode)[-3:] == "700"


def test_what_a_process_says_itself_counts_more_than_what_others_heard(folder):
    known = {0: snapshot(0, place="old"), 1: snapshot(1, place="old"), 2: snapshot(2, 3, time=1.0)}
    flight_files.write("j", "o", snapshot(0, 3, place="own"), known)
    flight_files.write("j", "o", snapshot(1, 3, place="own"), known)
    found = flight_files.merged(folder / "j" / "o")["processes"]
    assert [found[n]["place"] for n in "012"] == ["own", "own", "a.py:2"]
    assert [found[n]["heard"] for n in "012"] == [False, False, True]


def test_what_is_kept_of_a_process_that_runs_goes_when_it_ends_well(folder):
    for ordinal in (0, 1):
        flight_files.keep("j", snapshot(ordinal))
    (place,) = flight_files.occasions()
    assert all(one["heard"] for one in flight_files.merged(place)["processes"].values())
    flight_files.forget("j", 0)
    assert list(flight_files.merged(place)["processes"]) == ["1"]
    flight_files.forget("j", 1)
    assert not (folder / "j").exists()


def test_what_a_killed_process_has_left_is_no_report_beside_that_of_the_end(folder):
    """It said of those who had reported that nobody had ever heard of them."""
    for ordinal in (0, 1):
        flight_files.keep("j", snapshot(ordinal))
    flight_files.write("j", flight_files.END, snapshot(0), {1: snapshot(1)})
    flight_files.forget("j", 0)
    assert [place.name for place in flight_files.occasions()] == [flight_files.END]


def test_the_folders_of_old_jobs_go(folder):
    for number in range(flight_files.KEPT_JOBS + 3):
        flight_files.write(f"job {number}", "end", snapshot(0, 1), {})
        os.utime(folder / f"job {number}", (number, number))
    flight_files.prune(folder)
    left = {path.name for path in folder.iterdir()}
    assert left == {f"job {n}" for n in range(3, flight_files.KEPT_JOBS + 3)}
    assert (
        json.loads((folder / "job 5" / "end" / flight_files.MERGED).read_text())["job"] == "job 5"
    )


def test_a_folder_of_another_user_is_refused(folder, monkeypatch):
    folder.mkdir()
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    with pytest.raises(PermissionError, match="belongs to another user; set XLA_FLIGHT_DIR"):
        flight_files.write("j", "o", snapshot(0), {})
