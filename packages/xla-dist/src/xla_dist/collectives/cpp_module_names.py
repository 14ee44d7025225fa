"""The collectives of torch_xla's C++ module ``_XLAC``: those of ``xm``, with tokens that order them.

A token is a place in the order of a device's collectives. ``_get_all_reduce_token`` returns the place of the
collective that was recorded last, and a collective returns its own place. Here, each collective runs after all that
were recorded before it on its device, so an order that a token asks for always holds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

import torch

from xla_core.extension_api import runtime
from xla_core.extension_api.operators import Operand
from xla_dist.collectives import model_collectives as xm

MSG_TOKEN: Final = (
    "a token of {other} cannot order collectives of {device}; use _get_all_reduce_token({device!r})"
)
_Groups = Sequence[Sequence[int]]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class IrValue:
    """A token: a place in the order of the collectives of ``device``.

    ``order`` is None before the first collective, and if there is one replica.
    """

    device: torch.device
    order: torch.Tensor | None


def _get_all_reduce_token(device: str) -> IrValue:
    """The token of the collective that was recorded last on ``device``."""
    trace = runtime.trace_of(device)
    return IrValue(trace.device, xm.order_of(trace))


def _set_all_reduce_token(device: str, token: IrValue) -> None:
    """Order the next collective of ``device`` after ``token``. Raises ValueError for another device's token.

    Only checks the token: the next collective comes after all earlier ones in any case.
    """
    own_device = runtime.trace_of(device).device
    if token.device != own_device:
        raise ValueError(MSG_TOKEN.format(other=token.device, device=str(own_device)))


def _check_token(tensor: torch.Tensor, token: IrValue) -> None:
    _set_all_reduce_token(str(tensor.device), token)


def _token(tensor: torch.Tensor) -> IrValue:
    return _get_all_reduce_token(str(tensor.device))


def _xla_all_reduce(
    reduce_type: str, input: torch.Tensor, scale: float, groups: _Groups, pin_layout: bool = True
) -> torch.Tensor:
    """``xm.all_reduce`` of one tensor."""
    result: torch.Tensor = xm.all_reduce(reduce_type, input, scale, groups, pin_layout)
    return result


def _xla_all_reduce_inplace(
    reduce_type: str,
    tensors: Sequence[torch.Tensor],
    scale: float,
    groups: _Groups,
    pin_layout: bool = True,
) -> None:
    """``xm.all_reduce`` of a list of tensors, in place."""
    xm.all_reduce(reduce_type, list(tensors), scale, groups, pin_layout)


def _gather(
    value: object, dim: int, count: int, groups: _Groups, output: Operand = None
) -> Operand:
    xm.check_group_size("all_gather", value, count, groups)
    return xm.all_gather(value, dim, groups, output)


def _xla_all_gather(
    input: torch.Tensor,
    dim: int,
    shard_count: int,
    groups: _Groups,
    pin_layout: bool = True,
    channel_id: int | None = None,
    use_global_device_ids: bool | None = None,
) -> torch.Tensor:
    """``xm.all_gather`` of one tensor over groups of ``shard_count`` replicas."""
    del pin_layout, channel_id, use_global_device_ids
    result: torch.Tensor = _gather(input, dim, shard_count, groups)
    return result


def _xla_all_gather_out(
    output: torch.Tensor,
    input: torch.Tensor,
    token: IrValue,
    dim: int,
    shard_count: int,
    groups: _Groups,
    pin_layout: bool = True,
) -> IrValue:
    """``xm.all_gather`` into ``output``; returns the collective's token."""
    _check_token(input, token)
    _gather(input, dim, shard_count, groups, output)
    return _token(input)


def _xla_all_gather_coalesced(
    inputs: Sequence[torch.Tensor],
    token: IrValue,
    dim: int,
    shard_count: int,
    groups: _Groups,
    pin_layout: bool = True,
) -> list[Operand]:
    """``xm.all_gather`` of a list; returns the results, followed by the collective's token."""
    _check_token(inputs[0], token)
    return [*_gather(list(inputs), dim, shard_count, groups), _token(inputs[0])]


