"""Names for checkpoint files, such as "best" and "last"; a file that has lost its last name can be removed."""

from __future__ import annotations

import json
from collections.abc import Callable


class CheckpointTagger:
    """Keeps which file each tag stands for.

    ``remover(path)`` is called for a file when its last tag has moved to another one (default: files stay).
    """

    def __init__(self, remover: Callable[[str], object] | None = None) -> None:
        self._remover = remover
        self._tags: dict[str, str] = {}

    def tag(self, name: str, path: str) -> None:
        """Let ``name`` stand for the file ``path``, and for no other one."""
        former = self._tags.get(name)
        self._tags[name] = path
        if former is not None and self._remover and former not in self._tags.values():
            self._remover(former)

    def save_to_json(self) -> str:
        """The path of each tag as a JSON object."""
        return json.dumps(self._tags)
