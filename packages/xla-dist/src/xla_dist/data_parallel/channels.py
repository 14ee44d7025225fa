"""Bounded queues between threads that can be closed at any moment, from either end."""

from __future__ import annotations

import collections
import threading
from typing import Any, Final

CLOSED: Final = object()
"""What ``get`` gives once a channel is closed."""


class Channel:
    """First in, first out, at most ``capacity`` items; items may be put out of turn, by number."""

    def __init__(self, capacity: int) -> None:
        self._capacity = max(capacity, 1)
        self._items: dict[int, object] = {}
        self._taken = 0
        self._put = 0
        self._ended = False
        self._closed = False
        self._condition = threading.Condition()

    def put(self, item: object, number: int | None = None) -> bool:
        """Add an item, waiting while it is full; False if the channel was closed instead.

        ``number`` is its place among all items: those who put may come in any order.
        """
        with self._condition:
            place = self._put if number is None else number
            self._put = max(self._put, place + 1)
            self._condition.wait_for(lambda: self._closed or place < self._taken + self._capacity)
            if self._closed:
                return False
            self._items[place] = item
            self._condition.notify_all()
            return True

    def get(self) -> Any:
        """The next item, waiting for it; ``CLOSED`` when the channel is closed, or ended and empty."""
        return self.take()[1]

    def take(self) -> tuple[int, Any]:
        """The next item and its number, as ``get``."""
        with self._condition:
            self._condition.wait_for(
                lambda: (
                    self._closed
                    or self._taken in self._items
                    or (self._ended and self._taken >= self._put)
                )
            )
            if self._closed or self._taken not in self._items:
                return -1, CLOSED
            number = self._taken
            self._taken += 1
            item = self._items.pop(number)
            self._condition.notify_all()
            return number, item

    def end(self) -> None:
        """Nothing more will be put; what is in there can still be taken."""
        with self._condition:
            self._ended = True
            self._condition.notify_all()

    def close(self) -> None:
        """Wake all waiting threads, and drop the contents."""
        with self._condition:
            self._closed = True
            self._items.clear()
            self._condition.notify_all()

    @property
    def closed(self) -> bool:
        """Whether ``close()`` was called."""
        return self._closed

    def __len__(self) -> int:
        return len(self._items)


class Turns:
    """Counts down the users of something, and says which one is the last to leave."""

    def __init__(self) -> None:
        self._names: collections.Counter[str] = collections.Counter()
        self._lock = (
            threading.RLock()
        )  # a loop may be collected, and end, while its thread is in here

    def enter(self, name: str) -> None:
        """One user more."""
        with self._lock:
            self._names[name] += 1

    def leave(self, name: str) -> bool:
        """One user less; whether it was the last of this name."""
        with self._lock:
            self._names[name] -= 1
            return self._names[name] == 0
