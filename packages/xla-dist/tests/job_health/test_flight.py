"""Each fault leaves one report of all processes that names the ordinal, the collective and both lines.

LIMIT is the time from a job's last step to the report. Measured on two busy cores: an exception and a kill
0.1 s, a process that is stopped 4 s, one that hangs in Python or in a collective 6 s, different programs 0.3 s.
"""

from __future__ import annotations

import inspect
import os
import re
import signal
import threading
import time
from concurrent import futures

import dist_vitals
import pytest
from dist_jobs import clean_environment

from xla_core.support import flight_files, flight_report
from xla_dist.job_health import flight_recorder, flight_snapshot
from xla_dist.testing import faults
from xla_spmd.checkpoint import preemption

LIMIT = 10.0
COLLECTIVE = "all_reduce sum of float32[4] over all 2 replicas (collective 13)"


def _line(text, function=dist_vitals.trains):
    """Where a function of dist_vitals has a line."""
    lines, first = inspect.getsourcelines(function)
    number = first + next(i for i, line in enumerate(lines) if text in line)
    return f"{dist_vitals.__file__}:{number} in {function.__name__}"


REDUCES = _line("all_reduce")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLIGHT_DIR", str(tmp_path / "flight"))
    return tmp_path / "flight"


def _reports(folder, occasion):
    places = [place for place in folder.glob(f"*/{occasion}") if place.name != "running"]
    return [flight_files.merged(place) for place in sorted(places) if (place / "job.json").exists()]


@pytest.mark.parametrize(
    ("kind", "culprit"),
    [
        (
            "raise",
            "ordinal 1 failed at {syncs}: torch_xla.sync(): InjectedFault: a fault on purpose",
        ),
        ("kill", "ordinal 1 says nothing; "),
        ("stop", "ordinal 1 says nothing; "),
        (
            "hang",
            "ordinal 1 is at {syncs}: torch_xla.sync(), it sleeps; it waits for no other process",
        ),
        ("collective", "ordinal 1 waits in rendezvous 'a fault on purpose' at {syncs}"),
        (
            "program",
            "  ordinal 1: all_reduce sum of float32[6007] over all 2 replicas at {syncs}, after",
        ),
    ],
)
def test_a_fault_leaves_a_report(launch, folder, kind, culprit):
    trains = dist_vitals.trains_behind  # else the first may hear of an error before it waits
    reduces, syncs = _line("all_reduce", trains), _line("torch_xla.sync", trains)
    job = launch(
        2, trains, 14,
        XLA_FLIGHT_DIR=str(folder), XLA_DIST_FAULT=f"{kind}:1:12", XLA_DIST_STEP_LIMIT_ENDS="1",
    )  # fmt: skip
    error = str(job.error())
    (report,) = _reports(folder, "end")
    page = flight_report.text(report)
    assert report["count"] == 2
    assert sorted(report["processes"]) == ["0", "1"]
    assert culprit.format(syncs=syncs) in page
    if kind == "program":  # whichever side has found the difference
        assert (
            f"  ordinal 0: all_reduce sum of float32[4] over all 2 replicas at {reduces}, after"
            in page
        )
    else:
        (wait,) = [wait for wait in flight_report.waits(report) if wait.who == 0]
        assert (wait.whom, wait.line) == ((1,), reduces)
        assert f"ordinal 0 waits in {COLLECTIVE} at {reduces} for ordinal 1" in page
        assert wait.seconds < LIMIT
    if kind in ("kill", "stop"):  # what the others knew of it
        assert report["processes"]["1"]["heard"]
        assert "(collective 12)" in page
    assert error.count(f"flight report: {folder}") == 1, error
    assert not list(folder.glob("*/running/0.json"))


def test_two_threads_that_end_a_process_name_one_report(folder, monkeypatch):
    """The main thread by its error, and the watchdog, which finds the cause while that error is written."""
    writes, may_write = threading.Event(), threading.Event()
    take = flight_snapshot.take

    def slowly(*arguments):
        writes.set()
        assert may_write.wait(60)
        return take(*arguments)

    monkeypatch.setattr(flight_snapshot, "take", slowly)
    recorder = flight_recorder.Recorder(None, 0, 1, lambda: None)
    of_the_error = flight_snapshot.Facts("an error")
    of_the_error.raised(ValueError("of its own"), own=True)
    with futures.ThreadPoolExecutor() as threads:
        main = threads.submit(recorder.dump, flight_recorder.END, of_the_error)
        assert writes.wait(60)
        watchdog = threads.submit(
            recorder.dump, flight_recorder.END, flight_snapshot.Facts("a cause")
        )
        assert not futures.wait([watchdog], 0.2).done  # else the process ends before it has spoken
        may_write.set()
        (page,) = {main.result(), watchdog.result()}
    assert "ValueError: of its own" in page.read_text()


