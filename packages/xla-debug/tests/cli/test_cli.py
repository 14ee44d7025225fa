"""``xla-debug cache`` and ``xla-debug doctor``, as somebody who types them sees them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time

import pytest

from xla_core.support import flags
from xla_debug import cli
from xla_debug.cli import doctor

FILL = """
import torch, torch_xla
x = torch.ones(5).to("xla")
for n in (2, 3, 4):
    (x ** n).tolist()
"""


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A cache with three programs, the last one used first."""
    folder = tmp_path_factory.mktemp("filled") / "cache"
    environment = {**os.environ, "PJRT_DEVICE": "CPU", "XLA_PERSISTENT_CACHE_PATH": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", FILL], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def cache(filled, tmp_path):
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    for age, path in enumerate(sorted(p for p in filled.iterdir() if p.is_file())):
        copy = folder / path.name
        copy.write_bytes(path.read_bytes())
        os.utime(copy, (time.time() - age * 86_400 - 60,) * 2)
    return folder


def programs(folder, capsys):
    assert cli.main(["cache", "stats", str(folder)]) == 0
    out = capsys.readouterr().out
    return int(re.search(r"^(\d+) programs?, \d+\.\d\d(B|KB|MB)\n0 damaged files\n", out, re.M)[1])


def test_programs_are_listed_and_summed_up(cache, capsys):
    assert cli.main(["cache", "ls", str(cache)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.match(r" *program .*operations .*size .*used .*device .*file", lines[0])
    rows = [line for line in lines if "step_" in line]
    assert len(rows) == 3 == programs(cache, capsys)
    ages = [re.search(r"(\d+ (?:minute|day)s?) ago", row)[1] for row in rows]
    assert ages == ["1 minute", "1 day", "2 days"]  # the newest first
    assert all(re.search(r"step_[0-9a-f]{12}", row) and "cpu" in row.lower() for row in rows)


def test_old_programs_are_removed(cache, capsys):
    assert cli.main(["cache", "prune", "--days", "1.5", "--dry-run", str(cache)]) == 0
    assert "would be removed; 2 kept" in capsys.readouterr().out
    assert programs(cache, capsys) == 3
    assert cli.main(["cache", "prune", "--days", "1.5", str(cache)]) == 0
    assert re.match(r"1 file, .* removed; 2 kept", capsys.readouterr().out)
    assert programs(cache, capsys) == 2
    assert cli.main(["cache", "prune", "--max-size", "1KB", str(cache)]) == 0
    assert programs(cache, capsys) == 0


def test_pruning_wants_to_know_what_to_keep(cache):
    with pytest.raises(SystemExit, match=r"--days N, --max-size SIZE, or both"):
        cli.main(["cache", "prune", str(cache)])


def test_damaged_files_are_found_and_removed(cache, capsys):
    assert cli.main(["cache", "verify", str(cache)]) == 0
    assert capsys.readouterr().out == "3 good, 0 damaged\n"
    victim = sorted(p for p in cache.iterdir() if p.is_file())[0]
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    assert cli.main(["cache", "verify", str(cache)]) == 1
    out = capsys.readouterr().out
    assert str(victim) in out and out.endswith("2 good, 1 damaged\n")
    assert cli.main(["cache", "verify", "--delete", str(cache)]) == 0
    assert not victim.exists() and programs(cache, capsys) == 2


def test_a_folder_that_is_none(tmp_path):
    with pytest.raises(SystemExit, match="is not a folder; name the one in"):
        cli.main(["cache", "ls", str(tmp_path / "nowhere")])


@pytest.mark.parametrize(("text", "size"), [("12", 12), ("2KB", 2048), ("1.5mb", 3 << 19)])
def test_sizes(text, size):
    chosen = cli.parser().parse_args(["cache", "prune", "--max-size", text, "somewhere"])
    assert chosen.max_size == size


# -- doctor ---------------------------------------------------------------------------------------


def found(name):
    return [c for c in doctor.checks(with_device=False) if c.name == name]


def test_the_doctor_finds_the_installation_well(capsys):
    status = cli.main(["doctor"])
    out = capsys.readouterr().out
    assert re.search(r"^ok  Python: 3\.\d+", out, re.M)
    assert re.search(r"^ok  packages of this project: xla-core [\d.]+, xla-pjrt-cpu", out, re.M)
    assert re.search(r"^ok  devices installed: .*CPU", out, re.M)
    assert re.search(r"^ok  device: CPU: ", out, re.M)
    assert re.search(r"^ok  a small program: gives 12\.0$", out, re.M)
    assert status == int("FIX " in out)


def test_the_doctor_reads_the_environment(monkeypatch):
    monkeypatch.setenv("XLA_SAVE_TENSORS_FMT", "picture")
    (check,) = found("XLA_SAVE_TENSORS_FMT")
    assert check.found == "'picture'" and "expected one of text, dot, hlo, stablehlo" in check.mend
    monkeypatch.setenv("XLA_SAVE_TENSORS_FMT", "dot")
    (check,) = found("XLA_SAVE_TENSORS_FMT")
    assert not check.mend and flags.FLAGS["XLA_SAVE_TENSORS_FMT"].meaning in check.found


def test_the_doctor_finds_misspelt_variables(monkeypatch):
    monkeypatch.setenv("XLA_METRIC_FILE", "m.txt")
    monkeypatch.setenv("XLA_SOMETHING_ELSE", "1")
    (check,) = found("XLA_METRIC_FILE")
    assert check.mend == "did you mean XLA_METRICS_FILE?"
    assert not found("XLA_SOMETHING_ELSE")


def test_the_doctor_looks_at_the_cache(monkeypatch, tmp_path):
    monkeypatch.delenv("XLA_PERSISTENT_CACHE_PATH", raising=False)
    (check,) = found("persistent cache")
    assert "not in use" in check.found
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setenv("XLA_PERSISTENT_CACHE_PATH", str(shared))
    (check,) = found("persistent cache")
    assert "XLA_PERSISTENT_CACHE_ALLOW_SHARED" in check.mend
    shared.chmod(0o700)
    (check,) = found("persistent cache")
    assert not check.mend and "GB free" in check.found


def test_the_doctor_says_how_to_mend(monkeypatch, capsys):
    real = doctor.metadata.version

    def version(name):
        if name == "xla-debug":
            return "9.9"
        if name == "numpy":
            raise doctor.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(doctor.metadata, "version", version)
    assert cli.main(["doctor", "--no-device"]) == 1
    out = capsys.readouterr().out
    assert "FIX packages of this project: " in out
    assert "install one release of all: pip install -U xla-core" in out
    assert "FIX numpy: not installed\n      pip install numpy\n" in out
    assert "to repair" in out.splitlines()[-1]
