"""``ResumableLoader``: batches in an order that a run can take up again in the middle of an epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import torch
from torch.utils.data import DataLoader, Dataset

from xla_core.extension_api import runtime
from xla_spmd.checkpoint.state_dicts import StateDict, StateValue

MSG_BATCH: Final = (
    "ResumableLoader: batch_size={batch} is that of all processes together, and does not split over "
    "{world} of them"
)
MSG_SMALL: Final = (
    "ResumableLoader: the data set has {size} items, which are less than one batch of {batch}"
)
MSG_OTHER: Final = (
    "the position in the data was saved with {name}={saved}, and is {now} now: batches would be others than those "
    "that were left"
)


class ResumableLoader:
    """A loader that knows which batches the loop has taken; ``state_dict()`` is the same in all processes.

    ``dataset`` is one with indices. ``batch_size`` is that of all processes together, each of which gets its
    part: with fewer or more of them the batches stay the same. With ``shuffle`` (default) each epoch has an
    order of its own, which follows from ``seed``; a last batch that is not full is left out. ``wrap`` makes of the
    ``DataLoader`` what is looped over, such as ``lambda loader: pl.MpDeviceLoader(loader, device)``: what that
    reads ahead does not count as taken. ``options`` are those of ``DataLoader``.

    Going through it gives the rest of the current epoch; then ``epoch`` is the next one. Raises ValueError where
    ``batch_size`` does not split, or is larger than the data set.
    """

    def __init__(
        self,
        dataset: Dataset[object],
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        wrap: Callable[[DataLoader[Any]], Iterable[object]] | None = None,
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
        """Batches in an epoch."""
        return self._size // self.batch_size

    def __iter__(self) -> Iterator[object]:
        # the loader draws its workers' seeds from a generator: not from the one that the run draws from
        numbers = torch.Generator().manual_seed(self.seed + self.epoch)
        loader = DataLoader(
            self._dataset,
            batch_sampler=self._batches()[self.batch :],
            generator=numbers,
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
        """Which epoch the loop is in, how many of its batches it has taken, and of what."""
        return {"epoch": self.epoch, "batch": self.batch, **self._facts()}

    def load_state_dict(self, state: Mapping[str, StateValue]) -> None:
        """Go on there. Raises ValueError where the batches are not those of the saved state."""
        for name, now in self._facts().items():
            if state[name] != now:
                raise ValueError(MSG_OTHER.format(name=name, saved=state[name], now=now))
        self.epoch, self.batch = state["epoch"], state["batch"]

    def _facts(self) -> StateDict:
        return {
            "batch_size": self.batch_size, "shuffle": self.shuffle, "seed": self.seed, "size": self._size,
        }  # fmt: skip


def _place() -> tuple[int, int]:
    """This process's number among those that load data, and how many they are."""
    if runtime.is_spmd():
        return runtime.process_index(), runtime.process_count()
    return runtime.global_ordinal(), runtime.world_size()
