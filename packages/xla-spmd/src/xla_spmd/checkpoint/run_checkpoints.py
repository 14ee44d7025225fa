"""``RunCheckpoints``: checkpoints with everything that a run needs to continue where it was."""

from __future__ import annotations

from xla_spmd.checkpoint import run_state
from xla_spmd.checkpoint.manager import CheckpointManager
from xla_spmd.checkpoint.state_dicts import StateDict
from xla_spmd.checkpoint.storage import Record


class RunCheckpoints(CheckpointManager):
    """A ``CheckpointManager`` that saves the objects of a run, together with the random states of all processes.

    Call ``save(step, {"model": model, "optimizer": optimizer, "schedule": schedule, "data": loader})``. Each value
    is an object with ``state_dict()`` and ``load_state_dict()``, or something that can be pickled. All processes
    must use the same names. Tensors may be whole in every process, parts of ``XlaFullyShardedDataParallel``, or
    split over a mesh. A run can continue with another number of processes and another mesh. A state without tensors
    must be the same in all processes (otherwise see ``PerProcess``).

    The parameters are those of ``CheckpointManager``.
    """

    def resume(self, state: StateDict) -> int:
        """Read the newest undamaged checkpoint into the objects of ``state``, and return the step to continue with.

        Values without ``load_state_dict()`` are replaced in ``state``. Returns 0 and changes nothing if there is no
        checkpoint. Raises DamagedCheckpointError if all of them are damaged.
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
