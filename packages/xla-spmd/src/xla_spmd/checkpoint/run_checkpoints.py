"""``RunCheckpoints``: all that a run needs to go on where it was, in one checkpoint."""

from __future__ import annotations

from xla_spmd.checkpoint import run_state
from xla_spmd.checkpoint.manager import CheckpointManager
from xla_spmd.checkpoint.state_dicts import StateDict
from xla_spmd.checkpoint.storage import Record


class RunCheckpoints(CheckpointManager):
    """A ``CheckpointManager`` whose states are the objects of a run, with the random states of every process.

    ``save(step, {"model": model, "optimizer": optimizer, "schedule": schedule, "data": loader})``: each value is
    an object with ``state_dict()`` and ``load_state_dict()``, or something that can be pickled. All processes
    give the same names. Tensors may be whole in every process, parts of ``XlaFullyShardedDataParallel`` or split
    over a mesh; a run goes on with fewer or more processes and another mesh. A state without tensors has to be
    the same in all processes (see ``PerProcess``).

    The parameters are those of ``CheckpointManager``.
    """

    def resume(self, state: StateDict) -> int:
        """Read the newest checkpoint that is not damaged into the objects of ``state``; the step to go on with.

        0, with nothing changed, where there is none. What is no object is replaced in ``state``.
        """
        step = self.restore_latest(state)
        return 0 if step is None else step + 1

    def _state_to_write(self, state_dict: StateDict) -> StateDict:
        return run_state.to_write(state_dict)

    def _read(self, record: Record, state_dict: StateDict, checked: bool) -> None:
        if not checked:
            self._submit(lambda: self._check(record)).result()
        keys = self._storage.reader(record.name).read_metadata().state_dict_metadata
        loaded = run_state.to_load(state_dict, keys)
        super()._read(record, loaded, checked=True)
        run_state.take_over(state_dict, loaded)
