"""torch's functional collectives (``torch.ops._c10d_functional``) on ``xla`` tensors.

``torch.distributed._functional_collectives``, DTensor and torch's parallel styles end in these operators.
Each records the collective of its group, as the methods of the group do. There is nothing to wait for:
what torch wraps, to wait at its first use, stays the tensor itself. Autograd is torch's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # defines some of the operators
import torch.distributed.tensor  # likewise
from torch._ops import OpOverload

from xla_core.extension_api import distributed
from xla_core.extension_api.operators import (
    Handler,
    NamedOperands,
    Operand,
    Operands,
    fallback_handler,
    schema_of,
    set_handler,
    signature,
)
from xla_dist.collectives.process_group import ProcessGroupXla

MSG_GROUP: Final = (
    "{name} got tensors on xla and a process group of the backend {backend!r}, which cannot reach them; make "
    "the group with dist.init_process_group('xla', init_method='xla://'), or give it CPU tensors"
)
MSG_REDUCTION: Final = "{name}: the xla backend has no reduction {kind!r}; it has {known}"

_OPS: Final[dict[str, object]] = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
}


def _group(name: str, given: object) -> ProcessGroupXla:
    """The group that an operator names. Raises ValueError for one of another backend."""
    group = distributed.process_group(given)
    if not isinstance(group, ProcessGroupXla):
        raise ValueError(MSG_GROUP.format(name=name, backend=dist.get_backend(group)))
    return group


def _reduced(
    name: str, tensors: Sequence[torch.Tensor], kind: object, group: Operand, *arguments: object
) -> Operand:
    # torch 2.15 takes a dist.ReduceOp, too
    op = _OPS.get(kind.lower()) if isinstance(kind, str) else kind
    if op is None:
        raise ValueError(MSG_REDUCTION.format(name=name, kind=kind, known=", ".join(_OPS)))
    return _group(name, group).reduced(name, tensors, op, *arguments)


def _written(targets: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    for target, value in zip(targets, values, strict=True):
        target.copy_(value)


def all_reduce(x: torch.Tensor, kind: object, group: Operand) -> torch.Tensor:
    """The group's tensors, reduced."""
    return all_reduce_coalesced([x], kind, group)[0]


def all_reduce_(x: torch.Tensor, kind: object, group: Operand) -> torch.Tensor:
    """``all_reduce`` in place."""
    return all_reduce_coalesced_([x], kind, group)[0]


def all_reduce_coalesced(
    tensors: Sequence[torch.Tensor], kind: object, group: Operand
) -> list[torch.Tensor]:  # fmt: skip
    """``all_reduce`` of several tensors by one collective."""
    return list(_reduced("all_reduce", tensors, kind, group))


def all_reduce_coalesced_(
    tensors: Sequence[torch.Tensor], kind: object, group: Operand
) -> list[torch.Tensor]:
    """``all_reduce_coalesced`` in place."""
    _written(tensors, all_reduce_coalesced(tensors, kind, group))
    return list(tensors)


def all_gather_into_tensor(x: torch.Tensor, size: int, group: Operand) -> torch.Tensor:
    """The group's tensors side by side along dimension 0."""
    return all_gather_into_tensor_coalesced([x], size, group)[0]


def all_gather_into_tensor_out(
    x: torch.Tensor, size: int, group: Operand, out: torch.Tensor
) -> torch.Tensor:
    """``all_gather_into_tensor`` into ``out``."""
    _written([out], all_gather_into_tensor_coalesced([x], size, group))
    return out


def all_gather_into_tensor_coalesced(
    tensors: Sequence[torch.Tensor], size: int, group: Operand
) -> list[torch.Tensor]:
    """``all_gather_into_tensor`` of several tensors, recorded as one operator."""
    del size
    rows = [x if x.dim() else x.reshape(1) for x in tensors]
    return list(_group("all_gather", group).run("all_gather", rows, 0))


