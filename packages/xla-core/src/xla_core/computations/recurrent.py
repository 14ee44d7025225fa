"""Chooses between two implementations of recurrent nets: PyTorch's operators for each time step, or our loops.

Kernels for PyTorch's recurrent operators make the choice. With ``XLA_VARYING_SHAPES`` set, it decides. Otherwise
the first two lengths of a net use PyTorch's implementation, and further lengths ours, whose program serves all
lengths. So a net of fixed length keeps PyTorch's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from types import ModuleType
from typing import Final

import torch
from torch._ops import OpOverload
from torch.autograd import forward_ad

from xla_core.execution import eager_mode
from xla_core.recording.xla_tensor import XLATensor
from xla_core.support import caches, flags
from xla_core.torch_bridge.operands import Operand, Operands

_KINDS: Final = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_DTYPES: Final = (torch.float32, torch.float64)
# two, because a net of fixed length may have another length in evaluation
_PYTORCHS_FIRST: Final = 2

_libraries: list[torch.library.Library] = []  # a library's registrations end with the object
# The first lengths of each net, which is identified by its kind and the shapes of its weights.
_first_lengths: caches.Bounded[Hashable, frozenset[Hashable]] = caches.Bounded(
    "first lengths of recurrent nets", 1024
)


def install(nets: Callable[[], ModuleType]) -> None:
    """Register the kernels; ``nets()`` returns a module with ``of_sequences``, ``of_packed`` and ``padded``."""
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
    unpack = torch.ops.aten._pack_padded_sequence_backward.default
    library.impl(unpack, functools.partial(_unpacked, unpack, nets), "AutogradXLA")
    _libraries.append(library)


def _kernel(
    overload: OpOverload, nets: Callable[[], ModuleType], name: str, *args: Operand
) -> object:
    """Run function ``name`` of the module, or PyTorch's decomposition.

    ``args`` are the kind of net, if there is one, and the operator's arguments.
    """
    kind, operands = (args[:1], args[1:]) if isinstance(args[0], str) else ((), args)
    chosen = flags.VARYING_SHAPES.get()
    if chosen is not False and _ours(operands) and (chosen or _is_late(name, kind, operands)):
        return getattr(nets(), name)(*kind, *operands)
    results = overload.decompose(*operands)
    return _without_extra_dimension(results) if kind == ("lstm",) else results


def _without_extra_dimension(results: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """The results of PyTorch's LSTM; release 2.11 leaves one dimension too many in its last states and cells."""
    output, *last = results
    return output, *(state.squeeze(1) if state.dim() > 3 else state for state in last)


def _unpacked(
    overload: OpOverload,
    nets: Callable[[], ModuleType],
    gradient: torch.Tensor,
    sizes: Sequence[int],
    *how: Operand,
) -> object:
    """The gradient of packing a padded sequence, which PyTorch copies one time step after the other.

    ``sizes`` is the shape of the result; ``how`` are the batch sizes, and whether the batch comes first.
    """
    if flags.VARYING_SHAPES.get() is False or not isinstance(gradient, XLATensor):
        return overload.decompose(gradient, sizes, *how)
    _, batch_first = how
    return nets().padded(gradient, *how, 0.0, sizes[1 if batch_first else 0])[0]


def _is_late(name: str, kind: tuple[str, ...], operands: Operands) -> bool:
    """Whether the net has had two other lengths before (for packed sequences, two other lists of lengths).

    False in eager mode and for programs over several devices, where lengths do not share programs.
    """
    data = operands[0]
    if eager_mode.is_on() or data._s.trace.backend.shard_count() > 1:
        return False
    length: Hashable
    if name == "of_sequences":
        batch_first = operands[-1]
        length = data.shape[1 if batch_first else 0]
    else:
        length = tuple(operands[1].tolist())
    weights = operands[3 if name == "of_packed" else 2] if kind else ()
    net = (name, kind, data.shape[-1], *(tuple(weight.shape) for weight in weights))
    first = _first_lengths.get(net, frozenset())
    if length in first:
        return False
    if len(first) < _PYTORCHS_FIRST:
        _first_lengths.keep(net, first | {length})
        return False
    return True


def _ours(args: Operands) -> bool:
    """Whether our operators support the operands: non-empty ``xla`` tensors of one dtype, without autocast."""
    if torch.is_autocast_enabled("xla") or not args[0].numel():
        return False
    if forward_ad._current_level >= 0:
        return False  # our operators have no tangents
    tensors = [args[0]]
    for operand in args[1:]:
        if isinstance(operand, (list, tuple)):
            tensors.extend(operand)
        elif isinstance(operand, XLATensor):
            tensors.append(operand)
    return all(isinstance(t, XLATensor) and t.dtype is tensors[0].dtype for t in tensors) and (
        tensors[0].dtype in _DTYPES
    )
