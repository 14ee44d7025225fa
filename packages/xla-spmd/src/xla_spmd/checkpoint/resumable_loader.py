"""``ResumableLoader``: a data loader that can continue in the middle of an epoch when a run is resumed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

import torch
from torch.utils.data import DataLoader, Dataset

from xla_core.extension_api import runtime
from xla_spmd.checkpoint.state_dicts import StateDict, StateValue

MSG_BATCH: Final = (
    "ResumableLoader: batch_size={batch} is that of all processes together, and has to be positive and "
    "divisible by their number, {world}"
)
MSG_SMALL: Final = (
    "ResumableLoader: the data set has {size} items, which is less than one batch of {batch}"
)
MSG_OTHER: Final = (
    "the position in the data was saved with {name}={saved}, and {name} is {now} now: the remaining batches would "
    "be different ones"
)


class ResumableLoader:
    """A loader that counts the batches that the loop has taken, and can continue after them.

    Iterating over it yields the remaining batches of the current epoch, and then increments ``epoch``.
    ``state_dict()`` is the position in the data; it is the same in all processes.

    ``dataset`` must support indices and ``len()``. ``batch_size`` is that of all processes together, each of which
    loads an equal part: the batches do not depend on the number of processes. With ``shuffle`` (default: True) each
    epoch has its own order, which follows from ``seed`` (default: 0). A last batch that is not full is left out.
    ``wrap(loader)`` may return another iterable for the ``DataLoader``, for example
    ``lambda loader: pl.MpDeviceLoader(loader, device)``; batches that it prefetches do not count as taken.
    ``options`` are those of ``DataLoader``.

    Raises ValueError if ``batch_size`` is not a positive multiple of the number of processes, or is larger than the
    data set.
    """

    def __init__(
        self,
        dataset: Dataset[object],
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        wrap: Callable[[DataLoader[object]], Iterable[object]] | None = None,
        **options: object,
    ) -> None:
        self._dataset = dataset
        self._size = len(dataset)  # type: ignore[arg-type]
        self._rank, self._world = _place()
        if batch_size < 1 or batch_size % self._world:
            raise ValueError(MSG_BATCH.format(batch=batch_size, world=self._world))
        if self._size < batch_size:
            raise ValueError(MSG_SMALL.format(size=self._size, batch=batch_size))
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.batch = 0
        self._wrap = wrap
        self._options = options

    def __len__(self) -> int:
        """The number of batches in an epoch."""
        return self._size // self.batch_size

    def __iter__(self) -> Iterator[object]:
        # DataLoader draws the seeds of its workers from a generator: do not advance the run's own
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        loader = DataLoader(
            self._dataset,
            batch_sampler=self._batches()[self.batch :],
            generator=generator,
            **self._options,
        )
        for item in loader if self._wrap is None else self._wrap(loader):
            self.batch += 1
            yield item
        self.epoch, self.batch = self.epoch + 1, 0

    def _batches(self) -> list[list[int]]:
        """This process's part of each batch of the epoch."""
        if self.shuffle:
            order = torch.randperm(
                self._size, generator=torch.Generator().manual_seed(self.seed + self.epoch)
            ).tolist()
        else:
            order = list(range(self._size))
        part = self.batch_size // self._world
        starts = [n * self.batch_size + self._rank * part for n in range(len(self))]
        return [order[start : start + part] for start in starts]

    def state_dict(self) -> StateDict:
        """The current epoch, the number of its batches that were taken, and what their order depends on."""
        return {"epoch": self.epoch, "batch": self.batch, **self._order_inputs()}

    def load_state_dict(self, state: Mapping[str, StateValue]) -> None:
        """Continue at the position ``state``.

        Raises ValueError if batch size, shuffling, seed or size of the data set differ from those of ``state``.
        """
        for name, now in self._order_inputs().items():
            if state[name] != now:
                raise ValueError(MSG_OTHER.format(name=name, saved=state[name], now=now))
        self.epoch, self.batch = state["epoch"], state["batch"]

    def _order_inputs(self) -> StateDict:
        """Everything that the order of the batches depends on, besides the epoch."""
        return {
            "batch_size": self.batch_size, "shuffle": self.shuffle, "seed": self.seed, "size": self._size,
        }  # fmt: skip


def _place() -> tuple[int, int]:
    """The number of this process among those that load data, and their count."""
    if runtime.is_spmd():
        return runtime.process_index(), runtime.process_count()
    return runtime.global_ordinal(), runtime.world_size()
