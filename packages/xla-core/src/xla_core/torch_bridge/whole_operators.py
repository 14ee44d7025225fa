"""Operators that PyTorch's C++ defines by others, and kernels above autograd that may leave them whole.

``linear`` is a transpose, views, a product and a sum to C++, and autograd differentiates each of them. It has
derivatives of the operator as a whole, too, which it takes for nested tensors only. A kernel that is registered
here stands before autograd and chooses between the two.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import torch
from torch._ops import OpOverload
from torch.autograd import forward_ad

_Key: Final = torch._C.DispatchKey  # torch 2.11 to 2.15, as all names of torch._C below
# The key under which autograd has its derivatives of operators that C++ defines by others; what it calls
# then goes on to ``__torch_dispatch__``.
_AS_NESTED: Final = (
    torch._C.DispatchKeySet(_Key.AutogradNestedTensor)
    | torch._C.DispatchKeySet(_Key.Python)
    | torch._C.DispatchKeySet(_Key.XLA)
)
_libraries: list[torch.library.Library] = []  # registrations end with the object

_modes: Final = torch._C._len_torch_dispatch_stack


def is_watched() -> bool:
    """Whether somebody would miss the operators that a whole one stands for.

    That is a mode of ``torch.utils._python_dispatch``: one that counts products, chooses what a checkpoint
    keeps, or writes a graph. Or forward-mode differentiation, which has no derivatives of whole operators.
    """
    return _modes() > 0 or forward_ad._current_level >= 0


def parts_of(overload: OpOverload) -> Callable[..., Any]:
    """The operator as C++ defines it by others."""
    return functools.partial(overload._op_dk, _Key.CompositeImplicitAutograd)


def whole(overload: OpOverload) -> Callable[..., Any]:
    """The operator as one, differentiated by autograd's derivatives of the whole."""
    return functools.partial(overload._handle.redispatch_boxed, _AS_NESTED)


def register(overload: OpOverload, kernel: Callable[..., Any]) -> None:
    """Let ``kernel`` carry out ``overload`` for ``xla`` tensors, above autograd."""
    if not _libraries:
        _libraries.append(torch.library.Library("aten", "IMPL"))
    _libraries[0].impl(overload, kernel, "AutogradXLA")