def test_the_others_hear_between_the_look_and_the_writing(folder, monkeypatch):
    """Not earlier: the first to end breaks off what this process waits in. Not later: a disk may not answer."""
    done = []

    def noting(module, name):
        function = getattr(module, name)

        def notes(*arguments):
            done.append(name)
            return function(*arguments)

        monkeypatch.setattr(module, name, notes)

    noting(flight_snapshot, "take")
    noting(flight_files, "write")
    recorder = flight_recorder.Recorder(None, 0, 1, lambda: None)
    monkeypatch.setattr(flight_recorder._State, "recorder", recorder)
    line = flight_recorder.failed("a step that takes too long", tells=lambda: done.append("tells"))
    assert done == ["take", "tells", "write"]
    assert (
        line
        == f"\n{flight_recorder.MSG_REPORT.format(path=folder / recorder.name() / 'end' / 'job.txt')}"
    )
    monkeypatch.setattr(flight_recorder._State, "recorder", None)
    assert flight_recorder.failed("without a recorder", tells=lambda: done.append("tells")) == ""
    assert done[3:] == ["tells"]


@pytest.mark.parametrize("moment", [1, 2, 3, 4])
def test_a_launcher_names_the_report_whenever_it_is_written(folder, monkeypatch, moment):
    """Right after any of the launcher's looks at a file, which may have been one look too early."""
    recorder = flight_recorder.Recorder(None, 0, 1, lambda: None)
    facts = flight_snapshot.Facts()
    flight_files.keep(recorder.name(), flight_snapshot.take_brief(None, 0, 1, facts))
    looks, pages = [], []

    def looks_at(path):
        looks.append(path)
        there = path.exists()
        if len(looks) == moment:
            pages.append(flight_files.conclude(recorder.name(), flight_recorder.END, "killed"))
        return there

    monkeypatch.setattr(flight_recorder, "_changed_since", lambda path, _moment: looks_at(path))
    named = flight_recorder.report_of(os.getpid(), 0.0)
    assert named == f"\nflight report: {pages[0]}"


@pytest.mark.parametrize("kind", ["coordinator", "coordinator_stop"])
def test_a_lost_coordinator_leaves_a_report(start_hosts, folder, kind):
    """jaxlib aborts both processes at once; their witnesses write what each has shown last."""
    job = start_hosts(
        2, [0, 1], dist_vitals.trains, 400, 0.05,
        XLA_FLIGHT_DIR=str(folder), XLA_DIST_FAULT=f"{kind}:1:20",
    )  # fmt: skip
    for program in job:
        status, _, _ = program.join()
        assert status not in (0, None)
    assert_report_of_a_lost_coordinator(folder)


@pytest.mark.parametrize("how", [dist_vitals.launches, dist_vitals.launches_apart])
def test_a_lost_launcher_or_its_coordinator_leaves_a_report(start_program, folder, how):
    """The launcher is the coordinator, and is killed; or it has one, which is."""
    named = {"XLA_FLIGHT_DIR": str(folder), "XLA_DIST_FAULT": "coordinator:1:20"}
    launcher = start_program(clean_environment(2, **named), how, 400, 0.05)
    status, _, _ = launcher.join()
    assert status not in (0, None)
    assert_report_of_a_lost_coordinator(folder)


def assert_report_of_a_lost_coordinator(folder):
    """One report of both processes, within LIMIT, with the collective and both lines."""
    until = time.monotonic() + LIMIT
    while not (pages := [p for p in folder.glob("*/end/job.txt") if "2 of 2" in p.read_text()]):
        assert time.monotonic() < until, list(folder.glob("*/*/*"))
        time.sleep(0.05)
    (page,) = (path.read_text() for path in pages)
    assert "coordinator" in page.split("\n\n")[0], page
    report = flight_files.merged(pages[0].parent)
    seconds = pages[0].stat().st_mtime - min(one["time"] for one in report["processes"].values())
    assert seconds < LIMIT, seconds
    assert sorted(report["processes"]) == ["0", "1"]
    for ordinal, one in report["processes"].items():
        assert f"ordinal {ordinal}: process " in page
        assert dist_vitals.__file__ in one["place"]
        (last,) = {c["line"] for c in one["collectives"]}
        assert last == REDUCES
    assert f"all_reduce sum of float32[4] over all 2 replicas at {REDUCES}" in page
    while left := list(folder.glob("*/running/*.json")):  # they go once the page is there
        assert time.monotonic() < until, left
        time.sleep(0.05)


@pytest.mark.parametrize(("kind", "words"), [("full_disk", "No space left"), ("slow_disk", "")])
def test_a_disk_that_is_full_or_slow_leaves_a_report(launch, folder, tmp_path, kind, words):
    """Whoever waits for the checkpoint is at its line, and so is the one whose disk it is."""
    job = launch(
        2, dist_vitals.trains_and_saves, str(tmp_path), 40, XLA_FLIGHT_DIR=str(folder),
        XLA_DIST_FAULT=f"{kind}:1:20", XLA_DIST_STEP_LIMIT_ENDS="1",
    )  # fmt: skip
    error = str(job.error())
    (report,) = _reports(folder, "end")
    page = flight_report.text(report)
    saves = _line("saver.save", dist_vitals.trains_and_saves)
    assert sorted(report["processes"]) == ["0", "1"]
    assert words in error and words in page
    assert all(one["place"].startswith(saves) for one in report["processes"].values()), page
    if kind == "full_disk":
        assert "OSError: [Errno 28] the checkpoint of step" in page
        for ordinal in (0, 1):  # all of them are told
            assert f"ordinal {ordinal} failed at {saves}: " in page
        assert "No space left on device (in process 1)" in page
    else:
        (wait,) = flight_report.waits(report)
        assert (wait.who, wait.whom, wait.line) == (0, (1,), report["processes"]["0"]["place"])
        assert wait.what.startswith("the checkpoint of step ") and wait.seconds < LIMIT
        assert f"ordinal 1 is at {saves}" in page and f"and writes {wait.what}, for " in page
    assert "all_reduce sum of float32[4] over all 2 replicas at " in page


