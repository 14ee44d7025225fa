"""``CheckpointManager``: a checkpoint every so many steps, in the background, the last few kept."""

from __future__ import annotations

import contextlib
import copy
import datetime
import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from xla_core.extension_api import runtime, training
from xla_spmd.checkpoint import parts, preemption
from xla_spmd.checkpoint.planners import SPMDLoadPlanner, SPMDSavePlanner
from xla_spmd.checkpoint.storage import Record, Storage

logger = logging.getLogger(__name__)

MSG_POSITIVE: Final = "CheckpointManager: {name} is {got}; it has to be {wanted}"
MSG_NO_GROUP: Final = (
    "CheckpointManager: this job has {count} processes, which write one checkpoint together and need a "
    "process group for it; call torch.distributed.init_process_group('gloo', ...) first"
)
MSG_UNKNOWN_STEP: Final = "there is no checkpoint of step {step} below {path}; there are {steps}"
MSG_NOT_WATCHING: Final = (
    "this CheckpointManager was made with chkpt_on_preemption=False and does not know"
)
_NO_GROUP_WARNING: Final = "torch.distributed is disabled"


class CheckpointManager:
    """Takes checkpoints of a training loop below ``path``, one per step, and restores them.

    ``path`` is a directory, or an address that fsspec knows (``gs://...``). A checkpoint is due every
    ``save_interval`` steps, and, with ``chkpt_on_preemption``, at the next step after any process got
    SIGTERM, which no longer ends it. The ``max_to_keep`` newest are kept (0: all). Up to
    ``max_pending_async`` copies of the state wait in memory for being written, by ``num_of_threads``
    threads. The processes of a job call every method together; ``process_group`` has to take CPU tensors, and
    by default is a new one of gloo.

    A save that is interrupted, by an error or the end of the process, leaves the earlier checkpoints as they
    are, that of the same step included. Raises ValueError for numbers that are too small, RuntimeError in
    several processes without a process group, and outside the main thread with ``chkpt_on_preemption``.
    """

    def __init__(
        self,
        path: str,
        save_interval: int,
        max_to_keep: int = 0,
        max_pending_async: int = 1,
        num_of_threads: int = 1,
        process_group: dist.ProcessGroup | None = None,
        chkpt_on_preemption: bool = True,
    ) -> None:
        _check_numbers(save_interval, max_to_keep, max_pending_async, num_of_threads)
        self.base_path = str(path)
        self.save_interval = save_interval
        self.max_to_keep = max_to_keep
        self.num_of_threads = num_of_threads
        self.chkpt_on_preemption = chkpt_on_preemption
        self.pg, self._signals = _groups(process_group)
        self._storage = Storage(self.base_path)
        self._records = self._storage.records()
        # one thread, and so one order of checkpoints in all processes
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._room = threading.Semaphore(max_pending_async)
        self._pending: list[Future[None]] = []
        if chkpt_on_preemption:
            preemption.watch()

    def should_save(self, step: int) -> bool:
        """Whether a checkpoint is due at ``step``; with several processes, all of them ask at every step."""
        asked = self.chkpt_on_preemption and self.reached_preemption(step)
        if asked:
            logger.warning("asked to end: taking a checkpoint at step %s", step)
        return asked or step % self.save_interval == 0

    def save(self, step: int, state_dict: dict[str, Any], force: bool | None = False) -> bool:
        """Take a checkpoint if one is due at ``step``, or with ``force``; whether one was taken.

        Returns when it is written. Raises what an earlier ``save_async`` failed with.
        """
        if not (self.should_save(step) or force):
            return False
        training.sync(wait=True)
        self._submit(lambda: self._save(step, state_dict, SPMDSavePlanner())).result()
        self._raise_failures()
        return True

    def save_async(self, step: int, state_dict: dict[str, Any], force: bool | None = False) -> bool:
        """As ``save``, but returns when the state is copied to the host; it is written in the background.

        Waits while ``max_pending_async`` copies are still to be written. Raises what an earlier one failed
        with, and so does ``join``.
        """
        if not (self.should_save(step) or force):
            return False
        self._raise_failures()
        training.sync(wait=True)
        self._room.acquire()
        try:
            flat, planner = _copied(state_dict)
        except BaseException:
            self._room.release()
            raise
        future = self._submit(lambda: self._save(step, flat, planner))
        future.add_done_callback(lambda _: self._room.release())
        self._pending.append(future)
        return True

    def restore(self, step: int, state_dict: dict[str, Any]) -> None:
        """Read the checkpoint of ``step`` into ``state_dict``, in place.

        Waits for checkpoints that are still being written. Tensors keep their places and splits. What is no
        tensor is replaced in ``state_dict``: load it into model and optimizer (``load_state_dict``)
        afterwards. Raises ValueError for an unknown step.
        """
        self._submit(lambda: self._restore(step, state_dict)).result()

    def all_steps(self) -> list[int]:
        """The steps of all complete checkpoints, in order."""
        return sorted({record.step for record in self._records})

    def join(self) -> None:
        """Wait until all pending checkpoints are written. Raises what the first of them failed with."""
        for future in self._pending:
            future.exception()
        self._raise_failures()

    def reached_preemption(self, step: int) -> bool:
        """Whether any process was asked to end. Raises RuntimeError without ``chkpt_on_preemption``."""
        if not self.chkpt_on_preemption:
            raise RuntimeError(MSG_NOT_WATCHING)
        return preemption.reached(self._signals)

    # -- in the worker's thread --------------------------------------------------------------------

    def _submit(self, work: Callable[[], None]) -> Future[None]:
        return self._worker.submit(work)

    def _raise_failures(self) -> None:
        done = [future for future in self._pending if future.done()]
        self._pending = [future for future in self._pending if future not in done]
        for future in done:
            future.result()

    def _restore(self, step: int, state_dict: dict[str, Any]) -> None:
        found = [record for record in self._records if record.step == step]
        if not found:
            text = MSG_UNKNOWN_STEP.format(step=step, path=self.base_path, steps=self.all_steps())
            raise ValueError(text)
        reader = self._storage.reader(found[-1].name)
        with _without_group_warning():
            dcp.load(
                state_dict,
                storage_reader=reader,
                planner=SPMDLoadPlanner(),
                process_group=self.pg,
                no_dist=self.pg is None,
            )

    def _save(self, step: int, state: dict[str, Any], planner: SPMDSavePlanner) -> None:
        name = self._agreed(lambda: self._storage.new_name(step))
        with _without_group_warning():
            dcp.save(
                state,
                storage_writer=self._storage.writer(name, self.num_of_threads),
                planner=planner,
                process_group=self.pg,
                no_dist=self.pg is None,
            )
        self._keep(Record(step, datetime.datetime.now(), name))

    def _keep(self, record: Record) -> None:
        """Count a checkpoint that is written, and let go of those that it replaces."""
        replaced = [r for r in self._records if r.step == record.step]
        kept = [r for r in self._records if r.step != record.step] + [record]
        excess = max(len(kept) - self.max_to_keep, 0) if self.max_to_keep else 0
        if self._is_first:
            self._storage.complete(record)
            for former in [*replaced, *kept[:excess]]:
                self._storage.remove(former.name)
        self._records = kept[excess:]

    @property
    def _is_first(self) -> bool:
        return self.pg is None or dist.get_rank(self.pg) == 0

    def _agreed(self, choose: Callable[[], str]) -> str:
        """What the group's first process chooses, in all of them."""
        if self.pg is None:
            return choose()
        chosen: list[Any] = [choose() if self._is_first else None]
        dist.broadcast_object_list(chosen, dist.get_global_rank(self.pg, 0), self.pg)
        return str(chosen[0])


