"""``CheckpointManager``: takes checkpoints at regular steps, in the background, and keeps the last few."""

from __future__ import annotations

import contextlib
import copy
import datetime
import errno
import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, ParamSpec, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from xla_core.extension_api import runtime, training
from xla_core.support import flight_ring
from xla_spmd.checkpoint import parts, preemption
from xla_spmd.checkpoint.checked_files import Written
from xla_spmd.checkpoint.planners import SPMDLoadPlanner, SPMDSavePlanner
from xla_spmd.checkpoint.state_dicts import StateDict, StateValue
from xla_spmd.checkpoint.storage import Record, Storage

logger = logging.getLogger(__name__)

Arguments = ParamSpec("Arguments")
T = TypeVar("T")

MSG_POSITIVE: Final = "CheckpointManager: {name} is {got}; it has to be {wanted}"
MSG_NO_GROUP: Final = (
    "CheckpointManager: this job has {count} processes, which write one checkpoint together and need a "
    "process group for it; call torch.distributed.init_process_group('gloo', ...) first"
)
MSG_UNKNOWN_STEP: Final = "there is no checkpoint of step {step} below {path}; there are {steps}"
MSG_NOT_WATCHING: Final = (
    "this CheckpointManager was made with chkpt_on_preemption=False and does not know"
)
MSG_NOT_WRITTEN: Final = (
    "the checkpoint of step {step} could not be written to {path}: {error}{who}. Its files were removed; the "
    "complete checkpoints, of steps {steps}, have not changed"
)
MSG_PROGRESS: Final = "the checkpoint of step {step}"
MSG_WHO: Final = " (in process {rank})"
MSG_DAMAGED: Final = "the checkpoint of step {step} below {path} is not used: {fault}"
MSG_ALL_DAMAGED: Final = (
    "no checkpoint below {path} can be used: {faults}. To start from the beginning, give another "
    "path"
)
MSG_FIRST: Final = "the group's first process failed: {error}"
_NO_GROUP_WARNING: Final = "torch.distributed is disabled"
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DamagedCheckpointError(RuntimeError):
    """A file of a checkpoint is damaged or missing; the message names the first such file."""


