"""What a process does once."""

from __future__ import annotations

__all__ = ["Once"]


class Once:
    """Whether something that a process does once is done already."""

    __slots__ = ("done",)

    def __init__(self) -> None:
        self.done = False

    def begin(self) -> bool:
        """True at the first call, False at each later one."""
        former, self.done = self.done, True
        return not former
