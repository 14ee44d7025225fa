"""With ``XLA_VARYING_SHAPES=1`` recurrent nets are operators of our own: PyTorch's are as many as time steps.

A kernel stands before PyTorch's composites, and calls them wherever it is not asked for something else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import torch

from xla_core.recording.xla_tensor import XLATensor
from xla_core.support import flags

_KINDS: Final = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_DTYPES: Final = (torch.float32, torch.float64)

_libraries: list[torch.library.Library] = []  # a library's registrations end with the object


def install(nets: Callable[[], object]) -> None:
    """Take over the recurrent operators.

    ``nets()`` gives a module with ``of_sequences``, ``of_packed`` and ``padded``.
    """
    if _libraries:
        return
    library = torch.library.Library("aten", "IMPL")
    for kind in _KINDS:
        packet = getattr(torch.ops.aten, kind)
        for overload, name in ((packet.input, "of_sequences"), (packet.data, "of_packed")):
            kernel = functools.partial(_kernel, overload, nets, name, kind)
            library.impl(overload, kernel, "AutogradXLA")
    pad = torch.ops.aten._pad_packed_sequence.default
    library.impl(pad, functools.partial(_kernel, pad, nets, "padded"), "AutogradXLA")
    _libraries.append(library)


def _kernel(overload: Any, nets: Callable[[], Any], name: str, *args: Any) -> object:
    """``args`` are the operator's, behind the kind of net if there is one."""
    kind, operands = (args[:1], args[1:]) if isinstance(args[0], str) else ((), args)
    if flags.VARYING_SHAPES.get() and _ours(operands):
        return getattr(nets(), name)(*kind, *operands)
    return overload.decompose(*operands)


def _ours(args: tuple[Any, ...]) -> bool:
    """Whether the operands are tensors of ours, of one dtype, and some time steps."""
    if torch.is_autocast_enabled("xla") or not args[0].numel():
        return False
    tensors = [args[0]]
    for operand in args[1:]:
        if isinstance(operand, (list, tuple)):
            tensors.extend(operand)
        elif isinstance(operand, XLATensor):
            tensors.append(operand)
    return all(isinstance(t, XLATensor) and t.dtype is tensors[0].dtype for t in tensors) and (
        tensors[0].dtype in _DTYPES
    )
