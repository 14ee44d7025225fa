"""Operators that are recorded as one, though PyTorch's C++ defines them by others.

``linear`` is a transpose, views, a product and a sum to C++, and autograd differentiates each of them: four
operators and ten in the backward pass, each through all of PyTorch's layers. Autograd has derivatives of the
operator as a whole, too, which it takes for nested tensors only. A kernel that is registered here stands before
autograd and chooses between the two; the lowering rules compute what the parts would.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import torch
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


def _linear(
    tensor_class: type[torch.Tensor], may_stay_whole: Callable[[torch.Tensor], bool]
) -> Callable[..., Any]:
    overload = torch.ops.aten.linear.default
    as_one = functools.partial(overload._handle.redispatch_boxed, _AS_NESTED)
    by_parts = functools.partial(overload._op_dk, _Key.CompositeImplicitAutograd)

    def linear(input: Any, weight: Any, bias: Any = None) -> Any:
        """``linear`` as one operator where the operands have the ranks that layers have."""
        if (
            type(input) is tensor_class
            and type(weight) is tensor_class
            and (bias is None or (type(bias) is tensor_class and bias.dim() == 1))
            and weight.dim() == 2
            and input.dim() > 1
            and not is_watched()
            and may_stay_whole(weight)
        ):
            return as_one(input, weight, bias)
        return by_parts(input, weight, bias)

    return linear


def leave_whole(
    tensor_class: type[torch.Tensor], may_stay_whole: Callable[[torch.Tensor], bool]
) -> None:
    """Let these operators arrive at tensors of a class as one, unless somebody would miss the parts; once.

    ``may_stay_whole(weight)`` says where whole operators are lowered as well as their parts.
    """
    if not _libraries:
        library = torch.library.Library("aten", "IMPL")
        library.impl("linear", _linear(tensor_class, may_stay_whole), "AutogradXLA")
        _libraries.append(library)
