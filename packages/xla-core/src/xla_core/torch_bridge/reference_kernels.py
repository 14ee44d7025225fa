"""PyTorch's reference kernels, which are meta kernels too, without Dynamo. Seen in torch 2.11 to 2.15."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

from xla_core.torch_bridge.operands import Operand


@functools.cache
def call_directly() -> None:
    """Let reference kernels run without importing Dynamo, which each would tell first to skip it.

    That takes one to three seconds, at the first operator that meets one. Once other code has
    imported Dynamo, they are used as usual.
    """
    modules = [m for name, m in sys.modules.items() if name.startswith("torch._refs")]
    functions = {f for m in modules for f in vars(m).values() if inspect.isfunction(f)}
    waiting = list(functions)
    while waiting:
        outer = waiting.pop()
        inside = _functions_in(outer)
        # torch 2.13: torch._compile._disable_dynamo keeps in this attribute what it calls
        if outer.__globals__.get("__name__") == "torch._compile":
            for called in inside:
                called.__dict__["__dynamo_disable"] = _Direct(outer, called)
        waiting += inside - functions
        functions |= inside


def in_cpp(overload: OpOverload) -> Callable[..., Any]:
    """What C++ defines an operator by, where PyTorch also has a definition in Python that does more."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd  # torch 2.13
    return functools.partial(overload._op_dk, key)  # torch 2.13


_libraries: list[torch.library.Library] = []  # a library's registrations end with the object


@functools.cache
def keep_whole(overload: OpOverload) -> None:
    """Let an operator that C++ defines by others arrive at ``__torch_dispatch__`` itself, from now on."""
    library = torch.library.Library("aten", "IMPL")
    library.impl(overload, in_cpp(overload), "XLA")  # torch 2.13: then autograd leaves it alone
    _libraries.append(library)


def _functions_in(outer: Any) -> set[Any]:
    """The functions that a function is made around."""
    functions = set()
    for cell in outer.__closure__ or ():
        try:
            content = cell.cell_contents
        except ValueError:  # not filled yet
            continue
        if inspect.isfunction(content):
            functions.add(content)
    return functions


class _Direct:
    """Calls ``function``; once there is Dynamo, what ``told`` makes of it, which tells Dynamo."""

    def __init__(self, outer: Callable[..., object], function: Callable[..., object]) -> None:
        self._told = outer
        self._function = function

    def __call__(self, *args: Operand, **kwargs: object) -> torch.Tensor:
        if "torch._dynamo" not in sys.modules:
            return self._function(*args, **kwargs)
        self._function.__dict__.pop("__dynamo_disable", None)
        return self._told(*args, **kwargs)


# Sparse tensors of the device xla: C++ knows their dispatch key but has no kernels for it, and Python cannot
# register any, as its parser of keys does not know the name. The kernels that only hold indices and values
# together are the same for all devices: they are called by the key of another one.
_KEY = torch._C.DispatchKeySet(torch._C.DispatchKey.SparseCPU)  # torch 2.11 to 2.15
_MAKING = torch._C.DispatchKeySet(torch._C.DispatchKey.SparseMeta)


def of_any_sparse(overload: OpOverload, *args: Any) -> Any:
    """What the CPU's kernel of ``overload`` for sparse tensors does; it must look at no value."""
    return overload.redispatch(_KEY, *args)


def sparse_coo(
    indices: torch.Tensor, values: torch.Tensor, shape: tuple[int, ...], coalesced: bool
) -> torch.Tensor:
    """A sparse tensor of C++ that holds these indices and values, on the device of ``values``.

    Raises RuntimeError, PyTorch's own, where they do not go together.
    """
    dimensions = indices.shape[0]
    with torch._C._AutoDispatchBelowAutograd():
        sparse_tensor: torch.Tensor = (
            torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors.default.redispatch(
                _MAKING,
                dimensions,
                len(shape) - dimensions,
                list(shape),
                indices,
                values,
                dtype=values.dtype,
                layout=torch.sparse_coo,
                device=values.device,
                pin_memory=False,
                is_coalesced=coalesced,
            )
        )
    return sparse_tensor
