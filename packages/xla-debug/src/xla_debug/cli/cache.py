"""``xla-debug cache``: lists, checks and prunes a persistent compilation cache, without running its programs."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from xla_core.extension_api import programs
from xla_core.extension_api.programs import CacheEntry
from xla_core.support import counters

_DAY: Final = 86_400.0
_WIDTH: Final = 120  # if the output is not a terminal


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command's arguments."""
    cache = commands.add_parser("cache", help="look into a persistent compilation cache")
    actions = cache.add_subparsers(required=True, metavar="ACTION")
    for name, command, text in (
        ("ls", ls, "list its programs, the newest first"),
        ("stats", stats, "sum them up"),
        ("prune", prune, "remove old programs"),
        ("verify", verify, "check every file"),
    ):
        action = actions.add_parser(name, help=text)
        action.add_argument("path", type=Path, help="the cache's folder")
        action.set_defaults(command=command)
        if name == "prune":
            action.add_argument(
                "--days", type=float, help="keep what was used in the last DAYS days"
            )
            action.add_argument("--max-size", type=_size, help="keep at most this: 500MB, 2GB")
            action.add_argument(
                "--dry-run", action="store_true", help="only say what would be removed"
            )
        if name == "verify":
            action.add_argument("--delete", action="store_true", help="remove damaged files")


def _size(text: str) -> int:
    units = {"KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30, "B": 1}
    for unit, factor in units.items():
        if text.upper().endswith(unit):
            return int(float(text[: -len(unit)]) * factor)
    return int(text)


def _entries(path: Path) -> list[CacheEntry]:
    if not path.is_dir():
        raise SystemExit(f"{path} is not a folder; name the one in XLA_PERSISTENT_CACHE_PATH")
    return sorted(programs.cache_entries(path), key=lambda e: -e.used)


def ls(chosen: argparse.Namespace) -> int:
    """Print one line per program, newest first."""
    table = Table(show_edge=False)
    for column in ("program", "operations", "size", "used", "device", "file"):
        table.add_column(column, overflow="fold", no_wrap=column in ("program", "used", "device"))
    for entry in _entries(chosen.path):
        row = (entry.program, str(entry.operations or ""), counters.render_bytes(entry.nbytes))
        table.add_row(*row, _ago(entry.used), _device(entry), Text(entry.path.name[:16]))
    _console().print(table)
    return 0


def stats(chosen: argparse.Namespace) -> int:
    """Print the number and size of programs, in all and for each device."""
    entries = _entries(chosen.path)
    good = [e for e in entries if e.fault is None]
    console = _console()
    size = counters.render_bytes(sum(e.nbytes for e in entries))
    console.print(f"{_counted(len(good), 'program')}, {size}")
    console.print(_counted(len(entries) - len(good), "damaged file"))
    for device in sorted({_device(e) for e in good}):
        mine = [e for e in good if _device(e) == device]
        size = counters.render_bytes(sum(e.nbytes for e in mine))
        console.print(f"  {device}: {_counted(len(mine), 'program')}, {size}")
    return 0


def prune(chosen: argparse.Namespace) -> int:
    """Remove programs that were not used for the given number of days, then the oldest ones until the size fits."""
    if chosen.days is None and chosen.max_size is None:
        raise SystemExit("say what to keep: --days N, --max-size SIZE, or both")
    kept = _entries(chosen.path)
    removed: list[CacheEntry] = []
    if chosen.days is not None:
        since = time.time() - chosen.days * _DAY
        removed = [e for e in kept if e.used < since]
        kept = [e for e in kept if e.used >= since]
    if chosen.max_size is not None:
        size_kept = sum(e.nbytes for e in kept)
        while kept and size_kept > chosen.max_size:
            removed.append(kept.pop())
            size_kept -= removed[-1].nbytes
    if not chosen.dry_run:
        for entry in removed:
            entry.path.unlink(missing_ok=True)
    size = counters.render_bytes(sum(e.nbytes for e in removed))
    word = "would be removed" if chosen.dry_run else "removed"
    _console().print(f"{_counted(len(removed), 'file')}, {size}, {word}; {len(kept)} kept")
    return 0


def verify(chosen: argparse.Namespace) -> int:
    """Check the checksum of every file. Returns 1 if a damaged file remains, else 0."""
    entries = _entries(chosen.path)
    damaged = [e for e in entries if e.fault is not None]
    console = _console()
    for entry in damaged:
        console.print(Text(f"{entry.path}: {entry.fault}"))
        if chosen.delete:
            entry.path.unlink(missing_ok=True)
    console.print(
        f"{len(entries) - len(damaged)} good, {len(damaged)} damaged{' and removed' * chosen.delete}"
    )
    return int(bool(damaged) and not chosen.delete)


def _ago(moment: float) -> str:
    """How long ago a moment was, as ``3 hours ago``."""
    seconds = max(0.0, time.time() - moment)
    for unit, size in (("day", _DAY), ("hour", 3_600.0), ("minute", 60.0)):
        if seconds >= size:
            return f"{_counted(int(seconds // size), unit)} ago"
    return "just now"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def _device(entry: CacheEntry) -> str:
    plugin = entry.key.get("device:plugin", b"")
    return plugin.decode(errors="replace") or ("damaged" if entry.fault else "unknown")


def _console() -> Console:
    width = None if sys.stdout.isatty() else _WIDTH
    return Console(highlight=False, soft_wrap=True, width=width)