def reduce_scatter_tensor(x: torch.Tensor, kind: str, size: int, group: Operand) -> torch.Tensor:
    """This rank's slice along dimension 0 of the reduction."""
    return reduce_scatter_tensor_coalesced([x], kind, size, group)[0]


def reduce_scatter_tensor_out(
    x: torch.Tensor, kind: str, size: int, group: Operand, out: torch.Tensor
) -> torch.Tensor:
    """``reduce_scatter_tensor`` into ``out``."""
    _written([out], reduce_scatter_tensor_coalesced([x], kind, size, group))
    return out


def reduce_scatter_tensor_coalesced(
    tensors: Sequence[torch.Tensor], kind: str, size: int, group: Operand
) -> list[torch.Tensor]:
    """``reduce_scatter_tensor`` of several tensors, recorded as one operator."""
    del size
    return list(_reduced("reduce_scatter", tensors, kind, group, 0))


def broadcast(x: torch.Tensor, source: int, group: Operand) -> torch.Tensor:
    """The tensor of the group's rank ``source``."""
    return _group("broadcast", group).run("broadcast", [x], source)[0]


def broadcast_(x: torch.Tensor, source: int, group: Operand) -> torch.Tensor:
    """``broadcast`` in place."""
    _written([x], [broadcast(x, source, group)])
    return x


def shard_dim_alltoall(x: torch.Tensor, gathered: int, split: int, group: Operand) -> torch.Tensor:
    """Send slices along ``split`` to the ranks, and gather the received ones along ``gathered``."""
    return _group("all_to_all", group).run("all_to_all", [x], split, gathered)[0]


def itself(x: torch.Tensor) -> torch.Tensor:
    """The tensor: a result is read when it is there."""
    return x


def themselves(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors: results are read when they are there."""
    return list(tensors)


def _all_to_all_handler(overload: OpOverload) -> Handler:
    """Even slices move on the device; others, whose sizes the other ranks cannot know, on the host."""
    on_host = fallback_handler(overload, signature(overload))

    def all_to_all_single(
        x: torch.Tensor, received: Operand, sent: Operand, group: Operand
    ) -> torch.Tensor:
        if len({*received, *sent}) > 1:
            return on_host((x, received, sent, group), None)  # type: ignore[no-any-return]
        return _group("all_to_all", group).run("all_to_all", [x], 0, 0)[0]

    return _handler(overload, all_to_all_single)


_COLLECTIVES: Final[dict[str, Callable[..., object]]] = {
    function.__name__: function
    for function in (
        all_reduce, all_reduce_, all_reduce_coalesced, all_reduce_coalesced_,
        all_gather_into_tensor, all_gather_into_tensor_out, all_gather_into_tensor_coalesced,
        reduce_scatter_tensor, reduce_scatter_tensor_out, reduce_scatter_tensor_coalesced,
        broadcast, broadcast_,
    )
} | {"wait_tensor": itself, "wait_tensors": themselves, "_wrap_tensor_autograd": itself}  # fmt: skip


def _handler(overload: OpOverload, function: Callable[..., object]) -> Handler:
    names = [a.name for a in schema_of(overload).arguments]

    def run(args: Operands, kwargs: NamedOperands | None) -> Operand:
        if kwargs:
            args = (*args, *(kwargs[name] for name in names[len(args) :]))
        return function(*args)

    return run


def register() -> None:
    """Carry out torch's operators so that have ``xla`` tensors; called once."""
    operators = torch.ops._c10d_functional
    for name, function in _COLLECTIVES.items():
        if hasattr(operators, name):  # not every torch has each
            overload = getattr(operators, name).default
            set_handler(overload, _handler(overload, function))
    resplit = torch.ops._dtensor.shard_dim_alltoall.default
    set_handler(resplit, _handler(resplit, shard_dim_alltoall))
    uneven = operators.all_to_all_single.default
    set_handler(uneven, _all_to_all_handler(uneven))
