"""The persistent cache signed with the user's key, and kept below a size by several processes."""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
import time

import pytest

from xla_core.compilation import disk_cache
from xla_core.compilation.cache_secret import CacheKeyFileError
from xla_core.compilation.disk_cache import CacheKey, CacheRefusedError, PersistentCache
from xla_core.support import counters

PAYLOAD = bytes(range(256)) * 20


def key(name):
    return CacheKey((("program", str(name).encode()),))


@pytest.fixture
def signed(tmp_path, monkeypatch):
    """A function that makes a cache whose entries are signed with a key of this content (None: not signed)."""

    def make(secret, path=tmp_path / "cache", **options):
        if secret is None:
            monkeypatch.delenv("XLA_PERSISTENT_CACHE_KEY_FILE", raising=False)
        else:
            file = tmp_path / "key"
            file.write_bytes(secret)
            file.chmod(0o600)
            monkeypatch.setenv("XLA_PERSISTENT_CACHE_KEY_FILE", str(file))
        return PersistentCache(path, **options)

    return make


MINE, THEIRS = b"m" * 32, b"t" * 32


def test_what_is_signed_is_found_with_the_key_alone(signed, caplog):
    signed(MINE).put(key(1), PAYLOAD)
    assert signed(MINE).get(key(1)) == PAYLOAD
    assert signed(MINE).entry(key(1).file_name)[1] == PAYLOAD
    for other, fault in ((THEIRS, "signed with another key"), (None, "signed, and XLA_PERSISTENT")):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert signed(other).get(key(1)) is None
        assert fault in caplog.text
        assert signed(other).entry(key(1).file_name) is None
        assert fault in disk_cache.entries(signed(other).path)[0].fault
    assert disk_cache.entries(signed(MINE).path)[0].fault is None


def test_what_is_not_signed_is_a_miss_and_replaced(signed, caplog):
    signed(None).put(key(1), PAYLOAD)
    cache = signed(MINE)
    assert cache.get(key(1)) is None and "not signed" in caplog.text
    assert cache.put(key(1), PAYLOAD) and cache.get(key(1)) == PAYLOAD


def test_no_byte_of_a_signed_entry_can_be_changed(signed):
    cache = signed(MINE)
    cache.put(key(1), b"payload")
    file = cache.path / key(1).file_name
    whole = file.read_bytes()
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 0x80
        file.write_bytes(damaged)
        assert cache.get(key(1)) is None, position
    # a checksum that fits does not help
    file.write_bytes(disk_cache._encode(key(1), b"evil", None))
    assert cache.get(key(1)) is None
    file.write_bytes(disk_cache._encode(key(1), b"evil", THEIRS))
    assert cache.get(key(1)) is None
    # nor does another entry of the same key's
    file.write_bytes(disk_cache._encode(key(2), b"evil", MINE))
    assert cache.get(key(1)) is None


def test_a_folder_that_others_write_to_is_no_danger_to_signed_entries(signed, tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(CacheRefusedError, match="XLA_PERSISTENT_CACHE_KEY_FILE"):
        signed(None, shared)
    cache = signed(MINE, shared)
    assert cache.put(key(1), PAYLOAD) and cache.get(key(1)) == PAYLOAD


def test_a_key_that_is_none_is_refused(signed, tmp_path):
    with pytest.raises(CacheKeyFileError, match="it has 5 bytes"):
        signed(b"short")
    with pytest.raises(CacheKeyFileError, match="it has 0 bytes"):
        signed(b"")
    signed(MINE)
    (tmp_path / "key").chmod(0o644)
    with pytest.raises(CacheKeyFileError, match="others can access it"):
        PersistentCache(tmp_path / "cache")
    (tmp_path / "key").unlink()
    with pytest.raises(CacheKeyFileError, match="No such file"):
        PersistentCache(tmp_path / "cache")


# --- size ---


MEGABYTE = 1 << 20


@pytest.fixture
def bounded(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_PERSISTENT_CACHE_MAX_MB", "2")
    return lambda: PersistentCache(tmp_path / "cache")


def total(cache):
    return sum(p.stat().st_size for p in cache.path.glob("*" + disk_cache.SUFFIX))


def old(cache, name, age):
    """As if an entry had been used so many seconds ago."""
    os.utime(cache.path / key(name).file_name, (time.time() - age,) * 2)


def test_what_was_not_used_for_longest_is_removed(bounded):
    cache, part = bounded(), os.urandom(MEGABYTE // 2 - 1000)
    before = counters.all_counters().get("PersistentCachePruned", 0)
    for name in range(4):
        assert cache.put(key(name), part)
        old(cache, name, 100 - name)
    assert cache.get(key(0)) == part  # now the last one that was used
    assert cache.put(key(4), part)
    assert [cache.get(key(name)) is not None for name in range(5)] == [
        True,
        False,
        False,
        True,
        True,
    ]
    assert total(cache) <= 2 * MEGABYTE
    assert counters.all_counters()["PersistentCachePruned"] - before == 2


def test_a_program_larger_than_the_bound_is_not_stored(bounded, caplog):
    cache = bounded()
    cache.put(key(0), b"small")
    assert cache.put(key(1), os.urandom(3 * MEGABYTE)) is False
    assert cache.get(key(0)) == b"small" and cache.get(key(1)) is None
    assert "XLA_PERSISTENT_CACHE_MAX_MB" in caplog.text


def test_without_a_bound_nothing_is_removed(tmp_path, monkeypatch):
    monkeypatch.delenv("XLA_PERSISTENT_CACHE_MAX_MB", raising=False)
    cache = PersistentCache(tmp_path / "cache")
    for name in range(6):
        cache.put(key(name), os.urandom(MEGABYTE // 2))
    assert all(cache.get(key(name)) for name in range(6))


def works(path, seed):
    """A process that reads and writes entries which say whose they are."""
    cache, dice = PersistentCache(path), random.Random(seed)
    for _ in range(60):
        name = dice.randrange(40)
        found = cache.get(key(name))
        assert found is None or found[:8] == name.to_bytes(8, "little")
        if found is None:
            cache.put(
                key(name), name.to_bytes(8, "little") + dice.randbytes(dice.randrange(200_000))
            )


# if jax has run something in this process; the forks use the folder alone
@pytest.mark.filterwarnings("ignore:os.fork.. was called:RuntimeWarning")
def test_eight_processes_keep_one_folder_below_its_bound(bounded, caplog):
    cache = bounded()
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=works, args=(cache.path, seed)) for seed in range(8)]
    for process in processes:
        process.start()
    largest = 0
    while any(process.is_alive() for process in processes):
        for process in processes:
            process.join(0.02)
        try:
            largest = max(largest, total(cache))
        except FileNotFoundError:  # removed while it was looked at
            continue
    assert [process.exitcode for process in processes] == [0] * 8
    # each may write a sixteenth before it looks, and one program beyond
    assert 0 < largest <= 2 * MEGABYTE * (1 + 8 / 16) + 8 * 200_000
    kept = [name for name in range(40) if cache.get(key(name)) is not None]
    assert kept and not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_damaged_entries_crash_nothing_and_change_no_result(run_tool, tmp_path):
    """The tool that damages a thousand: here each of 25 once. It fails if undamaged ones are not used."""
    said = run_tool("cache_damage.py", "--entries", 25, "--folder", tmp_path)
    assert "0 crashes, 0 processes with wrong results, 0 of the entries" in said
