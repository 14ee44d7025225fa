"""Converts the state of a run, such as modules and optimizers, to values for ``torch.distributed.checkpoint``.

A state without tensors (schedules, positions in data) is saved as one value, so that its structure may be different
when it is loaded. States that are not the same in all processes are saved by each process.
"""

from __future__ import annotations

import hashlib
import inspect
import random
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from xla_core.contract import checkpoint_marks
from xla_core.extension_api import runtime, tensors, training
from xla_spmd.checkpoint.optimizer import prime_optimizer
from xla_spmd.checkpoint.parts import Rows
from xla_spmd.checkpoint.state_dicts import StateDict, StateValue

RANDOM: Final = "random_states"

MSG_RESERVED: Final = (
    f"a run's state cannot have the name {RANDOM!r}, under which the random states are saved"
)
MSG_OTHER_COUNT: Final = (
    "{name!r} has its own state in every process. {saved} processes wrote it, and {now} cannot read it: continue "
    "with {saved} processes, or use an object whose state is the same in all processes"
)
MSG_FROZEN: Final = (
    "the checkpoint has a state of {name!r} for its parameters {indices}, which need no gradient now; call "
    "requires_grad_() on them until it is read, or give the optimizer the same parameters as when it was saved"
)
MSG_CLOSURE: Final = (
    "the state of {kind} cannot be divided among processes that hold parts of the parameters; save each process's "
    "own state with PerProcess(optimizer)"
)
MSG_ABSENT: Final = "the checkpoint has nothing of the name {name!r}; it has {names}"


class PerProcess:
    """Wraps an object ``value`` whose ``state_dict()`` differs between processes, such as a loader of own data.

    Each process writes the state of its own object and reads it again, so that the run must be resumed with the
    same number of processes.
    """

    def __init__(self, value: object) -> None:
        self.value = value


def place() -> tuple[int, int]:
    """The number of this process among those that write a checkpoint together, and their count."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def to_write(state: Mapping[str, StateValue]) -> StateDict:
    """The values to write for ``state``, and the process's random states.

    Raises ValueError if ``state`` uses the name under which random states are saved.
    """
    if RANDOM in state:
        raise ValueError(MSG_RESERVED)
    rank, count = place()
    written: StateDict = {RANDOM: {str(rank): (_random_states(),)}}
    for name, value in state.items():
        if _is_per_process(value):
            written[name] = {f"process {rank}": (count, _on_host(_unwrapped(value).state_dict()))}
        else:
            written[name] = _values(value)
    return written


def to_load(state: Mapping[str, StateValue], keys: Mapping[str, StateValue]) -> StateDict:
    """The state dict into which a checkpoint with these ``keys`` is read.

    Optimizers without state get one, if the checkpoint has one for them. Raises KeyError if the checkpoint has no
    key for a name in ``state``.
    """
    rank, _ = place()
    # a process that the saved run did not have derives its random states from those of process 0
    writer = str(rank) if f"{RANDOM}.{rank}" in keys else "0"
    targets: StateDict = {RANDOM: {writer: None}}
    for name, value in state.items():
        own_keys = [key for key in keys if key == name or key.startswith(f"{name}.")]
        if not own_keys:
            names = sorted({key.partition(".")[0] for key in keys})
            raise KeyError(MSG_ABSENT.format(name=name, names=names))
        if _is_per_process(value):
            own = f"process {rank}"
            targets[name] = {own if f"{name}.{own}" in keys else "process 0": None}
        elif isinstance(keys.get(name), BytesStorageMetadata):
            targets[name] = None
        else:
            targets[name] = (
                _of_optimizer(name, value, own_keys)
                if isinstance(value, torch.optim.Optimizer)
                else _values(value)
            )
    return targets


def _of_optimizer(name: str, optimizer: torch.optim.Optimizer, keys: Sequence[str]) -> StateDict:
    """The state dict into which an optimizer's state is read, for the parameters that had a state when saved.

    Parameters that never had a gradient have none. Raises ValueError if a parameter had a state and needs no
    gradient any more.
    """
    start = f"{name}.state."
    saved = {key[len(start) :].partition(".")[0] for key in keys if key.startswith(start)}
    if saved and not optimizer.state:
        prime_optimizer(optimizer)
    target: StateDict = _values(optimizer)
    without_state = saved - {str(index) for index in target["state"]}
    if without_state:
        raise ValueError(MSG_FROZEN.format(name=name, indices=sorted(map(int, without_state))))
    target["state"] = {i: entries for i, entries in target["state"].items() if str(i) in saved}
    return target


def take_over(state: StateDict, loaded: Mapping[str, StateValue]) -> None:
    """Load the states that were read into the objects of ``state``, and finally set the process's random states.

    Raises ValueError if another number of processes saved a state that differs between processes.
    """
    rank, count = place()
    for name, value in state.items():
        read = loaded[name]
        if _is_per_process(value):
            ((_, (saved_count, own)),) = read.items()
            if saved_count != count:
                raise ValueError(MSG_OTHER_COUNT.format(name=name, saved=saved_count, now=count))
            _unwrapped(value).load_state_dict(own)
            continue
        is_one_value = isinstance(read, tuple)
        read = read[0] if is_one_value else _with_tensors(read)
        if hasattr(value, "load_state_dict"):
            value.load_state_dict(read)
            if isinstance(value, torch.optim.Optimizer) and not is_one_value:
                _undo_casts(value, read["state"])
        else:
            state[name] = read
    ((writer, (states,)),) = loaded[RANDOM].items()
    _set_random_states(states if writer == str(rank) else _derived(states, rank))


def _undo_casts(optimizer: torch.optim.Optimizer, state: Mapping[int, StateDict]) -> None:
    """Restore tensors of the state that torch's ``load_state_dict`` has cast to a parameter's dtype or moved.

    It casts all tensors but ``step``: float32 averages of bfloat16 parameters would lose half of their bits.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, entries in state.items():
        own = optimizer.state[parameters[index]]
        for key, item in entries.items():
            if _is_tensor(item) and (own[key].dtype, own[key].device) != (item.dtype, item.device):
                own[key] = item


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step needs the user's closure (LBFGS), so that ``prime_optimizer`` cannot create the state."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _is_per_process(value: object) -> bool:
    return isinstance(value, PerProcess) or getattr(value, checkpoint_marks.OWN_STATE, False)


