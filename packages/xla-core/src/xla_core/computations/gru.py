"""``GRU``: a ``torch.nn.GRU`` whose time steps are one loop of the program."""

from __future__ import annotations

import warnings
from typing import Final

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from xla_core.computations.scan import scan

MSG_BIDIRECTIONAL: Final = (
    "the GRU of torch_xla.experimental.gru has one direction; this is a torch.nn.GRU instead, which records "
    "operators for each time step"
)
# The position of ``bidirectional`` among the arguments of ``torch.nn.GRU``.
_BIDIRECTIONAL: Final = 6
MSG_PROJECTION: Final = "GRU only supports no projection."
MSG_PACKED: Final = "PackedSequence is not supported. Use a regular tensor instead."
MSG_DIMENSIONS: Final = "GRU: Expected input to be 2D or 3D, got {dim}D instead"
MSG_STATE: Final = "For {kind} {dim}-D input, hx should also be {dim}-D but got {got}-D tensor"


class GRU(nn.GRU):
    """``torch.nn.GRU`` in one direction, with the same arguments, parameters and results.

    A layer is one ``scan`` over time, so that the compile time does not grow with the length of the sequence. With
    ``bidirectional=True`` the constructor warns and returns a ``torch.nn.GRU``. Raises ValueError for
    ``proj_size``, which ``torch.nn.GRU`` refuses, too.
    """

    def __new__(cls, *args: object, **kwargs: object) -> nn.GRU:
        """A ``torch.nn.GRU`` if two directions are asked for, which this class does not have."""
        by_position = len(args) > _BIDIRECTIONAL and args[_BIDIRECTIONAL]
        if kwargs.get("bidirectional") or by_position:
            warnings.warn(MSG_BIDIRECTIONAL, stacklevel=2)
            return nn.GRU(*args, **kwargs)
        return super().__new__(cls)

    def __init__(self, *args: object, **kwargs: object) -> None:
        if kwargs.get("proj_size"):
            raise ValueError(MSG_PROJECTION)
        super().__init__(*args, **kwargs)

    def forward(  # type: ignore[override]
        self, input: torch.Tensor, hx: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The output (time, batch, hidden) and the last states (layers, batch, hidden), as in ``torch.nn.GRU``.

        ``input`` is (time, batch, features), or with ``batch_first`` (batch, time, features), or (time, features);
        ``hx`` are the first states (default: zeros). Raises TypeError for a PackedSequence, ValueError and
        RuntimeError for wrong dimensions.
        """
        if isinstance(input, PackedSequence):
            raise TypeError(MSG_PACKED)
        if input.dim() not in (2, 3):
            raise ValueError(MSG_DIMENSIONS.format(dim=input.dim()))
        batched = input.dim() == 3
        if hx is not None and hx.dim() != input.dim():
            kind = "batched" if batched else "unbatched"
            raise RuntimeError(MSG_STATE.format(kind=kind, dim=input.dim(), got=hx.dim()))
        steps = input if batched else input.unsqueeze(1)
        if batched and self.batch_first:
            steps = steps.transpose(0, 1)
        if hx is None:
            states = steps.new_zeros(self.num_layers, steps.shape[1], self.hidden_size)
        else:
            states = hx if batched else hx.unsqueeze(1)
        given = input if batched else input.unsqueeze(0 if self.batch_first else 1)
        self.check_forward_args(given, states, None)
        output, last = self._layers(steps, states)
        if not batched:
            return output.squeeze(1), last.squeeze(1)
        return (output.transpose(0, 1) if self.batch_first else output), last

    def _layers(
        self, steps: torch.Tensor, states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        last = []
        for number in range(self.num_layers):
            if number and self.dropout and self.training:
                steps = F.dropout(steps, self.dropout)
            state, steps = self._layer(number, steps, states[number])
            last.append(state)
        return steps, torch.stack(last)

    def _layer(
        self, number: int, steps: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        w_ih, w_hh = getattr(self, f"weight_ih_l{number}"), getattr(self, f"weight_hh_l{number}")
        b_ih = getattr(self, f"bias_ih_l{number}") if self.bias else None
        b_hh = getattr(self, f"bias_hh_l{number}") if self.bias else None

        def cell(h: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            # x is projected outside of the loop, in one large product
            x_r, x_z, x_n = x.chunk(3, dim=1)
            h_r, h_z, h_n = F.linear(h, w_hh, b_hh).chunk(3, dim=1)
            r, z = torch.sigmoid(x_r + h_r), torch.sigmoid(x_z + h_z)
            n = torch.tanh(x_n + r * h_n)
            h = (1 - z) * n + z * h
            return h, h

        return scan(cell, state, F.linear(steps, w_ih, b_ih))