def _xla_all_gather_coalesced_out(
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    token: IrValue,
    dim: int,
    shard_count: int,
    groups: _Groups,
    pin_layout: bool = True,
) -> IrValue:
    """``xm.all_gather`` of a list into ``outputs``; returns the collective's token."""
    _check_token(inputs[0], token)
    _gather(list(inputs), dim, shard_count, groups, list(outputs))
    return _token(inputs[0])


def _xla_reduce_scatter(
    reduce_type: str,
    input: torch.Tensor,
    token: IrValue,
    scale: float,
    scatter_dim: int,
    shard_count: int,
    groups: _Groups,
    pin_layout: bool = True,
    channel_id: int | None = None,
    use_global_device_ids: bool | None = None,
) -> tuple[torch.Tensor, IrValue]:
    """``xm.reduce_scatter`` of one tensor; returns the result and the collective's token."""
    del pin_layout, channel_id, use_global_device_ids
    _check_token(input, token)
    result = xm.reduce_scatter(reduce_type, input, scale, scatter_dim, shard_count, groups)
    return result, _token(input)


def _xla_reduce_scatter_out(
    reduce_type: str,
    output: torch.Tensor,
    input: torch.Tensor,
    token: IrValue,
    scale: float,
    scatter_dim: int,
    shard_count: int,
    groups: _Groups,
    pin_layout: bool = True,
) -> IrValue:
    """``xm.reduce_scatter`` into ``output``; returns the collective's token."""
    _check_token(input, token)
    xm.reduce_scatter(reduce_type, input, scale, scatter_dim, shard_count, groups, output)
    return _token(input)


def _xla_reduce_scatter_coalesced(
    reduce_type: str,
    inputs: Sequence[torch.Tensor],
    token: IrValue,
    scale: float,
    scatter_dim: int,
    shard_count: int,
    groups: _Groups,
    pin_layout: bool = True,
) -> list[Operand]:
    """``xm.reduce_scatter`` of a list; returns the results, followed by the collective's token."""
    _check_token(inputs[0], token)
    results = xm.reduce_scatter(reduce_type, list(inputs), scale, scatter_dim, shard_count, groups)
    return [*results, _token(inputs[0])]


def _xla_reduce_scatter_coalesced_out(
    reduce_type: str,
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    token: IrValue,
    scale: float,
    scatter_dim: int,
    shard_count: int,
    groups: _Groups,
    pin_layout: bool = True,
) -> IrValue:
    """``xm.reduce_scatter`` of a list into ``outputs``; returns the collective's token."""
    _check_token(inputs[0], token)
    sources, targets = list(inputs), list(outputs)
    xm.reduce_scatter(reduce_type, sources, scale, scatter_dim, shard_count, groups, targets)
    return _token(inputs[0])


def _xla_all_to_all(
    input: torch.Tensor,
    token: IrValue,
    split_dimension: int,
    concat_dimension: int,
    split_count: int,
    groups: _Groups,
    pin_layout: bool = True,
) -> tuple[torch.Tensor, IrValue]:
    """``xm.all_to_all``; returns the result and the collective's token."""
    _check_token(input, token)
    result = xm.all_to_all(input, split_dimension, concat_dimension, split_count, groups)
    return result, _token(input)


def _xla_collective_permute(
    input: torch.Tensor, token: IrValue, pairs: _Groups
) -> tuple[torch.Tensor, IrValue]:
    """``xm.collective_permute``; returns the result and the collective's token."""
    _check_token(input, token)
    return xm.collective_permute(input, pairs), _token(input)


def _xla_send(input: torch.Tensor, token: IrValue, channel_id: int) -> tuple[object, ...]:
    """Not supported: raises NotImplementedError, which names ``xm.collective_permute``."""
    raise NotImplementedError(xm.MSG_ONE_SIDED.format(name="_xla_send", channel=channel_id))


def _xla_recv(output: torch.Tensor, token: IrValue, channel_id: int) -> tuple[object, ...]:
    """Not supported: raises NotImplementedError, which names ``xm.collective_permute``."""
    raise NotImplementedError(xm.MSG_ONE_SIDED.format(name="_xla_recv", channel=channel_id))
