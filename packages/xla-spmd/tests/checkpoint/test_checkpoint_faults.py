"""Checkpoints that were damaged, or could not be written: the one before is used, and nothing else."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import resource

import pytest
import torch

from torch_xla.experimental.distributed_checkpoint import CheckpointManager
from xla_spmd.checkpoint import storage
from xla_spmd.checkpoint.manager import DamagedCheckpointError


def manager(path, **options):
    return CheckpointManager(str(path), 1, chkpt_on_preemption=False, **options)


def state(value=0.0):
    return {"t": torch.full((64, 8), value).to("xla"), "step": value}


def saved(path, *steps, **options):
    saver = manager(path, **options)
    for step in steps:
        assert saver.save(step, state(float(step)))
    return saver


def truncated(file):
    file.write_bytes(file.read_bytes()[:-7])


def flipped(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


def absent(file):
    file.unlink()


@pytest.mark.parametrize("harm", [truncated, flipped, absent])
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", storage.RECORD])
def test_a_damaged_checkpoint_is_refused_and_the_one_before_is_used(tmp_path, caplog, harm, name):
    saved(tmp_path, 1, 2)
    harm(tmp_path / "2" / name)
    saver = manager(tmp_path)
    found = state()
    with caplog.at_level(logging.WARNING):
        assert saver.restore_latest(found) == 1
    assert (found["t"].cpu() == 1).all() and found["step"] == 1.0
    if name == storage.RECORD:  # it is no complete checkpoint then
        assert saver.all_steps() == [1]
        return
    assert str(tmp_path / "2" / name) in caplog.text
    with pytest.raises(DamagedCheckpointError, match="of step 2 below"):
        saver.restore(2, found)
    assert (found["t"].cpu() == 1).all()


def test_where_all_are_damaged_nothing_starts_anew_silently(tmp_path):
    assert manager(tmp_path).restore_latest(state()) is None
    saved(tmp_path, 1)
    flipped(tmp_path / "1" / "__0_0.distcp")
    with pytest.raises(DamagedCheckpointError, match=r"no checkpoint below .* SHA-256"):
        manager(tmp_path).restore_latest(state())


def test_what_a_dead_process_left_is_removed_and_nothing_else(tmp_path, caplog):
    saver = saved(tmp_path, 1)
    left, held, foreign = tmp_path / "2", tmp_path / "3", tmp_path / "notes"
    for folder in (left, held, foreign):
        folder.mkdir()
        (folder / "file").write_text("x")
    (left / storage.MARK).touch()
    (tmp_path / "4-1").mkdir()
    with (held / storage.MARK).open("wb") as alive:
        fcntl.flock(alive, fcntl.LOCK_EX)
        saver = manager(tmp_path)
        # the empty one is the rest of one that was being removed
        assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "3", "notes"]
        assert "removed these incomplete checkpoints" in caplog.text and "'2'" in caplog.text
        saver.save(3, state(3.0))  # beside the one that somebody writes
    assert (held / "file").exists() and saver.restore_latest(state()) == 3


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_leaves_the_earlier_checkpoints(tmp_path, limited_files, asynchronous):
    saver = saved(tmp_path, 1, max_to_keep=1)
    large = {"t": torch.ones(1 << 18).to("xla")}
    with (
        limited_files(1 << 18),
        pytest.raises(OSError, match="of step 2 could not be written to") as failure,
    ):
        if asynchronous:
            saver.save_async(2, large)
            saver.join()
        else:
            saver.save(2, large)
    assert "of steps [1], have not changed" in str(failure.value) and failure.value.errno == 27
    assert [p.name for p in tmp_path.iterdir()] == ["1"]
    found = state()
    assert manager(tmp_path).restore_latest(found) == 1 and found["step"] == 1.0
    saver.save(2, state(2.0))
    assert saver.all_steps() == [2]


@pytest.fixture
def limited_files():
    """No file may become larger, as on a disk that is full: writing fails with EFBIG."""

    @contextlib.contextmanager
    def limit(size):
        former = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, former[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, former)

    return limit


def test_a_record_says_what_the_files_are(tmp_path):
    saved(tmp_path, 1)
    fields = json.loads((tmp_path / "1" / storage.RECORD).read_text())
    assert sorted(fields["files"]) == [".metadata", "__0_0.distcp"]
    assert sorted(p.name for p in (tmp_path / "1").iterdir()) == [
        ".manager_metadata",
        ".metadata",
        "__0_0.distcp",
    ]
    size, _ = fields["files"]["__0_0.distcp"]
    assert size == (tmp_path / "1" / "__0_0.distcp").stat().st_size


def test_kills_at_any_moment_of_saving(run_tool, tmp_path):
    """The tool that does it two hundred times: here a few of each kind."""
    lines = run_tool("checkpoint_kills.py", "--kills", 9, "--folder", tmp_path).splitlines()
    assert [line.partition(",")[0] for line in lines] == [
        "whole: 3 kills", "async: 3 kills", "sharded: 3 kills",
    ]  # fmt: skip
