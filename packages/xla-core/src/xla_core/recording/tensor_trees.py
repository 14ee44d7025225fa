"""Finds the tensors inside Python containers, changes them, and moves them between devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch

from xla_core.recording.xla_tensor import XLATensor
from xla_core.torch_bridge.operands import Tree

MSG_KEYS: Final = "Keys: {keys} are missing from input_sharding."


class DataWrapper:
    """Base class of objects that hold tensors; subclasses define ``get_tensors`` and ``from_tensors``."""

    def get_tensors(self) -> list[torch.Tensor]:
        """The tensors inside. A subclass overrides it."""
        raise NotImplementedError(f"{type(self).__name__} has to define get_tensors()")

    def from_tensors(self, tensors: Sequence[torch.Tensor]) -> DataWrapper:
        """The same object with these tensors. A subclass overrides it."""
        raise NotImplementedError(f"{type(self).__name__} has to define from_tensors()")


def map_tensors(data: Tree, change: Callable[[XLATensor], object]) -> Tree:
    """A copy of ``data`` with ``change`` applied to each ``xla`` tensor.

    It visits mappings, lists, tuples, named tuples, sets, dataclasses and ``DataWrapper``, and keeps their
    types. A container without ``xla`` tensors is returned as it is.
    """
    return map_selected(data, lambda item: isinstance(item, XLATensor), change)


def map_selected(
    data: Tree, select: Callable[[Tree], bool], change: Callable[[Tree], object]
) -> Tree:
    """``data`` with ``change(item)`` in place of each item inside for which ``select(item)`` is true.

    ``data`` is made of mappings, lists, tuples, sets, dataclasses and ``DataWrapper``. Containers keep their
    types; a container in which nothing changes is returned as it is.
    """
    if select(data):
        return change(data)
    if isinstance(data, Mapping):
        changed = {k: map_selected(v, select, change) for k, v in data.items()}
        return data if all(changed[k] is data[k] for k in changed) else _like(data, changed)
    if isinstance(data, (list, tuple, set, frozenset)):
        items = [map_selected(item, select, change) for item in data]
        if all(new is old for new, old in zip(items, data, strict=True)):
            return data
        return type(data)(*items) if hasattr(data, "_fields") else type(data)(items)
    if isinstance(data, DataWrapper):
        return data.from_tensors([map_selected(t, select, change) for t in data.get_tensors()])
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        fields = {f.name: getattr(data, f.name) for f in dataclasses.fields(data) if f.init}
        changed = {k: map_selected(v, select, change) for k, v in fields.items()}
        return (
            data
            if all(changed[k] is fields[k] for k in fields)
            else dataclasses.replace(data, **changed)
        )
    return data


def _like(data: Tree, changed: dict[Tree, Tree]) -> object:
    copied = type(data)(changed)
    # state_dict() keeps its version information in an attribute of the OrderedDict
    for name, value in getattr(data, "__dict__", {}).items():
        setattr(copied, name, value)
    return copied


def collect(data: object, select: Callable[[object], bool]) -> list[Tree]:
    """The items inside ``data`` for which ``select`` is true, in order."""
    selected: list[object] = []

    def keep(item: object) -> object:
        selected.append(item)
        return item

    map_selected(data, select, keep)
    return selected


def listed_on_device(
    datas: object, device: torch.device | str, input_sharding: object = None
) -> object:
    """``send_cpu_data_to_device`` as in torch_xla: returns a tensor in a list, and a tuple as a list.

    ``datas``, ``device`` and ``input_sharding`` (default: none) are as there, and so are its errors.
    """
    if isinstance(datas, torch.Tensor):
        datas = [datas]
    sent = send_cpu_data_to_device(datas, device, input_sharding)
    return list(sent) if isinstance(sent, tuple) else sent


class ToXlaTensorArena:
    """Converts many tensors inside nested containers with one call.

    ``select_fn(value) -> bool`` chooses values, ``convert_fn(list) -> list`` converts them all.
    """

    def __init__(
        self,
        convert_fn: Callable[[list[Tree]], Sequence[object]],
        select_fn: Callable[[Tree], bool],
    ) -> None:
        self._convert = convert_fn
        self._select = select_fn

    def transform(self, inputs: object) -> object:
        """``inputs`` with the chosen values replaced by the converted ones."""
        selected = collect(inputs, self._select)
        if not selected:
            return inputs
        converted = iter(self._convert(selected))
        return map_selected(inputs, self._select, lambda _item: next(converted))


def _on_cpu(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "cpu"


def send_cpu_data_to_device(
    datas: Tree, device: torch.device | str, input_sharding: Tree = None
) -> object:
    """``datas`` with its CPU tensors moved to ``device``; containers keep their types.

    ``input_sharding`` is a ``torch_xla.distributed.spmd.ShardingSpec`` or another object with its
    ``can_apply`` and ``apply`` (in place), applied to each tensor that it can apply to; or a dict of
    them by the keys of ``datas``. The default leaves tensors whole.

    Raises TypeError if it is a dict and ``datas`` is not, and KeyError for a key of ``datas`` that it lacks.
    """
    if isinstance(input_sharding, Mapping):
        if not isinstance(datas, Mapping):
            raise TypeError(
                f"input_sharding is a dict, so the batch must be one too; it is a {type(datas).__name__}"
            )
        missing = [key for key in datas if key not in input_sharding]
        if missing:
            raise KeyError(MSG_KEYS.format(keys=missing))
        return _like(
            datas,
            {k: send_cpu_data_to_device(v, device, input_sharding[k]) for k, v in datas.items()},
        )

    def convert(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        if input_sharding is None:
            return [t.to(device) for t in tensors]
        send = getattr(input_sharding, "send", None)
        if send is not None:
            return [send(t, device) for t in tensors]
        sent = [t.to(device) for t in tensors]
        for tensor in sent:
            if input_sharding.can_apply(tensor):
                input_sharding.apply(tensor)
        return sent

    return ToXlaTensorArena(convert, _on_cpu).transform(datas)
