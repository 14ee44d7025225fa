"""``torch.nn.LSTM``, ``GRU`` and ``RNN`` for steps whose sizes vary, with one operator for each layer.

PyTorch's own implementation records operators for each time step, so that each length is a step of its own. Packed
sequences are gathered into padded time steps, by indices that the host computes from their lengths.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import torch
from torch.nn import functional as F

from xla_core.kernels.recurrent_layer import LSTM, RecurrentLayer
from xla_core.torch_bridge.operands import Operand

MSG_TOTAL: Final = (
    "Expected total_length to be at least the length of the longest sequence in input, but got "
    "total_length={total} and max sequence length being {longest}"
)


class _Net(NamedTuple):
    """The arguments of a net; ``cells`` are those of an LSTM, otherwise the states."""

    kind: str
    states: torch.Tensor
    cells: torch.Tensor
    params: Sequence[torch.Tensor]
    has_biases: bool
    num_layers: int
    dropout: float
    directions: int

    def weights(self) -> Iterator[tuple[torch.Tensor | None, ...]]:
        """``w_ih, w_hh, b_ih, b_hh, w_hr`` of each layer and direction, None for those that a net lacks."""
        each = len(self.params) // (self.num_layers * self.directions)
        for first in range(0, len(self.params), each):
            w_ih, w_hh, *rest = self.params[first : first + each]
            b_ih, b_hh = rest[:2] if self.has_biases else (None, None)
            projection = rest[2:] if self.has_biases else rest
            yield w_ih, w_hh, b_ih, b_hh, projection[0] if projection else None


def of_sequences(
    kind: str, input: torch.Tensor, hx: object, params: Sequence[torch.Tensor], has_biases: bool,
    num_layers: int, dropout: float, train: bool, bidirectional: bool, batch_first: bool,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """``aten.lstm.input`` and those of GRU and RNN: outputs, last states, and last cells of an LSTM."""
    net = _net(kind, hx, params, has_biases, num_layers, dropout if train else 0.0, bidirectional)
    steps = input.transpose(0, 1) if batch_first else input
    output, *last = _through(net, steps, None)
    return (output.transpose(0, 1) if batch_first else output), *last


def of_packed(
    kind: str, data: torch.Tensor, batch_sizes: torch.Tensor, hx: object, params: Sequence[torch.Tensor],
    has_biases: bool, num_layers: int, dropout: float, train: bool, bidirectional: bool,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """``aten.lstm.data`` and those of GRU and RNN: ``data`` are packed sequences, ``batch_sizes`` is on the CPU."""
    net = _net(kind, hx, params, has_biases, num_layers, dropout if train else 0.0, bidirectional)
    places, present = _places(batch_sizes, len(batch_sizes))
    filled = present.flatten().nonzero().flatten().to(data.device)
    output, *last = _through(net, _padded(data, places), present.to(data.device))
    return output.flatten(0, 1).index_select(0, filled), *last


def padded(
    data: torch.Tensor, batch_sizes: torch.Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """``aten._pad_packed_sequence``: padded sequences (time, batch, ...) or batch first, and lengths on the CPU.

    ``total_length`` is the length to pad to, or that of the longest sequence if it is not positive. Raises
    RuntimeError if it is shorter than that.
    """
    longest = len(batch_sizes)
    if 0 < total_length < longest:
        raise RuntimeError(MSG_TOTAL.format(total=total_length, longest=longest))
    places, present = _places(batch_sizes, total_length if total_length > 0 else longest)
    steps = _padded(data, places)
    shape = (*present.shape, *(1,) * (data.dim() - 1))
    there = present.to(data.device).reshape(shape)
    result = steps.masked_fill(there.logical_not(), padding_value)
    return (result.transpose(0, 1) if batch_first else result), present.sum(0)


def _places(batch_sizes: torch.Tensor, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """For each time step and sequence, the index of its element in the packed data, and whether it has one."""
    sizes = F.pad(batch_sizes.cpu(), (0, steps - len(batch_sizes)))
    sequence = torch.arange(int(sizes[0]))
    present = sequence < sizes[:, None]
    firsts = sizes.cumsum(0) - sizes
    return (firsts[:, None] + sequence).where(present, 0), present


def _padded(data: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return data.index_select(0, places.to(data.device).flatten()).unflatten(0, places.shape)


def _net(
    kind: str, hx: Operand, params: Sequence[torch.Tensor], has_biases: bool, num_layers: int,
    dropout: float, bidirectional: bool,
) -> _Net:  # fmt: skip
    states, cells = hx if kind == LSTM else (hx, hx)
    directions = 2 if bidirectional else 1
    return _Net(kind, states, cells, params, has_biases, num_layers, dropout, directions)


def _through(
    net: _Net, steps: torch.Tensor, present: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    """Run all layers over ``steps`` (time, batch, features), or over those that are ``present``."""
    states, cells = [], []
    weights = net.weights()
    for layer in range(net.num_layers):
        if layer and net.dropout:
            steps = F.dropout(steps, net.dropout)
        outputs = []
        for direction in range(net.directions):
            number = layer * net.directions + direction
            w_ih, w_hh, b_ih, b_hh, w_hr = next(weights)
            gates = F.linear(steps, w_ih, b_ih)
            output, state, cell = RecurrentLayer.apply(
                gates, net.states[number], net.cells[number], w_hh, b_hh, w_hr, present,
                net.kind, bool(direction),
            )  # fmt: skip
            outputs.append(output)
            states.append(state)
            cells.append(cell)
        steps = torch.cat(outputs, -1) if len(outputs) > 1 else outputs[0]
    last = torch.stack(states)
    return (steps, last, torch.stack(cells)) if net.kind == LSTM else (steps, last)
