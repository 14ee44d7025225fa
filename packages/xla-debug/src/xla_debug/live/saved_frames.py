"""``torch_xla.debug.frame_parser_util``: summarizes a file of the stacks that called operators on the CPU.

torch_xla's runtime writes such files (``XLA_FNTRACKER_FILE``). A stack begins with ``[TAG OPERATOR From Thread
N]``, followed by its Python frames, and its C++ frames up to ``*** End stack trace ***``. C++ frames are ignored.
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
    """Report how often each stack in the file ``fname`` occurs, the most frequent first.

    The report goes to ``PT_XLA_DEBUG_FILE``, or else to the logger ``pt-xla-profiler``. Raises OSError if the file
    cannot be read.
    """
    with Path(fname).open() as file:
        create_report(parse_frames(file))


def create_report(frames: Counter[str]) -> None:
    """Report stacks with their counts, the most frequent first, in the same place as ``process_frames``."""
    lines = analysis.usage_summary(frames)
    path = settings.DEBUG_FILE.get()
    if path:
        with Path(path).open("a") as report:
            report.write("\n".join(lines) + "\n")
    else:
        analysis.warn(lines)


def parse_frames(lines: Iterable[str]) -> Counter[str]:
    """Count the stacks in the lines of such a file; the keys are their texts without C++ frames."""
    counted: Counter[str] = Counter()
    stack: list[str] = []
    native = False
    for line in (*lines, ""):
        if _NATIVE.match(line) or _END.match(line):
            native = _NATIVE.match(line) is not None
            continue
        content = None if native else parse_frame_content(line)
        if content is not None:
            stack.append(content)
        elif stack and not native:
            counted["".join(stack)] += 1
            stack = []
    return counted


def parse_frame_content(line: str) -> str | None:
    """The part of a line that belongs to the text of a stack; None if the line belongs to no stack."""
    tag = _TAG.match(line)
    if tag is not None:
        return analysis.UNLOWERED.format(tag["operator"]) + "\n"
    return line if _PYTHON.match(line) or _FRAME.match(line) else None
