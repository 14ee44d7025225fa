"""torch_xla.utils.keyd_queue: queues between threads that can be closed."""

from __future__ import annotations

import threading

from torch_xla.utils.keyd_queue import KeydQueue, Queue


def later(function, *args):
    thread = threading.Timer(0.05, function, args)
    thread.start()
    return thread


def test_in_order_until_closed():
    queue = Queue(maxsize=2)
    assert queue.max_size() == 2
    producer = threading.Thread(
        target=lambda: [queue.put(i) for i in range(5)] and queue.close_write()
    )
    producer.start()
    assert [queue.get() for _ in range(6)] == [0, 1, 2, 3, 4, None]
    producer.join()
    queue.put(6)
    assert queue.get() is None


def test_by_key_in_any_order():
    queue = KeydQueue()
    waiting = later(queue.put, "late", 2)
    queue.put("early", 1)
    assert queue.get("late") == 2
    assert queue.get("early") == 1
    waiting.join()
    closing = later(queue.close)
    assert queue.get("never", "nothing") == "nothing"
    closing.join()


def test_closing_drops_what_nobody_took():
    queue = Queue()
    queue.put(1)
    queue.close()
    assert queue.get() is None
