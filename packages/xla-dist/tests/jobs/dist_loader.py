"""What the tests of the loaders do, in a process that has devices of its own."""

from __future__ import annotations

import collections
import gc
import multiprocessing
import threading
import time
import traceback

import pytest
import torch

import torch_xla
import torch_xla.distributed.parallel_loader as pl
from xla_core.support import counters

Pair = collections.namedtuple("Pair", "image label")


class Numbers(torch.utils.data.Dataset):
    """0, 1, 2, ...; counts how many were read."""

    def __init__(self, count, fails_at=None):
        self.count, self.fails_at, self.read = count, fails_at, 0

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        self.read += 1
        return self._decode(i)

    def _decode(self, i):
        if i == self.fails_at:
            raise OSError(f"sample {i} is damaged")
        return torch.tensor(float(i))


def loader(count, batch_size=2, **options):
    return torch.utils.data.DataLoader(Numbers(count), batch_size=batch_size, **options)


def background_threads():
    return [
        t.name for t in threading.enumerate() if t.name.startswith(("xla-loader", "xla-upload"))
    ]


def assert_nothing_left():
    gc.collect()
    assert background_threads() == []
    assert multiprocessing.active_children() == []


def keeps_order_and_structure(_index):
    device = torch_xla.device()
    batches = [
        {"pair": Pair(torch.full((2,), float(i)), i), "names": [f"sample {i}"]} for i in range(20)
    ]
    found = list(pl.MpDeviceLoader(batches, device, host_to_device_transfer_threads=3))
    assert len(found) == 20
    for i, batch in enumerate(found):
        assert isinstance(batch["pair"], Pair)
        assert batch["pair"].image.device == device
        assert batch["pair"].image.tolist() == [i, i]
        assert (batch["pair"].label, batch["names"]) == (i, [f"sample {i}"])
    assert_nothing_left()


def wraps_a_loader(_index):
    wrapped = loader(8)
    mine = pl.MpDeviceLoader(wrapped, "xla")
    assert len(mine) == 4
    parallel = pl.ParallelLoader(loader(8), ["xla:0"])
    assert len(parallel.per_device_loader("xla:0")) == parallel.per_device_samples() == 4
    parallel.close()
    assert mine.dataset is wrapped.dataset
    assert mine.batch_size == 2
    assert (mine._loader, mine._device) == (wrapped, "xla")
    for _epoch in range(2):
        assert [b.tolist() for b in mine] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert_nothing_left()


def leaves_early(_index):
    for batch in pl.MpDeviceLoader(loader(1000, num_workers=1), "xla"):
        assert batch.tolist() == [0, 1]
        break
    assert_nothing_left()
    with pytest.raises(ZeroDivisionError):
        for _ in pl.MpDeviceLoader(loader(1000), "xla"):
            raise ZeroDivisionError
    assert_nothing_left()
    unread = pl.ParallelLoader(loader(1000), ["xla"])
    assert background_threads()
    del unread
    assert_nothing_left()
    closed = pl.ParallelLoader(loader(1000), ["xla"])
    closed.close()
    assert background_threads() == []
    with pytest.raises(RuntimeError, match="this ParallelLoader is closed"):
        closed.per_device_loader("xla")


def shows_what_the_dataset_raised(_index):
    damaged = torch.utils.data.DataLoader(Numbers(8, fails_at=5), batch_size=2)
    read = []
    with pytest.raises(OSError, match="sample 5 is damaged") as caught:
        for batch in pl.MpDeviceLoader(damaged, "xla"):
            read.append(batch.tolist())
    assert read == [[0, 1], [2, 3]]
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert "shows_what_the_dataset_raised" in frames
    assert frames[-1] == "_decode"
    del caught
    assert_nothing_left()


def marks_steps(_index):
    def steps(**options):
        before = counters.all_counters().get("MarkStep", 0)
        for _ in pl.MpDeviceLoader(loader(12), "xla", **options):  # six batches
            pass
        return counters.all_counters()["MarkStep"] - before

    assert (
        steps() == 6 + 2
    )  # before each batch, and when asked for one more: before, and at the end
    assert steps(batches_per_execution=2) == 3 + 2
    assert steps(batches_per_execution=4) == 3


def reads_ahead_so_far(_index):
    data = Numbers(1000)
    batches = torch.utils.data.DataLoader(data, batch_size=1)
    parallel = pl.ParallelLoader(
        batches, ["xla"], loader_prefetch_size=3, device_prefetch_size=2
    )  # fmt: skip
    mine = parallel.per_device_loader("xla")
    assert next(mine).item() == 0.0
    until = time.monotonic() + 20
    # one in the hands of each thread, and the next one that the loader has ready
    while data.read < 7 and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(0.1)
    assert 7 <= data.read <= 1 + 3 + 2 + 2 + 1
    parallel.close()
    assert_nothing_left()


class Doubled:
    """A layout hook that shows what it was asked."""

    def __init__(self):
        self.asked = []

    def can_apply(self, tensor):
        self.asked.append(tuple(tensor.shape))
        return tensor.dim() == 1

    def apply(self, tensor):
        tensor.mul_(2)


def applies_a_sharding(_index):
    hook = Doubled()
    batches = [(torch.ones(3), torch.ones(2, 2))]
    ((line, square),) = list(pl.MpDeviceLoader(batches, "xla", input_sharding=hook))
    assert hook.asked == [(3,), (2, 2)]
    assert line.tolist() == [2, 2, 2]
    assert square.tolist() == [[1, 1], [1, 1]]


def deals_batches_to_devices(_index):
    devices = torch_xla.devices()
    assert len(devices) == 2
    parallel = pl.ParallelLoader(loader(10), devices)  # five batches: the last has no partner
    assert parallel.per_device_samples() == 2
    assert parallel.batches_per_execution == 1
    first, second = (parallel.per_device_loader(d) for d in devices)
    assert [b.tolist() for b in first] == [[0, 1], [4, 5]]
    assert [(str(b.device), b.tolist()) for b in second] == [("xla:1", [2, 3]), ("xla:1", [6, 7])]
    assert parallel.next_item(devices[0]) is None
    assert_nothing_left()
    parallel = pl.ParallelLoader(loader(400), devices)
    first, second = (parallel.per_device_loader(d) for d in devices)
    assert next(first).tolist() == [0, 1]
    first.close()  # the other loop goes on without it, past all that the queues hold
    assert sum(1 for _ in second) == 100
    assert_nothing_left()
    other = pl.ParallelLoader(loader(4), devices[:1])
    with pytest.raises(ValueError, match=r"no queue for xla:1; it has xla:0"):
        other.per_device_loader("xla:1")
    other.close()
    assert_nothing_left()


class SaysWhereItIs:
    """A loader that says whether the loop is at its last batch."""

    end_of_dataloader = False

    def __iter__(self):
        for i in range(4):
            self.end_of_dataloader = i == 3
            self.thread = threading.current_thread()
            yield torch.full((1,), float(i))
        self.end_of_dataloader = False


def speaks_of_its_loop(_index):
    inner = SaysWhereItIs()
    loader = pl.MpDeviceLoader(inner, "xla", batches_per_execution=2, loader_prefetch_size=3)
    seen = [(batch.item(), inner.end_of_dataloader) for batch in loader]
    assert seen == [(0.0, False), (1.0, False), (2.0, False), (3.0, True)]
    assert inner.thread is threading.current_thread()
