"""What objects say of themselves to those that take checkpoints of a whole run: names of attributes."""

from __future__ import annotations

from typing import Final

__all__ = [
    "OWN_STATE",
    "ROWS_OF",
]

ROWS_OF: Final = "rows_of"
"""Of a parameter that is this process's part of one: the whole's shape, and the number of the part's first row."""

OWN_STATE: Final = "state_of_each_process"
"""Of an object, true: its ``state_dict()`` is this process's own, and is read again by as many processes."""