def _unwrapped(value: object) -> StateValue:
    return value.value if isinstance(value, PerProcess) else value


def _values(value: StateValue) -> StateValue:
    """The state of an object. Tensors stay where they are, and parts of sharded parameters become ``Rows``.

    A state without tensors, or one that only a step with a closure can create, becomes a tuple of one item.
    """
    if isinstance(value, nn.Module):
        return {name: _part(t, t) for name, t in value.state_dict(keep_vars=True).items()}
    state = value.state_dict() if hasattr(value, "state_dict") else value
    if isinstance(value, torch.optim.Optimizer):
        parameters = [p for group in value.param_groups for p in group["params"]]
        if _needs_closure(value):
            if any(getattr(p, checkpoint_marks.ROWS_OF, None) is not None for p in parameters):
                raise ValueError(MSG_CLOSURE.format(kind=type(value).__name__))
            return (_on_host(state),)
        state["state"] = {
            index: {key: _part(item, parameters[index]) for key, item in entries.items()}
            for index, entries in state["state"].items()
        }
        return state
    if _is_tensor(state) or (
        isinstance(state, (dict, list)) and tensors.collect(state, _is_tensor)
    ):
        return state
    return (_on_host(state),)  # torch saves a tuple as one value, whatever it contains


def _part(value: StateValue, parameter: StateValue) -> StateValue:
    """``value``, as ``Rows`` if it has the shape of ``parameter`` and this replica holds only a part of that."""
    rows_of = getattr(parameter, checkpoint_marks.ROWS_OF, None)
    if rows_of is None or not _is_tensor(value) or value.shape != parameter.shape:
        return value.detach() if _is_tensor(value) else value
    whole, start = rows_of
    return Rows(value, whole, start)


def _with_tensors(state: StateValue) -> StateValue:
    """A state with tensors in place of ``Rows``, as the object's ``load_state_dict`` takes it."""
    if isinstance(state, Rows):
        return state.tensor
    if isinstance(state, Mapping):
        return {name: _with_tensors(item) for name, item in state.items()}
    return [_with_tensors(item) for item in state] if isinstance(state, list) else state


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _on_host(state: object) -> StateValue:
    return tensors.map_selected(
        state, lambda v: isinstance(v, tensors.XLATensor), lambda t: t.detach().cpu()
    )


# --- random states ------------------------------------------------------------------------------


def _random_states() -> StateDict:
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "xla": [training.random_state(device.index) for device in runtime.devices()],
    }


def _set_random_states(states: Mapping[str, StateValue]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    for device, number in zip(runtime.devices(), states["xla"], strict=False):
        training.set_random_state(number, device.index)


def _derived(states: Mapping[str, StateValue], rank: int) -> StateDict:
    """Random states for process ``rank``, which the saved run did not have, derived from those of process 0.

    They are the same each time, and differ from those of all other processes.
    """
    content = f"{rank} {states['xla']}".encode() + states["torch"].numpy().tobytes()
    digest = hashlib.sha256(content).digest()
    numbers = [int.from_bytes(digest[i : i + 8], "little") for i in range(0, 32, 8)]
    return {
        "python": random.Random(numbers[0]).getstate(),
        "numpy": np.random.RandomState(numbers[1] % 2**32).get_state(),
        "torch": torch.Generator().manual_seed(numbers[2] >> 1).get_state(),
        "xla": [numbers[3] + index for index in range(len(runtime.devices()))],
    }
