"""A process's place in a job of several, as the environment or a device's plugin describes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final

__all__ = ["Job", "parse_number"]

_NO_LIMIT: Final = 1 << 30

MSG_NOT_A_NUMBER: Final = "{name}={text!r} in the environment: expected a whole number {expected}"


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """This process's place among those that the environment describes.

    Process ``index`` of ``count``; ``local_index`` of the ``local_count`` on this host. ``served``
    says that a launcher runs the coordinator at ``address`` (``host:port``), else process 0 does.
    """

    index: int
    count: int
    address: str
    local_index: int = 0
    local_count: int = 1
    served: bool = False

    @property
    def host_index(self) -> int:
        """Number of this host, where every host runs equally many processes."""
        return (self.index - self.local_index) // self.local_count


def parse_number(
    options: Mapping[str, str], name: str, default: int, least: int, below: int = _NO_LIMIT
) -> int:
    """The whole number in the variable ``name`` of the environment ``options``; ``default`` if it is not set.

    Raises ValueError, which names the variable, unless it is at least ``least`` and less than ``below``.
    """
    text = options.get(name) or str(default)
    if not text.strip().isdecimal() or not least <= int(text) < below:
        expected = f"from {least}" + (f" to {below - 1}" if below < _NO_LIMIT else "")
        raise ValueError(MSG_NOT_A_NUMBER.format(name=name, text=text, expected=expected))
    return int(text)