class CheckpointManager:
    """Takes checkpoints of a training loop below ``path``, one per step, and restores them.

    ``path`` is a directory, or an address that fsspec supports (``gs://...``). A checkpoint is due every
    ``save_interval`` steps. With ``chkpt_on_preemption`` (default: True), one is also due at the next step after
    any process received SIGTERM, which then does not end the process. The ``max_to_keep`` newest checkpoints are
    kept (default: 0, which means all). Up to ``max_pending_async`` (default: 1) copies of the state wait in memory
    to be written, each by ``num_of_threads`` threads (default: 1). All processes of a job must call every method
    together. ``process_group`` must support CPU tensors (default: a new group of gloo).

    A save that is interrupted, by an error or the end of the process, does not change earlier checkpoints, not even
    one of the same step. Incomplete checkpoints of processes that died are removed when a manager is created for
    the path. Raises ValueError if a number is too small, and RuntimeError if a job of several processes has no
    process group, or if ``chkpt_on_preemption`` is set outside the main thread.
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
        # whether a process was asked to end, as all of them know since the step that they took a checkpoint at
        self.ending = False
        self.pg, self._signals = _groups(process_group)
        self._storage = Storage(self.base_path)
        # by the main thread, and so not through the group of those that write
        self._records: list[Record] = self._agreed(self._storage.tidied, self._signals)
        # one thread, and so one order of checkpoints in all processes
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._room = threading.Semaphore(max_pending_async)
        self._pending: list[Future[None]] = []
        if chkpt_on_preemption:
            preemption.watch()

    def should_save(self, step: int) -> bool:
        """Whether a checkpoint is due at ``step``. In a job, all processes must call it at every step."""
        asked = self.chkpt_on_preemption and self.reached_preemption(step)
        self.ending = self.ending or asked
        if asked:
            logger.warning("asked to end: taking a checkpoint at step %s", step)
        return asked or step % self.save_interval == 0

    def save(self, step: int, state_dict: StateDict, force: bool | None = False) -> bool:
        """Take a checkpoint if one is due at ``step`` or ``force`` is set, and wait until it is written.

        Returns whether a checkpoint was taken. Raises OSError if the disk is full, and the error of an earlier
        ``save_async``. Earlier checkpoints do not change.
        """
        if not (self.should_save(step) or force):
            return False
        state = self._state_to_write(state_dict)
        training.sync(wait=True)
        self._submit(lambda: self._save(step, state, SPMDSavePlanner())).result()
        self._raise_failures()
        return True

    def save_async(self, step: int, state_dict: StateDict, force: bool | None = False) -> bool:
        """Like ``save``, but return once the state is copied to the host, and write it in the background.

        Waits while ``max_pending_async`` copies are still to be written. This and ``join`` raise the error of an
        earlier one.
        """
        if not (self.should_save(step) or force):
            return False
        self._raise_failures()
        state = self._state_to_write(state_dict)
        training.sync(wait=True)
        self._room.acquire()
        try:
            flat, planner = _copied(state)
        except BaseException:
            self._room.release()
            raise
        future = self._submit(lambda: self._save(step, flat, planner))
        future.add_done_callback(lambda _: self._room.release())
        self._pending.append(future)
        return True

    def restore(self, step: int, state_dict: StateDict) -> None:
        """Read the checkpoint of ``step`` into ``state_dict``, in place.

        Waits for checkpoints that are still being written. Tensors keep their devices and shardings. Other values
        are replaced in ``state_dict``: pass it to ``load_state_dict`` of model and optimizer afterwards. Raises
        ValueError if there is no checkpoint of ``step``, and DamagedCheckpointError, before anything is read, if a
        file of it is damaged or missing.
        """
        record = self._submit(lambda: self._record_of(step)).result()
        self._read(record, state_dict, checked=False)

    def restore_latest(self, state_dict: StateDict) -> int | None:
        """Read the newest undamaged checkpoint into ``state_dict``, like ``restore``, and return its step.

        Returns None if there is no checkpoint. Damaged ones are named in the log. Raises DamagedCheckpointError if
        all of them are damaged.
        """
        record = self._submit(self._newest).result()
        if record is None:
            return None
        self._read(record, state_dict, checked=True)
        return record.step

    def all_steps(self) -> list[int]:
        """The steps of all complete checkpoints, in order."""
        return sorted({record.step for record in self._records})

    def join(self) -> None:
        """Wait until all pending checkpoints are written. Raises the error of the first one that failed."""
        for future in self._pending:
            future.exception()
        self._raise_failures()

    def reached_preemption(self, step: int) -> bool:
        """Whether any process was asked to end. Raises RuntimeError without ``chkpt_on_preemption``."""
        if not self.chkpt_on_preemption:
            raise RuntimeError(MSG_NOT_WATCHING)
        return preemption.reached(self._signals)

    # -- overridden by other kinds of managers -----------------------------------------------------

    def _state_to_write(self, state_dict: StateDict) -> StateDict:
        return state_dict

    def _read(self, record: Record, state_dict: StateDict, checked: bool) -> None:
        self._submit(lambda: self._restore(record, state_dict, checked)).result()

    # -- in the worker's thread --------------------------------------------------------------------

    def _submit(self, work: Callable[[], T]) -> Future[T]:
        return self._worker.submit(work)

    def _raise_failures(self) -> None:
        done = [future for future in self._pending if future.done()]
        self._pending = [future for future in self._pending if future not in done]
        for future in done:
            future.result()

    def _record_of(self, step: int) -> Record:
        records = [record for record in self._records if record.step == step]
        if not records:
            text = MSG_UNKNOWN_STEP.format(step=step, path=self.base_path, steps=self.all_steps())
            raise ValueError(text)
        return records[-1]

    def _newest(self) -> Record | None:
        """The newest checkpoint without a fault. Raises DamagedCheckpointError when all have one."""
        faults = []
        for record in sorted(self._records, key=lambda record: (record.step, record.time))[::-1]:
            fault = self._fault(record)
            if fault is None:
                return record
            faults.append(fault)
            text = MSG_DAMAGED.format(step=record.step, path=self.base_path, fault=fault)
            logger.warning(text)
        if faults:
            text = MSG_ALL_DAMAGED.format(path=self.base_path, faults="; ".join(faults))
            raise DamagedCheckpointError(text)
        return None

    def _fault(self, record: Record) -> str | None:
        """A description of a damaged file of a checkpoint, or None. Each process of the group checks some files."""
        if self.pg is None:
            return self._storage.fault(record)
        rank, count = dist.get_rank(self.pg), dist.get_world_size(self.pg)
        faults: list[str | None] = [None] * count
        dist.all_gather_object(faults, self._storage.fault(record, rank, count), self.pg)
        return next((fault for fault in faults if fault is not None), None)

    def _check(self, record: Record) -> None:
        fault = self._fault(record)
        if fault is not None:
            text = MSG_DAMAGED.format(step=record.step, path=self.base_path, fault=fault)
            raise DamagedCheckpointError(text)

    def _restore(self, record: Record, state_dict: StateDict, checked: bool) -> None:
        if not checked:
            self._check(record)
        with _without_group_warning():
            dcp.load(
                state_dict,
                storage_reader=self._storage.reader(record.name),
                planner=SPMDLoadPlanner(),
                process_group=self.pg,
                no_dist=self.pg is None,
            )

    def _save(self, step: int, state: StateDict, planner: SPMDSavePlanner) -> None:
        written = Written()
        name = ""
        progress = _Progress(step, writes=self._is_first)
        try:
            name = self._agreed(progress.meeting_after(lambda: self._storage.begin(step)), self.pg)
            writer = self._storage.writer(name, self.num_of_threads, written)
            writer.write_data = progress.writing_in(writer.write_data)  # type: ignore[method-assign]
            with _without_group_warning():
                dcp.save(
                    state,
                    storage_writer=writer,
                    planner=planner,
                    process_group=self.pg,
                    no_dist=self.pg is None,
                )
            record = Record(
                step, datetime.datetime.now(datetime.UTC), name, self._all_sums(written)
            )
            if self._is_first:
                progress.goes_on_to(flight_ring.WRITE)
            self._agreed(lambda: self._storage.complete(record), self.pg)
        except BaseException as error:  # torch's CheckpointException is no Exception
            if name and self._is_first:
                self._storage.abandon(name)
            full = (None, written.error) if written.error else _disk_is_full(error)
            if full is None:
                raise
            raise self._not_written(step, name, *full) from error
        finally:
            progress.end()
        self._keep(record)

    def _not_written(self, step: int, name: str, rank: int | None, error: OSError) -> OSError:
        """The error to raise if the disk of process ``rank`` of the group (None: of this one) is full."""
        who = ""
        if self.pg is not None:
            who = MSG_WHO.format(rank=dist.get_rank(self.pg) if rank is None else rank)
        path = self._storage.path(name or str(step))
        text = MSG_NOT_WRITTEN.format(
            step=step, path=path, error=error.strerror, who=who, steps=self.all_steps()
        )
        return OSError(error.errno, text)

    def _all_sums(self, written: Written) -> StateDict:
        """The checksums of the files of all processes; complete only in the first process."""
        if self.pg is None:
            return written.sums
        sums_by_process: list[StateValue] | None = (
            [None] * dist.get_world_size(self.pg) if self._is_first else None
        )
        dist.gather_object(written.sums, sums_by_process, dist.get_global_rank(self.pg, 0), self.pg)
        return {name: sum_ for sums in sums_by_process or () for name, sum_ in sums.items()}

    def _keep(self, record: Record) -> None:
        """Add a checkpoint that was written, and remove one of the same step and those beyond ``max_to_keep``."""
        replaced = [r for r in self._records if r.step == record.step]
        records = [r for r in self._records if r.step != record.step] + [record]
        excess = max(len(records) - self.max_to_keep, 0) if self.max_to_keep else 0
        if self._is_first:
            for former in [*replaced, *records[:excess]]:
                self._storage.remove(former.name)
        self._records = records[excess:]

    @property
    def _is_first(self) -> bool:
        return self.pg is None or dist.get_rank(self.pg) == 0

    def _agreed(self, choose: Callable[[], T], group: dist.ProcessGroup | None) -> T:
        """Let the group's first process call ``choose``, and return its result in all processes.

        If ``choose`` raises an error, the first process raises it, and the others raise an OSError with its number,
        or a RuntimeError.
        """
        if group is None:
            return choose()
        message: list[StateValue] = [None, None, None]
        failed: Exception | None = None
        if self._is_first:
            try:
                message[0] = choose()
            except (
                Exception
            ) as error:  # tell the other processes, which wait for the result, before raising it
                failed = error
                message[1:] = str(error), getattr(error, "errno", None)
        dist.broadcast_object_list(message, dist.get_global_rank(group, 0), group)
        choice, text, number = message
        if failed is not None:
            raise failed
        if text is not None and number is not None:
            raise OSError(number, text)
        if text is not None:
            raise RuntimeError(MSG_FIRST.format(error=text))
        return choice


def _disk_is_full(error: BaseException) -> tuple[int, OSError] | None:
    """The rank of the process whose disk is full, and its error; None if the error has another reason.

    An error outside of torch's collective steps is that of the first process, which alone writes then.
    """
    errors: dict[int, BaseException] = {0: error}
    if isinstance(error, dcp.api.CheckpointException):
        errors = {rank: failure[0] for rank, failure in error.failures.items()}
    full = ((n, e) for n, e in errors.items() if isinstance(e, OSError) and e.errno in _FULL)
    return next(full, None)


class _Progress:
    """Tells the flight recorder the phase of a save: it waits for the other processes, writes, and waits again."""

    def __init__(self, step: int, writes: bool) -> None:
        self._what = MSG_PROGRESS.format(step=step)
        kind = flight_ring.WRITE if writes else flight_ring.MEET
        self._record = flight_ring.begin(kind, self._what)

    def goes_on_to(self, kind: str) -> None:
        """End the current phase, and begin the next one, of ``kind``: writing or waiting."""
        flight_ring.end(self._record)
        self._record = flight_ring.begin(kind, self._what)

    def meeting_after(self, write: Callable[Arguments, T]) -> Callable[Arguments, T]:
        """``write``, followed by the phase of waiting for the others."""

        def run(*args: Arguments.args, **named: Arguments.kwargs) -> T:
            result = write(*args, **named)
            self.goes_on_to(flight_ring.MEET)
            return result

        return run

    def writing_in(self, write: Callable[Arguments, T]) -> Callable[Arguments, T]:
        """``write`` as the phase of writing, followed by that of waiting for the others."""
        waits_then = self.meeting_after(write)

        def run(*args: Arguments.args, **named: Arguments.kwargs) -> T:
            self.goes_on_to(flight_ring.WRITE)
            return waits_then(*args, **named)

        return run

    def end(self) -> None:
        """End the last phase."""
        flight_ring.end(self._record)


def _check_numbers(interval: int, keep: int, pending: int, threads: int) -> None:
    least = {"save_interval": (interval, 1), "max_to_keep": (keep, 0)}
    least |= {"max_pending_async": (pending, 1), "num_of_threads": (threads, 1)}
    for name, (got, wanted) in least.items():
        if got < wanted:
            raise ValueError(MSG_POSITIVE.format(name=name, got=got, wanted=f"at least {wanted}"))


def _groups(
    given: dist.ProcessGroup | None,
) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """The group that writes checkpoints, and one for the main thread.

    The writing thread and the main thread must not share a group: their collectives could be ordered differently in
    different processes.
    """
    if not dist.is_initialized():
        if runtime.process_count() > 1:
            raise RuntimeError(MSG_NO_GROUP.format(count=runtime.process_count()))
        return None, None
    ranks = None if given is None else dist.get_process_group_ranks(given)
    writing = given or dist.new_group(backend="gloo")
    return writing, dist.new_group(ranks, backend="gloo")


def _copied(state_dict: StateDict) -> tuple[dict[str, object], SPMDSavePlanner]:
    """A state dict's values on the host, flat, and the planner that writes them."""
    flattening = dcp.DefaultSavePlanner()
    flattening.set_up_planner(state_dict)
    flat = {name: _on_host(value) for name, value in flattening.state_dict.items()}
    return flat, SPMDSavePlanner(flattening.mappings)


def _on_host(value: StateValue) -> StateValue:
    writable = parts.to_write(value)
    if isinstance(writable, parts.DeviceParts | parts.RowsToWrite):
        return writable.copied()
    if isinstance(writable, torch.Tensor):
        return writable.clone() if writable is value else writable
    return copy.deepcopy(writable)


@contextlib.contextmanager
def _without_group_warning() -> Iterator[None]:
    """Suppress torch's warning that it assumes a single process because there is no group, which is right here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_NO_GROUP_WARNING)
        yield
