"""The persistent cache: damaged files, several processes, killed writers, permissions."""

from __future__ import annotations

import hashlib
import logging
import os
import random
import signal
import stat
import subprocess
import sys
import textwrap
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from xla_core.compilation import disk_cache
from xla_core.compilation.disk_cache import CacheKey, CacheRefusedError, PersistentCache

KEY = CacheKey((("program", b"step" * 50), ("jaxlib", b"0.10.2"), ("empty", b"")), "step_1")
PAYLOAD = bytes(range(256)) * 20
ROOT = os.getuid() == 0


@pytest.fixture
def cache(tmp_path):
    return PersistentCache(tmp_path / "cache")


def entry(cache, key=KEY):
    return cache.path / key.file_name


def warnings_of(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_round_trip_and_overwrite(cache, caplog):
    assert cache.get(KEY) is None
    assert cache.put(KEY, PAYLOAD) and cache.get(KEY) == PAYLOAD
    assert cache.put(KEY, b"") and cache.get(KEY) == b""
    assert [p.name for p in cache.path.iterdir()] == [KEY.file_name]
    assert not warnings_of(caplog)


def test_directory_and_files_are_private(tmp_path):
    cache = PersistentCache(tmp_path / "a" / "b")
    cache.put(KEY, PAYLOAD)
    assert stat.S_IMODE(cache.path.stat().st_mode) == 0o700
    assert stat.S_IMODE(entry(cache).stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "other",
    [
        (("program", b"step" * 50), ("jaxlib", b"0.10.3"), ("empty", b"")),
        (("program", b"step" * 50), ("jaxlib", b"0.10.2")),
        (("jaxlib", b"0.10.2"), ("program", b"step" * 50), ("empty", b"")),
        (("program", b"step" * 50), ("jaxlib", b"0.10."), ("2empty", b"")),
        (("program", b"step" * 50), ("jaxlib2", b"0.10.2"), ("empty", b"")),
    ],
    ids=["value", "fewer", "order", "shifted", "name"],
)
def test_every_entry_counts(cache, other):
    cache.put(KEY, PAYLOAD)
    assert cache.get(CacheKey(other)) is None


@settings(deadline=None)
@given(st.lists(st.tuples(st.text(max_size=5), st.binary(max_size=9)), unique_by=lambda e: e[0]))
def test_encoding_is_unambiguous(entries):
    first = CacheKey(tuple(entries))
    moved = [(n, v) for n, v in entries if v] or [("x", b"")]
    second = CacheKey(tuple(moved))
    assert (first.encoded == second.encoded) == (first.entries == second.entries)


def test_two_entries_of_one_name_are_refused():
    with pytest.raises(ValueError, match="two entries of one name"):
        CacheKey((("a", b"1"), ("a", b"2")))


def test_equal_file_name_is_not_enough(cache, caplog):
    """A file that lies under the key's name but was written for another key is not used."""
    other = CacheKey((("program", b"another"),))
    cache.put(other, PAYLOAD)
    entry(cache, other).rename(entry(cache))
    assert cache.get(KEY) is None
    assert "the entry of another program" in warnings_of(caplog)[0]


def test_key_entries_are_logged(cache, caplog):
    with caplog.at_level(logging.DEBUG, logger="xla_core.compilation.disk_cache"):
        cache.get(KEY)
    lines = [r.getMessage() for r in caplog.records]
    assert len(lines) == 3
    assert "step_1" in lines[1] and "jaxlib: 6 bytes" in lines[1] and "0.10.2" in lines[1]


# --- damaged files ---


def test_torn_at_every_offset_is_a_miss_and_replaced(tmp_path):
    cache = PersistentCache(tmp_path / "cache")
    small = CacheKey((("program", b"p"),))
    cache.put(small, b"payload")
    whole = entry(cache, small).read_bytes()
    for size in range(len(whole)):
        entry(cache, small).write_bytes(whole[:size])
        assert cache.get(small) is None, size
    entry(cache, small).write_bytes(whole + b"x")
    assert cache.get(small) is None
    assert cache.put(small, b"payload") and cache.get(small) == b"payload"


def test_every_flipped_byte_is_noticed(tmp_path):
    cache = PersistentCache(tmp_path / "cache")
    small = CacheKey((("program", b"p"),))
    cache.put(small, b"payload")
    whole = entry(cache, small).read_bytes()
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 0x41
        entry(cache, small).write_bytes(damaged)
        assert cache.get(small) is None, position


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200, deadline=None
)
@given(content=st.binary(max_size=300), magic=st.booleans())
def test_foreign_content_is_a_miss(cache, content, magic):
    start = disk_cache._MAGIC if magic else b""
    entry(cache).write_bytes(start + content)
    assert cache.get(KEY) is None


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "empty"),
        (b"#!/bin/sh\n" * 20, "not a cache entry"),
        (b"XLA-CACHE\n\x01", "torn: only 11 bytes"),
        (None, "of format version 2, this is version 1"),
    ],
    ids=["empty", "foreign", "torn", "old format"],
)
def test_one_warning_says_what_is_wrong(cache, caplog, monkeypatch, content, fault):
    if content is None:
        monkeypatch.setattr(disk_cache, "_FORMAT_VERSION", 2)
        cache.put(KEY, PAYLOAD)
        monkeypatch.undo()
    else:
        entry(cache).write_bytes(content)
    for _ in range(3):
        assert cache.get(KEY) is None
    (text,) = warnings_of(caplog)
    assert fault in text and str(entry(cache)) in text and "replaced" in text


