"""What an operator's schema says about it: what it writes, what it returns, and its pure form."""

from __future__ import annotations

import dataclasses

import torch
from torch._ops import OpOverload

from xla_core.torch_bridge.operands import TorchObject


@dataclasses.dataclass(frozen=True, slots=True)
class Signature:
    """The facts of one overload that dispatch needs, derived from its schema once.

    ``names`` are the arguments in order, ``written`` those the operator writes to (positions),
    ``out`` whether they are ``out=`` arguments, ``new_results`` the number of results that are new tensors,
    ``returns`` is ``"none"``, ``"tensor"``, ``"list"``, ``"tuple"`` or ``"other"``. ``writes_lists``
    is set when a list of tensors is written to, whose versions autograd leaves to the kernel.
    """

    names: tuple[str, ...]
    positional: int
    written: tuple[int, ...]
    out: bool
    is_view: bool
    inplace_view: bool
    new_results: int
    returns: str
    writes_lists: bool


def signature(overload: OpOverload) -> Signature:
    """Read the schema of ``overload``."""
    schema = overload._schema
    arguments = schema.arguments
    written = tuple(
        i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write
    )
    aliasing = [r.alias_info for r in schema.returns]
    is_view = any(a is not None and not a.is_write for a in aliasing) and not written
    return Signature(
        names=tuple(a.name for a in arguments),
        positional=sum(not a.kwarg_only for a in arguments),
        written=written,
        out=any(a.is_out for a in arguments),
        is_view=is_view,
        inplace_view=torch.Tag.inplace_view in overload.tags,
        new_results=sum(a is None for a in aliasing),
        returns=_returns(schema),
        writes_lists=any("List" in str(arguments[i].type) for i in written),
    )


def _returns(schema: TorchObject) -> str:
    kinds = [str(r.type) for r in schema.returns]
    if not kinds:
        return "none"
    if kinds == ["Tensor"]:
        return "tensor"
    if kinds == ["List[Tensor]"]:
        return "list"
    if all(kind in ("Tensor", "Optional[Tensor]") for kind in kinds):
        return "tuple"
    return "other"


def _argument_types(overload: OpOverload, without_out: bool) -> list[tuple[str, str]]:
    return [
        (a.name, str(a.type)) for a in overload._schema.arguments if not (without_out and a.is_out)
    ]


FACTORY_ARGUMENTS = ("dtype", "layout", "device", "pin_memory")

# Operators whose pure form has another name than the schema suggests (torch/native_functions.yaml).
_RENAMED = {
    "aten::normal_": "aten::normal_functional",
    "aten::__ilshift__": "aten::__lshift__",
    "aten::__irshift__": "aten::__rshift__",
}


def _writes_the_same(overload: OpOverload, candidate: OpOverload) -> bool:
    def written(form: OpOverload) -> set[str]:
        arguments = form._schema.arguments
        return {a.name for a in arguments if a.alias_info is not None and not a.is_out}

    return written(candidate) == written(overload)


def pure_form(overload: OpOverload) -> OpOverload | None:
    """The functional overload with the same arguments as an in-place or ``out=`` one, or None.

    In-place operators are named with a trailing underscore, ``out=`` ones share the packet of
    their functional form; in both cases the remaining arguments must be equal. What an ``out=`` one
    writes to besides (running statistics) its form without ``out=`` writes to as well.
    """
    qualified = overload._schema.name
    qualified = _RENAMED.get(qualified, qualified)
    namespace, name = qualified.split("::")
    stripped = name[:-1] if name.endswith("_") and not name.endswith("__") else name
    wanted = _argument_types(overload, without_out=True)
    is_out = any(a.is_out for a in overload._schema.arguments)
    names = {name for name, _ in wanted}
    for candidate in (stripped, f"{stripped}_functional"):
        packet = getattr(getattr(torch.ops, namespace), candidate, None)
        if packet is None:
            continue
        for overload_name in packet.overloads():
            form = getattr(packet, overload_name)
            if form._schema.is_mutable and not (is_out and _writes_the_same(overload, form)):
                continue
            # A factory's out= form has no dtype and device: those are the tensor's.
            types = [
                (name, kind)
                for name, kind in _argument_types(form, without_out=False)
                if name in names or name not in FACTORY_ARGUMENTS
            ]
            if types == wanted:
                return form
    return None
