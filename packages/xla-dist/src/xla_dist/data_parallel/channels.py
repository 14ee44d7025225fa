"""Bounded queues between threads that can be closed at any moment, from either end."""

from __future__ import annotations

import collections
import threading
from typing import Final

CLOSED: Final = object()
"""What ``get`` and ``take`` return once a channel is closed, or has ended and is empty."""


class Channel:
    """A first-in, first-out queue of at most ``capacity`` items.

    Each item has a number, by which the items are taken in order even if they are put in another.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = max(capacity, 1)
        self._items: dict[int, object] = {}
        # the numbers of the next item to take, and of the next item that is put without a number
        self._taken = 0
        self._put = 0
        self._ended = False
        self._closed = False
        self._condition = threading.Condition()

    def put(self, item: object, number: int | None = None) -> bool:
        """Add ``item``; waits while the channel is full. Returns False if the channel is closed.

        ``number`` is the item's place among all items, from 0 (default: after those put before). Threads may put
        their items in any order.
        """
        with self._condition:
            index = self._put if number is None else number
            self._put = max(self._put, index + 1)
            self._condition.wait_for(lambda: self._closed or index < self._taken + self._capacity)
            if self._closed:
                return False
            self._items[index] = item
            self._condition.notify_all()
            return True

    def get(self) -> object:
        """Remove and return the next item; waits for it.

        ``CLOSED`` if the channel is closed, or ended and empty.
        """
        return self.take()[1]

    def take(self) -> tuple[int, object]:
        """``get``, with the item's number before the item; -1 before ``CLOSED``."""
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
        """Declare that no more items will be put; those in the channel can still be taken."""
        with self._condition:
            self._ended = True
            self._condition.notify_all()

    def close(self) -> None:
        """Drop all items, and wake up all waiting threads; further items are refused."""
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


class UserCounts:
    """Counts the users of things by name, so that the last user of each can be recognized."""

    def __init__(self) -> None:
        self._counts: collections.Counter[str] = collections.Counter()
        # reentrant: while a thread holds it, garbage collection may end a loop, which calls ``leave``
        self._lock = threading.RLock()

    def enter(self, name: str) -> None:
        """Count one more user of ``name``."""
        with self._lock:
            self._counts[name] += 1

    def leave(self, name: str) -> bool:
        """Count one user of ``name`` less; returns whether it was the last."""
        with self._lock:
            self._counts[name] -= 1
            return self._counts[name] == 0