def test_an_entry_that_is_a_directory(cache, caplog):
    entry(cache).mkdir()
    assert cache.get(KEY) is None
    assert cache.put(KEY, PAYLOAD) is False
    assert len(warnings_of(caplog)) == 2


# --- read-only ---


def test_readonly_reads_and_never_writes(cache, caplog):
    cache.put(KEY, PAYLOAD)
    reader = PersistentCache(cache.path, readonly=True)
    assert reader.get(KEY) == PAYLOAD
    damaged = CacheKey((("program", b"damaged"),))
    entry(cache, damaged).write_bytes(b"junk")
    (cache.path / ".writing-old").touch()
    os.utime(cache.path / ".writing-old", (0, 0))
    before = sorted((p.name, p.stat().st_mtime_ns) for p in cache.path.iterdir())
    assert PersistentCache(cache.path, readonly=True).get(damaged) is None
    assert reader.put(damaged, PAYLOAD) is False
    assert sorted((p.name, p.stat().st_mtime_ns) for p in cache.path.iterdir()) == before
    (text,) = warnings_of(caplog)
    assert text.endswith("it is ignored")


def test_readonly_does_not_create_the_directory(tmp_path, caplog):
    cache = PersistentCache(tmp_path / "none", readonly=True)
    assert cache.get(KEY) is None
    assert not (tmp_path / "none").exists()
    assert len(warnings_of(caplog)) == 1


# --- a file system that fails ---


