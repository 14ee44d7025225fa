"""Programs that the script's last run used are loaded ahead, and only those that are asked for."""

from __future__ import annotations

import json

import pytest

SCRIPT = """
import json, sys
import torch, torch_xla
from xla_core.support import counters

torch_xla.device()
x = torch.ones(4).to("xla")
for number in NUMBERS:
    print((x ** number).sum().item())
names = ("PersistentCachePrefetch", "PersistentCacheHit", "UncachedCompile")
print(json.dumps([counters.all_counters().get(name, 0) for name in names]))
"""


@pytest.fixture
def counts(run_python, tmp_path):
    """Runs the script with the cache and gives (prefetched, hits, compilations)."""

    def run(*numbers, **environment):
        script = SCRIPT.replace("NUMBERS", repr(numbers))
        environment.setdefault("XLA_PERSISTENT_CACHE_PATH", str(tmp_path / "cache"))
        return tuple(json.loads(run_python(script, **environment).splitlines()[-1]))

    return run


def test_the_second_run_finds_its_programs_loaded(counts):
    assert counts(2, 3) == (0, 0, 2)
    assert counts(2, 3) == (2, 2, 0)


def test_another_program_ends_the_guessing(counts):
    assert counts(2, 3, 4) == (0, 0, 3)
    # the first is not the one that was foreseen: the others are loaded when asked for
    assert counts(5, 2, 3) == (0, 2, 1)
    assert counts(5, 2, 3) == (3, 3, 0)  # and the note is of the last run


def test_a_shorter_run_keeps_the_note(counts):
    assert counts(2, 3) == (0, 0, 2)
    assert counts(2) == (1, 1, 0)
    assert counts(2, 3) == (2, 2, 0)


def test_it_can_be_turned_off(counts):
    counts(2)
    assert counts(2, XLA_CACHE_PREFETCH="0") == (0, 1, 0)


@pytest.mark.parametrize(
    "content", ["", "{}", "[[1, 2]]", '[["../../etc/passwd", "x", [0], null]]']
)
def test_a_note_that_makes_no_sense_is_nothing(counts, tmp_path, content):
    counts(2)
    (note,) = (tmp_path / "cache" / "runs").iterdir()
    note.write_text(content)
    assert counts(2) == (0, 1, 0)
    assert counts(2) == (1, 1, 0)


def test_a_torn_program_is_compiled_again(counts, tmp_path):
    counts(2)
    (file,) = (tmp_path / "cache").glob("*.xlaexe")
    file.write_bytes(file.read_bytes()[:-20])
    assert counts(2) == (0, 0, 1)
    assert counts(2) == (1, 1, 0)


def test_nothing_is_written_to_a_read_only_cache(counts, tmp_path):
    counts(2)
    (note,) = (tmp_path / "cache" / "runs").iterdir()
    before = note.read_bytes()
    assert counts(3, 2, XLA_PERSISTENT_CACHE_READ_ONLY="1")[0] == 0
    assert note.read_bytes() == before
    assert counts(2, XLA_PERSISTENT_CACHE_READ_ONLY="1") == (1, 1, 0)


def test_other_compiler_flags_leave_the_stored_programs_alone(counts):
    assert counts(2) == (0, 0, 1)
    assert counts(2, XLA_FLAGS="--xla_cpu_enable_fast_math=false") == (0, 0, 1)
