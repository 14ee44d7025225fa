"""``torch_xla.debug.frame_parser_util``: sums up a file of stacks that operators on the CPU came from.

The file is what torch_xla's runtime writes (``XLA_FNTRACKER_FILE``): stacks that begin with ``[TAG OPERATOR
From Thread N]``, the Python frames, the C++ frames up to ``*** End stack trace ***``, which do not count.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from xla_debug import settings
from xla_debug.live import analysis

_TAG: Final = re.compile(r"\[TAG\s(?P<operator>.*)\sFrom Thread\s\d*\]")
_PYTHON: Final = re.compile(r"Python Frames:")
_FRAME: Final = re.compile(r".*\s\(.*:\d*\)")
_NATIVE: Final = re.compile(r"C\+\+ Frames:")
_END: Final = re.compile(r"\*{3}\sEnd stack trace\s\*{3}")


def process_frames(fname: str | os.PathLike[str]) -> None:
    """Report how often each stack of the file occurs, the most frequent first.

    The report goes to ``PT_XLA_DEBUG_FILE``, or to the logger ``pt-xla-profiler``. Raises OSError when
    the file cannot be read.
    """
    with Path(fname).open() as file:
        create_report(parse_frames(file))


def create_report(frames: Counter[str]) -> None:
    """Report stacks and their counts, the most frequent first, where ``process_frames`` does."""
    lines = analysis.usage_summary(frames)
    path = settings.DEBUG_FILE.get()
    if path:
        with Path(path).open("a") as report:
            report.write("\n".join(lines) + "\n")
    else:
        analysis.warn(lines)


def parse_frames(lines: Iterable[str]) -> Counter[str]:
    """The stacks in the lines of such a file, as text without C++ frames, and how often each is there."""
    counted: Counter[str] = Counter()
    stack: list[str] = []
    native = False
    for line in (*lines, ""):
        if _NATIVE.match(line) or _END.match(line):
            native = _NATIVE.match(line) is not None
            continue
        kept = None if native else parse_frame_content(line)
        if kept is not None:
            stack.append(kept)
        elif stack and not native:
            counted["".join(stack)] += 1
            stack = []
    return counted


def parse_frame_content(line: str) -> str | None:
    """What of a line belongs to a stack's text; None for a line that belongs to none."""
    tag = _TAG.match(line)
    if tag is not None:
        return analysis.UNLOWERED.format(tag["operator"]) + "\n"
    return line if _PYTHON.match(line) or _FRAME.match(line) else None
