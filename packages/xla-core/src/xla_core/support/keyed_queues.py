"""Queues between threads that can be closed: in order (``Queue``), or by key (``KeydQueue``)."""

from __future__ import annotations

import threading

from xla_core.contract.foreign_values import ForeignObject

Key = int | str


class QueueBase:
    """Holds at most ``maxsize`` items until it is closed; ``put`` waits while it is full.

    After ``close_write`` nothing more is put in, and what is there can be taken. After ``close`` it is empty.
    """

    def __init__(self, maxsize: int = 1024) -> None:
        self._maxsize = maxsize
        self._changed = threading.Condition()
        self._closed = self._write_closed = False
        self._items: dict[object, object] = {}

    def max_size(self) -> int:
        """How many items fit."""
        return self._maxsize

    def close_write(self) -> None:
        """Take no more items; those that are there remain."""
        with self._changed:
            self._write_closed = True
            self._changed.notify_all()

    def close(self) -> None:
        """Take no more items and give none: a ``get`` that waits gets what an empty queue gives."""
        with self._changed:
            self._closed = self._write_closed = True
            self._items.clear()
            self._changed.notify_all()

    def _put(self, key: object, item: object) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._write_closed or len(self._items) < self._maxsize)
            if not self._write_closed:
                self._items[key] = item
                self._changed.notify_all()

    def _take(self, key: object, default: object) -> object:
        with self._changed:
            self._changed.wait_for(lambda: key in self._items or self._write_closed)
            if key not in self._items:
                return default
            self._changed.notify_all()
            return self._items.pop(key)


class Queue(QueueBase):
    """First in, first out."""

    def __init__(self, maxsize: int = 1024) -> None:
        super().__init__(maxsize)
        self._in = self._out = 0
        self._turns = threading.Lock()

    def put(self, item: object) -> None:
        """Put an item at the end, waiting for room; dropped once the queue is closed for writing."""
        with self._turns:
            number, self._in = self._in, self._in + 1
        self._put(number, item)

    def get(self) -> ForeignObject:
        """The item at the front, waiting for one; None once the queue is closed and empty."""
        with self._turns:
            number, self._out = self._out, self._out + 1
        return self._take(number, None)


class KeydQueue(QueueBase):
    """Items by their keys, each taken once."""

    def put(self, key: Key, item: object) -> None:
        """Put an item under ``key``, waiting for room; dropped once the queue is closed for writing."""
        self._put(key, item)

    def get(self, key: Key, defval: ForeignObject = None) -> ForeignObject:
        """The item under ``key``, waiting for it; ``defval`` once the queue is closed without it."""
        return self._take(key, defval)
