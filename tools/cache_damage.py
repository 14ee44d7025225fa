"""Damages every entry of a persistent cache in many ways, and looks what processes make of that.

``python tools/cache_damage.py --entries 1000``: programs are compiled into a cache; then round after round all
entries are damaged (cut off, bits flipped, exchanged for another program's, replaced by something foreign or by the
form of another version), and a new process runs all programs and compares their results. The status is 1 when a
process crashed, or a result was not what it was.
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Final

os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ["CPU_NUM_DEVICES"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"

import torch

import torch_xla  # noqa: F401 - once, before the forks
from xla_core.extension_api import programs  # noqa: F401 - likewise: all that compiles
from xla_core.support import counters
from xla_core.testing.internals import CACHE_ENTRY_MAGIC, CACHE_ENTRY_SUFFIX

PROGRAMS: Final = 25
LIMIT: Final = 300


def result(number: int) -> list[float]:
    """What program ``number`` computes: another one for each number."""
    x = torch.arange(8.0).to("xla") + 0.5
    for turn in range(4):
        x = torch.sin(x) * 2 if number >> turn & 1 else torch.cos(x) + x
    y = x.sum() + number // 16
    found: list[float] = torch.stack([y, x.max()]).cpu().tolist()
    return found


def cut(content: bytes, dice: random.Random, _others: list[bytes]) -> bytes:
    """The beginning of an entry."""
    return content[: dice.randrange(len(content))]


def flipped(content: bytes, dice: random.Random, _others: list[bytes]) -> bytes:
    """One to eight bits of it are others."""
    changed = bytearray(content)
    for _ in range(dice.randrange(1, 9)):
        changed[dice.randrange(len(changed))] ^= 1 << dice.randrange(8)
    return bytes(changed)


def exchanged(content: bytes, dice: random.Random, others: list[bytes]) -> bytes:
    """Another program's entry, whole."""
    return dice.choice([other for other in others if other != content])


def foreign(_content: bytes, dice: random.Random, _others: list[bytes]) -> bytes:
    """Something else, of any size."""
    return dice.choice([b"", b"#!/bin/sh\n", dice.randbytes(dice.randrange(1, 100_000))])


def old(content: bytes, _dice: random.Random, _others: list[bytes]) -> bytes:
    """The form of another version."""
    magic = len(CACHE_ENTRY_MAGIC)
    return content[:magic] + b"\x00\x00" + content[magic + 2 :]


KINDS: Final[tuple[Callable[[bytes, random.Random, list[bytes]], bytes], ...]] = (
    cut, flipped, exchanged, foreign, old,
)  # fmt: skip


def in_a_process(work: Callable[[], str]) -> tuple[int, str]:
    """Run ``work`` in a forked process: how that ended (0: well), and what it returned."""
    receiving, sending = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(receiving)
        signal.alarm(LIMIT)
        status = 1
        try:
            os.write(sending, work().encode())
            status = 0
        except BaseException:
            traceback.print_exc()
        os._exit(status)
    os.close(sending)
    with os.fdopen(receiving, "rb") as pipe:
        said = pipe.read().decode()
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), said


def run_all() -> str:
    """The results of all programs, and how many of them came from the cache."""
    found = [result(number) for number in range(PROGRAMS)]
    return f"{found}|{counters.all_counters().get('PersistentCacheHit', 0)}"


def main() -> int:
    """Damage as many entries as asked, and say what was found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--entries", type=int, default=1000, help="to damage (%(default)s)")
    parser.add_argument("--folder", help="where to write; default: a temporary folder")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    dice, begun = random.Random(chosen.seed), time.monotonic()
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        cache = Path(folder) / "cache"
        os.environ["XLA_PERSISTENT_CACHE_PATH"] = str(cache)
        status, said = in_a_process(run_all)
        wanted = said.partition("|")[0]
        if status or not wanted:
            raise RuntimeError(f"the first process ended with status {status}")
        status, said = in_a_process(run_all)
        if int(said.rpartition("|")[2]) < PROGRAMS:
            raise RuntimeError(f"undamaged entries are not used: {said}")
        kept = {path: path.read_bytes() for path in cache.glob("*" + CACHE_ENTRY_SUFFIX)}
        crashes = wrong = damaged = loaded = 0
        kinds: collections.Counter[str] = collections.Counter()
        while damaged < chosen.entries:
            for path, content in kept.items():
                kind = KINDS[damaged % len(KINDS)]
                path.write_bytes(kind(content, dice, list(kept.values())))
                kinds[kind.__name__] += 1
                damaged += 1
            status, said = in_a_process(run_all)
            results, _, hits = said.partition("|")
            crashes += status != 0
            wrong += status == 0 and results != wanted
            loaded += int(hits or 0)
    sys.stdout.write(
        f"{damaged} damaged entries ({dict(kinds)}): {crashes} crashes, {wrong} processes with wrong results, "
        f"{loaded} of the entries were used, {time.monotonic() - begun:.0f} s\n"
    )
    return int(bool(crashes or wrong or loaded))


if __name__ == "__main__":
    sys.exit(main())