def _check_numbers(interval: int, keep: int, pending: int, threads: int) -> None:
    least = {"save_interval": (interval, 1), "max_to_keep": (keep, 0)}
    least |= {"max_pending_async": (pending, 1), "num_of_threads": (threads, 1)}
    for name, (got, wanted) in least.items():
        if got < wanted:
            raise ValueError(MSG_POSITIVE.format(name=name, got=got, wanted=f"at least {wanted}"))


def _groups(
    given: dist.ProcessGroup | None,
) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """The group that writes, and one for the main thread's signals: each has one order of its own."""
    if not dist.is_initialized():
        if runtime.process_count() > 1:
            raise RuntimeError(MSG_NO_GROUP.format(count=runtime.process_count()))
        return None, None
    ranks = None if given is None else dist.get_process_group_ranks(given)
    writing = given or dist.new_group(backend="gloo")
    return writing, dist.new_group(ranks, backend="gloo")


def _copied(state_dict: dict[str, Any]) -> tuple[dict[str, Any], SPMDSavePlanner]:
    """A state dict's values on the host, flat, and the planner that writes them."""
    flattening = dcp.DefaultSavePlanner()
    flattening.set_up_planner(state_dict)
    flat = {name: _on_host(value) for name, value in flattening.state_dict.items()}
    return flat, SPMDSavePlanner(flattening.mappings)


def _on_host(value: Any) -> Any:
    found = parts.to_write(value)
    if isinstance(found, parts.DeviceParts):
        return found.copied()
    if isinstance(found, torch.Tensor):
        return found.clone() if found is value else found
    return copy.deepcopy(found)


@contextlib.contextmanager
def _without_group_warning() -> Iterator[None]:
    """Torch warns that it assumes a single process, where there is no group: that is known here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_NO_GROUP_WARNING)
        yield
