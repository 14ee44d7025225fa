"""The state of a run as values for ``torch.distributed.checkpoint``: modules, optimizers, random states, the rest.

What has no tensors in it (schedules, positions in data) is one value, whatever its shape is when it is read
again. Of what each process has for itself every process writes its own.
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

MSG_RESERVED: Final = f"a run's state cannot have the name {RANDOM!r}, which random states have"
MSG_OTHER_COUNT: Final = (
    "{name!r} has a state in every process, which {saved} of them wrote and {now} cannot read; go on with {saved} "
    "processes, or keep it in an object whose state is the same in all"
)
MSG_FROZEN: Final = (
    "the checkpoint has a state of {name!r} for its parameters {indices}, which need no gradient now; let them "
    "need one (requires_grad_) until it is read, or give the optimizer the parameters that it had"
)
MSG_CLOSURE: Final = (
    "the state of {kind} cannot be divided among processes that have parts of the parameters; keep each one's own "
    "with PerProcess(optimizer)"
)
MSG_ABSENT: Final = "the checkpoint has nothing of the name {name!r}; it has {names}"


class PerProcess:
    """An object whose ``state_dict()`` every process of a job has for itself, such as a loader of its own data.

    Each process writes its own and reads it again; so the job has to go on with as many processes.
    """

    def __init__(self, value: object) -> None:
        self.value = value


def place() -> tuple[int, int]:
    """This process's number among those that write one checkpoint, and how many they are."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def to_write(state: Mapping[str, StateValue]) -> StateDict:
    """The values that stand for ``state``, and the process's random states. Raises ValueError for their name."""
    if RANDOM in state:
        raise ValueError(MSG_RESERVED)
    rank, count = place()
    written: StateDict = {RANDOM: {str(rank): (_random_states(),)}}
    for name, value in state.items():
        if _is_own(value):
            written[name] = {f"process {rank}": (count, _on_host(_inside(value).state_dict()))}
        else:
            written[name] = _values(value)
    return written


def to_load(state: Mapping[str, StateValue], keys: Mapping[str, StateValue]) -> StateDict:
    """What a checkpoint with these ``keys`` is read into; optimizers get the state that there is something for.

    Raises KeyError for a name that the checkpoint lacks.
    """
    rank, _ = place()
    own = str(rank) if f"{RANDOM}.{rank}" in keys else "0"
    targets: StateDict = {RANDOM: {own: None}}
    for name, value in state.items():
        inside = [key for key in keys if key == name or key.startswith(f"{name}.")]
        if not inside:
            names = sorted({key.partition(".")[0] for key in keys})
            raise KeyError(MSG_ABSENT.format(name=name, names=names))
        if _is_own(value):
            written = f"process {rank}"
            targets[name] = {written if f"{name}.{written}" in keys else "process 0": None}
        elif isinstance(keys.get(name), BytesStorageMetadata):
            targets[name] = None
        else:
            targets[name] = (
                _of_optimizer(name, value, inside)
                if isinstance(value, torch.optim.Optimizer)
                else _values(value)
            )
    return targets


def _of_optimizer(name: str, optimizer: torch.optim.Optimizer, keys: Sequence[str]) -> StateDict:
    """What an optimizer's state is read into: only the parameters that had a state when it was saved.

    Those that never had a gradient have none. Raises ValueError where there is one for a parameter that needs no
    gradient any more.
    """
    start = f"{name}.state."
    saved = {key[len(start) :].partition(".")[0] for key in keys if key.startswith(start)}
    if saved and not optimizer.state:
        prime_optimizer(optimizer)
    target: StateDict = _values(optimizer)
    homeless = saved - {str(index) for index in target["state"]}
    if homeless:
        raise ValueError(MSG_FROZEN.format(name=name, indices=sorted(map(int, homeless))))
    target["state"] = {i: entries for i, entries in target["state"].items() if str(i) in saved}
    return target


def take_over(state: StateDict, loaded: Mapping[str, StateValue]) -> None:
    """Give the objects of ``state`` what was read, and the process its random states, last."""
    rank, count = place()
    for name, value in state.items():
        got = loaded[name]
        if _is_own(value):
            ((_, (saved, own)),) = got.items()
            if saved != count:
                raise ValueError(MSG_OTHER_COUNT.format(name=name, saved=saved, now=count))
            _inside(value).load_state_dict(own)
            continue
        is_one_value = isinstance(got, tuple)
        got = got[0] if is_one_value else _tensors_again(got)
        if hasattr(value, "load_state_dict"):
            value.load_state_dict(got)
            if isinstance(value, torch.optim.Optimizer) and not is_one_value:
                _undo_casts(value, got["state"])
        else:
            state[name] = got
    ((owner, (states,)),) = loaded[RANDOM].items()
    _set_random_states(states if owner == str(rank) else _derived(states, rank))


def _undo_casts(optimizer: torch.optim.Optimizer, state: Mapping[int, StateDict]) -> None:
    """Give back what torch's ``load_state_dict`` has cast to a parameter's dtype, or moved to its device.

    It does so with all tensors but ``step``: float32 averages of bfloat16 parameters would lose half of their bits.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, entries in state.items():
        own = optimizer.state[parameters[index]]
        for key, item in entries.items():
            if _is_tensor(item) and (own[key].dtype, own[key].device) != (item.dtype, item.device):
                own[key] = item


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether no step can be made without the user's closure (LBFGS), and so no state to read into."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _is_own(value: object) -> bool:
    return isinstance(value, PerProcess) or getattr(value, checkpoint_marks.OWN_STATE, False)


def _inside(value: object) -> StateValue:
    return value.value if isinstance(value, PerProcess) else value


def _values(value: StateValue) -> StateValue:
    """The state of an object: tensors where they are, the parts of sharded ones as such."""
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
    return (_on_host(state),)  # a tuple is one value to torch, whatever is in it


def _part(value: StateValue, parameter: StateValue) -> StateValue:
    """``value``; as part of a whole, if it lies as a parameter does of which this replica has a part."""
    rows_of = getattr(parameter, checkpoint_marks.ROWS_OF, None)
    if rows_of is None or not _is_tensor(value) or value.shape != parameter.shape:
        return value.detach() if _is_tensor(value) else value
    whole, start = rows_of
    return Rows(value, whole, start)


def _tensors_again(got: StateValue) -> StateValue:
    """A state as the object itself has it, with tensors in place of their parts."""
    if isinstance(got, Rows):
        return got.tensor
    if isinstance(got, Mapping):
        return {name: _tensors_again(item) for name, item in got.items()}
    return [_tensors_again(item) for item in got] if isinstance(got, list) else got


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
    """Random states for a process that the run did not have before: the same ones each time, no other process's."""
    content = f"{rank} {states['xla']}".encode() + states["torch"].numpy().tobytes()
    digest = hashlib.sha256(content).digest()
    numbers = [int.from_bytes(digest[i : i + 8], "little") for i in range(0, 32, 8)]
    return {
        "python": random.Random(numbers[0]).getstate(),
        "numpy": np.random.RandomState(numbers[1] % 2**32).get_state(),
        "torch": torch.Generator().manual_seed(numbers[2] >> 1).get_state(),
        "xla": [numbers[3] + index for index in range(len(runtime.devices()))],
    }