@pytest.mark.parametrize("function", [dist_vitals.trains, dist_vitals.trains_and_saves])
def test_a_hang_in_the_first_steps_leaves_a_report(launch, folder, tmp_path, function):
    """Before it is known how long a step takes; the second process sleeps before a collective, or a checkpoint."""
    saves = function is dist_vitals.trains_and_saves
    job = launch(
        2, function, *([str(tmp_path)] if saves else []), 14, XLA_FLIGHT_DIR=str(folder),
        XLA_DIST_FAULT="hang:1:3", XLA_DIST_WARN_AFTER="3",
    )  # fmt: skip
    report = _report_of_a_long_wait(folder)
    os.kill(job.launched.pids()[1], signal.SIGKILL)  # nothing else would end it
    job.error()
    line = _line("saver.save", function) if saves else REDUCES
    page = flight_report.text(report)
    (wait,) = flight_report.waits(report)
    assert (wait.who, wait.whom) == (0, (1,)) and wait.line.startswith(line), page
    assert wait.seconds < LIMIT
    if saves:
        assert wait.what == preemption.MEETING
    assert f"ordinal 1 is at {_line('torch_xla.sync', function)}" in page and "it sleeps" in page


def test_a_report_has_collectives_on_the_scripts_own_process_groups(launch, folder):
    """The first process waits in one that the second has left out; only PyTorch knows of it."""
    job = launch(
        2, dist_vitals.averages_on_the_host, 4, XLA_FLIGHT_DIR=str(folder), XLA_DIST_WARN_AFTER="3"
    )
    pids = job.launched.pids()
    reports, until = [], time.monotonic() + 60
    while not any(_calls(report) == [4, 3] for report in reports):
        assert time.monotonic() < until, list(map(flight_report.text, reports))
        if list(folder.glob("*/running/*")):  # they have begun, and answer
            os.kill(pids[0], signal.SIGUSR2)
        time.sleep(1)
        reports = _reports(folder, "asked-*")
    os.kill(pids[1], signal.SIGKILL)
    job.error()
    page = flight_report.text(next(report for report in reports if _calls(report) == [4, 3]))
    assert (
        "process group 0 default_pg of torch.distributed: ordinal 0 at call 4, all_reduce of Float[8]; "
        "ordinal 1 at call 3, all_reduce of Float[7]"
    ) in page
    assert "group 0 default_pg: 2. all_reduce of Float[6], " in page


def _calls(report):
    """The number of each process's last call."""
    return [one["calls"][-1]["number"] for one in report["processes"].values() if one["calls"]]


def _report_of_a_long_wait(folder):
    """That of both processes, in their own words."""
    until = time.monotonic() + 60
    while True:
        reports = _reports(folder, "long-wait-*")
        if reports and [one["heard"] for one in reports[0]["processes"].values()] == [False] * 2:
            return reports[0]
        assert time.monotonic() < until, list(folder.glob("*/*/*"))
        time.sleep(0.05)


def test_a_signal_asks_for_a_report_of_a_job_that_goes_on(launch, folder):
    job = launch(
        3, dist_vitals.trains_and_asks,
        XLA_FLIGHT_DIR=str(folder), XLA_DIST_FAULT="slow:2:1",
    )  # fmt: skip
    assert job.join() == [None] * 3
    (report,) = _reports(folder, "asked-*")
    page = flight_report.text(report)
    assert re.search(r"asked for at process \d+", page)
    assert sorted(report["processes"]) == ["0", "1", "2"]
    assert not any(one["heard"] for one in report["processes"].values())
    assert re.search(
        r"^ordinal 2 is slow: of a step of [\d.]+ ms its host works \d{3}\.", page, re.M
    )
    assert "ordinal 1 is slow" not in page
    kinds = {record[0] for record in report["processes"]["1"]["records"]}
    assert kinds >= {"launch", "compile", "collective", "fetch", "step"}
    assert not list(folder.glob("*/running"))


def test_faults_are_named():
    with pytest.raises(ValueError, match="there is no fault 'sleep': choose one of raise, kill"):
        faults.strike("sleep")
    for text in ("kill", "kill:1", "kill:1:0", "kill:a:1"):
        with pytest.raises(ValueError, match="XLA_DIST_FAULT is KIND:ORDINAL:STEP"):
            faults.Plan.of_text(text)
    assert faults.Plan.of_text("stop:3:20") == ("stop", 3, 20)
    with pytest.raises(faults.InjectedFault):
        faults.strike("raise")
