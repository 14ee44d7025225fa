"""torch_xla.utils.keyd_queue: queues between threads."""

from __future__ import annotations

from xla_core.support.keyed_queues import KeydQueue as KeydQueue
from xla_core.support.keyed_queues import Queue as Queue
from xla_core.support.keyed_queues import QueueBase as QueueBase
