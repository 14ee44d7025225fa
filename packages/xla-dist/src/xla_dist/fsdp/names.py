"""The names of sharded parameters, and ``Inner``, the module between the wrapper and the wrapped module.

State dicts and shard metadata have the names and the structure of torch_xla 2.9's, so that either library can
consolidate the other's checkpoints. The name of a part is ``[PREFIX.]_fsdp_shard`` followed by the parameter's
path, in which ``SEPARATOR`` replaces the dots.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import nn

from xla_core.contract.foreign_values import Attribute
from xla_core.extension_api.operators import Tree

SHARD: Final = "_fsdp_shard"
SEPARATOR: Final = "_FSDP_SHARD_SEPARATOR_"
WRAPPED: Final = "_fsdp_wrapped_module."
INNER: Final = "_fpw_module."
FLAT: Final = "flat_param_"

FlatMetadata = tuple[list[str], list[torch.Size], list[int]]
"""The names, shapes and numbers of elements of the parameters in a flat parameter."""


def shard_name(path: str) -> str:
    """The name of a parameter's part; ``path`` is the parameter's path in the wrapper."""
    return f"{SHARD}.{path}".replace(".", SEPARATOR)


def original_name(name: str) -> str:
    """The name that a parameter has in the model without wrappers."""
    return name.replace(WRAPPED, "").replace(INNER, "")


class Inner(nn.Module):
    """Holds the wrapped module, and its flat parameters if parameters are flattened.

    Attributes and indices that it lacks are those of the wrapped module. State dicts do not contain its name.
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
        """Register one parameter, ``flat_param_N``, with the values of these parameters one after the other."""
        parameters = list(named.values())
        whole = torch.cat([p.detach().reshape(-1) for p in parameters])
        number = len(self.flat)
        trains = parameters[0].requires_grad
        self.register_parameter(f"{FLAT}{number}", nn.Parameter(whole, requires_grad=trains))
        sizes = [p.size() for p in parameters]
        self.flat.append((list(named), sizes, [size.numel() for size in sizes]))

    def forward(self, *args: object, **kwargs: object) -> Tree:
        """Call the wrapped module."""
        return self._fpw_module(*args, **kwargs)

    def __getattr__(self, name: str) -> Attribute:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_fpw_module":
                raise
            return getattr(self._fpw_module, name)

    def __getitem__(self, key: object) -> Attribute:
        return self._fpw_module[key]  # type: ignore[index]


def _rename(state: dict[str, object], old: str, new: str, except_for: Sequence[str] = ()) -> None:
    """Replace the prefix ``old`` of keys by ``new``, unless one of ``except_for`` follows it."""
    for key in [k for k in state if k.startswith(old)]:
        if not key.removeprefix(old).startswith(tuple(except_for)):
            state[new + key.removeprefix(old)] = state.pop(key)


def _without_inner(
    module: nn.Module, state: dict[str, object], prefix: str, _metadata: object
) -> None:
    _rename(state, prefix + INNER, prefix)


def _with_inner(module: nn.Module, state: dict[str, object], prefix: str, *_more: object) -> None:
    if not any(key.startswith(prefix + INNER) for key in state):
        _rename(state, prefix, prefix + INNER, (FLAT,))


def pieces(flat: torch.Tensor, metadata: FlatMetadata) -> list[tuple[str, torch.Tensor]]:
    """The names of the parameters in a flat parameter, with their values, which are views of it."""
    names, sizes, counts = metadata
    starts = [0, *itertools.accumulate(counts)]
    return [
        (name, flat[start : start + count].view(size))
        for name, size, start, count in zip(names, sizes, starts, counts, strict=False)
    ]
