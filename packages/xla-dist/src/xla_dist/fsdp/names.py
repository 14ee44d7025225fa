"""The names of sharded parameters, and the module between the wrapper and what it wraps.

State dicts and shard metadata are called and laid out as torch_xla 2.9's, so that checkpoints of either can
be consolidated by both: a part is ``[PREFIX.]_fsdp_shard`` and the parameter's path, with a separator that is
no dot.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn

from xla_core.extension_api.operators import Tree

SHARD: Final = "_fsdp_shard"
SEPARATOR: Final = "_FSDP_SHARD_SEPARATOR_"
WRAPPED: Final = "_fsdp_wrapped_module."
INNER: Final = "_fpw_module."
FLAT: Final = "flat_param_"

FlatMetadata = tuple[list[str], list[torch.Size], list[int]]
"""Of a flat parameter: names, shapes and numbers of elements of those in it."""


def shard_name(path: str) -> str:
    """The name of the part of a parameter at ``path`` inside the wrapping module."""
    return f"{SHARD}.{path}".replace(".", SEPARATOR)


def original_name(name: str) -> str:
    """A name as the module that was wrapped has it."""
    return name.replace(WRAPPED, "").replace(INNER, "")


class Inner(nn.Module):
    """Holds the wrapped module, and its parameters in one where they are flattened.

    Missing attributes and indices are the wrapped module's; state dicts do not show this module.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._fpw_module = module
        self.flat: list[FlatMetadata] = []
        self.register_state_dict_post_hook(_without_inner)
        self.register_load_state_dict_pre_hook(_with_inner)

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        return self._fpw_module

    def flatten(self, named: Mapping[str, nn.Parameter]) -> None:
        """Register the values of these parameters as the one parameter ``flat_param_N``."""
        parameters = list(named.values())
        whole = torch.cat([p.detach().reshape(-1) for p in parameters])
        number = len(self.flat)
        trains = parameters[0].requires_grad
        self.register_parameter(f"{FLAT}{number}", nn.Parameter(whole, requires_grad=trains))
        sizes = [p.size() for p in parameters]
        self.flat.append((list(named), sizes, [size.numel() for size in sizes]))

    def forward(self, *args: object, **kwargs: object) -> Tree:
        """The wrapped module's."""
        return self._fpw_module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_fpw_module":
                raise
            return getattr(self._fpw_module, name)

    def __getitem__(self, key: object) -> Any:
        return self._fpw_module[key]  # type: ignore[index]


def _renamed(state: dict[str, object], old: str, new: str, spared: Sequence[str] = ()) -> None:
    for key in [k for k in state if k.startswith(old)]:
        if not key.removeprefix(old).startswith(tuple(spared)):
            state[new + key.removeprefix(old)] = state.pop(key)


def _without_inner(
    module: nn.Module, state: dict[str, object], prefix: str, _metadata: object
) -> None:
    _renamed(state, prefix + INNER, prefix)


def _with_inner(module: nn.Module, state: dict[str, object], prefix: str, *_more: object) -> None:
    if not any(key.startswith(prefix + INNER) for key in state):
        _renamed(state, prefix, prefix + INNER, (FLAT,))


def pieces(flat: torch.Tensor, metadata: FlatMetadata) -> list[tuple[str, torch.Tensor]]:
    """The parameters in a flat one, by name; views."""
    names, sizes, counts = metadata
    starts = [0, *itertools.accumulate(counts)]
    return [
        (name, flat[start : start + count].view(size))
        for name, size, start, count in zip(names, sizes, starts, counts, strict=False)
    ]
