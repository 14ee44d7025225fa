"""Tags for checkpoint files, such as "best" and "last"; a file without tags can be removed."""

from __future__ import annotations

import json
from collections.abc import Callable


class CheckpointTagger:
    """Remembers which file each tag names.

    ``remover(path)`` is called when a file has lost its last tag to another file (default: files are kept).
    """

    def __init__(self, remover: Callable[[str], object] | None = None) -> None:
        self._remover = remover
        self._tags: dict[str, str] = {}

    def tag(self, name: str, path: str) -> None:
        """Give the tag ``name`` to the file ``path``, and take it from the former file."""
        former = self._tags.get(name)
        self._tags[name] = path
        if former is not None and self._remover and former not in self._tags.values():
            self._remover(former)

    def save_to_json(self) -> str:
        """A JSON object with the path of each tag."""
        return json.dumps(self._tags)