def test_directory_that_cannot_be_made(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    cache = PersistentCache(tmp_path / "file" / "cache")
    assert cache.get(KEY) is None and cache.put(KEY, PAYLOAD) is False
    assert "Training continues without it" in warnings_of(caplog)[0]
    cache = PersistentCache(tmp_path / "file")
    assert cache.get(KEY) is None and cache.put(KEY, PAYLOAD) is False


@pytest.mark.parametrize("step", ["mkstemp", "fsync", "replace"])
def test_full_disk_is_one_warning_and_leaves_nothing(cache, caplog, monkeypatch, step):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    owner = {"mkstemp": disk_cache.tempfile, "fsync": os, "replace": disk_cache.Path}
    with monkeypatch.context() as patch:
        patch.setattr(owner[step], step, full)
        assert not any(cache.put(KEY, PAYLOAD) for _ in range(3))
    assert list(cache.path.iterdir()) == []
    (text,) = warnings_of(caplog)
    assert "No space left" in text
    assert cache.put(KEY, PAYLOAD) and cache.get(KEY) == PAYLOAD


def test_directory_that_vanishes(cache, caplog):
    cache.path.rmdir()
    assert cache.get(KEY) is None and cache.put(KEY, PAYLOAD) is False
    assert len(warnings_of(caplog)) == 1


@pytest.mark.skipif(ROOT, reason="root may read and write everywhere")
def test_directory_without_permission(tmp_path, caplog):
    (tmp_path / "cache").mkdir(mode=0o000)
    cache = PersistentCache(tmp_path / "cache")
    assert cache.get(KEY) is None and cache.put(KEY, PAYLOAD) is False
    assert len(warnings_of(caplog)) == 1


# --- trust ---


@pytest.mark.parametrize("mode", [0o770, 0o777, 0o1777, 0o702])
def test_directory_that_others_can_write_to_is_refused(tmp_path, monkeypatch, mode):
    monkeypatch.delenv("XLA_PERSISTENT_CACHE_ALLOW_SHARED", raising=False)
    path = tmp_path / "cache"
    path.mkdir()
    path.chmod(mode)
    with pytest.raises(CacheRefusedError, match=f"mode {mode:04o}.*ALLOW_SHARED=1"):
        PersistentCache(path)
    with pytest.raises(CacheRefusedError):
        PersistentCache(path, readonly=True)
    assert PersistentCache(path, allow_shared=True).put(KEY, PAYLOAD)
    monkeypatch.setenv("XLA_PERSISTENT_CACHE_ALLOW_SHARED", "1")
    assert PersistentCache(path).get(KEY) == PAYLOAD


def test_directory_of_another_user_is_refused(tmp_path):
    status = tmp_path.stat()
    foreign = os.stat_result((*status[:4], os.getuid() + 1, *status[5:]))
    assert "belongs to user id" in disk_cache._why_not_private(foreign)
    (tmp_path / "cache").mkdir(mode=0o755)
    assert disk_cache._why_not_private((tmp_path / "cache").stat()) is None


# --- the process's cache ---


@pytest.fixture
def undecided(monkeypatch):
    monkeypatch.setattr(disk_cache._InUse, "decided", False)
    monkeypatch.setattr(disk_cache._InUse, "cache", None)


def test_environment_decides_unless_initialized(tmp_path, monkeypatch, undecided):
    monkeypatch.setenv("XLA_PERSISTENT_CACHE_PATH", str(tmp_path / "env"))
    monkeypatch.setenv("XLA_PERSISTENT_CACHE_READ_ONLY", "1")
    found = disk_cache.current()
    assert (found.path, found.readonly) == (tmp_path / "env", True)
    disk_cache.initialize(tmp_path / "code")
    assert (disk_cache.current().path, disk_cache.current().readonly) == (
        tmp_path / "code",
        False,
    )


def test_no_cache_without_a_path(monkeypatch, undecided):
    monkeypatch.delenv("XLA_PERSISTENT_CACHE_PATH", raising=False)
    assert disk_cache.current() is None


def test_refused_program_is_a_warning_that_names_it(caplog):
    disk_cache.warn_unusable(KEY, ValueError("other processor"))
    assert "step_1" in warnings_of(caplog)[0] and "other processor" in warnings_of(caplog)[0]


# --- several processes ---

WRITER = textwrap.dedent(
    """
    import hashlib, itertools, random, sys
    from xla_core.compilation.disk_cache import CacheKey, PersistentCache
    path, seed, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    cache, choice = PersistentCache(path), random.Random(seed)
    print("ready", flush=True)
    for _ in range(rounds) if rounds else itertools.count():
        name = str(choice.randrange(8))
        key = CacheKey((("program", name.encode()),))
        found = cache.get(key)
        # what is read is whole: it begins with the digest of the rest, and names its key
        if found is not None:
            assert hashlib.sha256(found[32:]).digest() == found[:32], "torn"
            assert found[32:33] == name.encode(), "foreign"
        body = name.encode() + choice.randbytes(choice.randrange(200_000))
        assert cache.put(key, hashlib.sha256(body).digest() + body)
    """
)


def start(path, seed, rounds):
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), str(seed), str(rounds)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def check(path):
    """Every entry is whole: none is a miss, none is foreign."""
    cache, found = PersistentCache(path), 0
    for name in range(8):
        key = CacheKey((("program", str(name).encode()),))
        payload = cache.get(key)
        assert (payload is not None) == (path / key.file_name).exists()
        if payload is not None:
            assert hashlib.sha256(payload[32:]).digest() == payload[:32]
            found += 1
    return found


def test_concurrent_writers_and_readers(tmp_path):
    writers = [start(tmp_path / "cache", seed, 60) for seed in range(4)]
    outcomes = [(w.communicate(timeout=120), w.returncode) for w in writers]
    assert [code for _, code in outcomes] == [0] * 4, outcomes
    assert not any("cache" in err for (_, err), _ in outcomes), outcomes
    assert check(tmp_path / "cache") == 8
    assert all(p.suffix == disk_cache.SUFFIX for p in (tmp_path / "cache").iterdir())


def test_killed_writers_leave_a_usable_cache(tmp_path, caplog):
    path, delay = tmp_path / "cache", random.Random(0)
    for seed in range(30):
        writer = start(path, seed, 0)
        assert writer.stdout.readline() == "ready\n", writer.stderr.read()
        time.sleep(delay.uniform(0.0, 0.03))
        writer.send_signal(signal.SIGKILL)
        _, errors = writer.communicate(timeout=60)
        assert writer.returncode == -signal.SIGKILL, errors
        check(path)
    assert check(path) > 0
    assert not warnings_of(caplog)


def test_what_killed_writers_left_is_removed_when_it_is_old(tmp_path):
    path = PersistentCache(tmp_path / "cache").path
    (path / ".writing-old").write_bytes(b"part")
    (path / ".writing-new").write_bytes(b"part")
    os.utime(path / ".writing-old", (time.time() - 7200,) * 2)
    PersistentCache(path)
    assert [p.name for p in path.iterdir()] == [".writing-new"]
