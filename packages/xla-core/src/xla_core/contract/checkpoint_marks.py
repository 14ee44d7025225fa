"""Names of attributes that mark objects for checkpoints of a whole run."""

from __future__ import annotations

from typing import Final

__all__ = [
    "OWN_STATE",
    "ROWS_OF",
]

ROWS_OF: Final = "rows_of"
"""On a parameter that is this process's part of a whole: the whole's shape, and the part's first row."""

OWN_STATE: Final = "state_of_each_process"
"""True on an object whose ``state_dict()`` differs between processes, and is loaded by as many processes."""
