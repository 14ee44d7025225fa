"""torch's functional collectives (``torch.ops._c10d_functional``) on ``xla`` tensors.

``torch.distributed._functional_collectives``, DTensor and torch's parallel styles call these operators. Each
records the collective of its process group, as the methods of the group do. The operators that wait return their
tensor: reading a result waits for it anyway. torch differentiates these operators itself.

``group`` is the name of a process group (in some versions of torch the group itself), ``kind`` a reduction by name,
and ``size`` the number of the group's members.
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
    "{name} got tensors on xla and a process group of the backend {backend!r}, which cannot access them; create "
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


def _group(name: str, group: object) -> ProcessGroupXla:
    """The process group that the operator ``name`` got. Raises ValueError for a group of another backend."""
    process_group = distributed.process_group(group)
    if not isinstance(process_group, ProcessGroupXla):
        raise ValueError(MSG_GROUP.format(name=name, backend=dist.get_backend(process_group)))
    return process_group


def _reduced(
    name: str, tensors: Sequence[torch.Tensor], kind: object, group: Operand, *arguments: object
) -> Operand:
    # torch 2.15 also passes a dist.ReduceOp
    op = _OPS.get(kind.lower()) if isinstance(kind, str) else kind
    if op is None:
        raise ValueError(MSG_REDUCTION.format(name=name, kind=kind, known=", ".join(_OPS)))
    return _group(name, group).reduced(name, tensors, op, *arguments)


def _write(targets: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    for target, value in zip(targets, values, strict=True):
        target.copy_(value)


def all_reduce(x: torch.Tensor, kind: object, group: Operand) -> torch.Tensor:
    """The reduction of the group's tensors. Raises ValueError for an unknown reduction."""
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
    _write(tensors, all_reduce_coalesced(tensors, kind, group))
    return list(tensors)


def all_gather_into_tensor(x: torch.Tensor, size: int, group: Operand) -> torch.Tensor:
    """The group's tensors, concatenated along dimension 0; a scalar counts as one row."""
    return all_gather_into_tensor_coalesced([x], size, group)[0]


def all_gather_into_tensor_out(
    x: torch.Tensor, size: int, group: Operand, out: torch.Tensor
) -> torch.Tensor:
    """``all_gather_into_tensor`` into ``out``."""
    _write([out], all_gather_into_tensor_coalesced([x], size, group))
    return out


def all_gather_into_tensor_coalesced(
    tensors: Sequence[torch.Tensor], size: int, group: Operand
) -> list[torch.Tensor]:
    """``all_gather_into_tensor`` of several tensors, recorded as one operator."""
    del size
    rows = [x if x.dim() else x.reshape(1) for x in tensors]
    return list(_group("all_gather", group).run("all_gather", rows, 0))


def reduce_scatter_tensor(x: torch.Tensor, kind: str, size: int, group: Operand) -> torch.Tensor:
    """This rank's slice of the reduction, along dimension 0."""
    return reduce_scatter_tensor_coalesced([x], kind, size, group)[0]


def reduce_scatter_tensor_out(
    x: torch.Tensor, kind: str, size: int, group: Operand, out: torch.Tensor
) -> torch.Tensor:
    """``reduce_scatter_tensor`` into ``out``."""
    _write([out], reduce_scatter_tensor_coalesced([x], kind, size, group))
    return out


def reduce_scatter_tensor_coalesced(
    tensors: Sequence[torch.Tensor], kind: str, size: int, group: Operand
) -> list[torch.Tensor]:
    """``reduce_scatter_tensor`` of several tensors, recorded as one operator."""
    del size
    return list(_reduced("reduce_scatter", tensors, kind, group, 0))


def broadcast(x: torch.Tensor, source: int, group: Operand) -> torch.Tensor:
    """The tensor of the group's member ``source``."""
    return _group("broadcast", group).run("broadcast", [x], source)[0]


def broadcast_(x: torch.Tensor, source: int, group: Operand) -> torch.Tensor:
    """``broadcast`` in place."""
    _write([x], [broadcast(x, source, group)])
    return x


def shard_dim_alltoall(x: torch.Tensor, gathered: int, split: int, group: Operand) -> torch.Tensor:
    """Send slices along ``split`` to the ranks; returns the received slices, concatenated along ``gathered``."""
    return _group("all_to_all", group).run("all_to_all", [x], split, gathered)[0]


def wait_tensor(x: torch.Tensor) -> torch.Tensor:
    """``x``: there is nothing to wait for before its value is read."""
    return x


def wait_tensors(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """``tensors``: there is nothing to wait for before their values are read."""
    return list(tensors)


def _all_to_all_handler(overload: OpOverload) -> Handler:
    """The handler of ``all_to_all_single``: on the device for slices of one size, otherwise on the host.

    A program must be the same on all ranks, but a rank does not know the sizes of slices between other ranks.
    """
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
        broadcast, broadcast_, wait_tensor, wait_tensors,
    )
} | {"_wrap_tensor_autograd": wait_tensor}  # fmt: skip


def _handler(overload: OpOverload, function: Callable[..., object]) -> Handler:
    """``function``, which takes positional arguments only, as the handler of ``overload``."""
    names = [a.name for a in schema_of(overload).arguments]

    def run(args: Operands, kwargs: NamedOperands | None) -> Operand:
        if kwargs:
            args = (*args, *(kwargs[name] for name in names[len(args) :]))
        return function(*args)

    return run


def register() -> None:
    """Set the handlers of torch's functional collectives for ``xla`` tensors; called once."""
    operators = torch.ops._c10d_functional
    for name, function in _COLLECTIVES.items():
        if hasattr(operators, name):  # some versions of torch lack some of them
            overload = getattr(operators, name).default
            set_handler(overload, _handler(overload, function))
    resplit = torch.ops._dtensor.shard_dim_alltoall.default
    set_handler(resplit, _handler(resplit, shard_dim_alltoall))
    uneven = operators.all_to_all_single.default
    set_handler(uneven, _all_to_all_handler(uneven))
