"""``_XLAC.lowering.LoweringContext``: the graph that computes given tensors, as HLO for other tools."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

import torch

from xla_core.api import hlo_json
from xla_core.dispatch.transfers import read
from xla_core.execution.pending_graph import graph_of, read_inputs
from xla_core.jax_bridge import hlo_primitives, jax_private
from xla_core.lowering import step_program
from xla_core.operators.tensor_meta import tensor_meta
from xla_core.recording.trace import Trace
from xla_core.recording.xla_tensor import XLATensor

MSG_NOT_BUILT: Final = "the context {name!r} holds no program; call build(tensors) first"
MSG_LOOP: Final = (
    "buildforiloop is not available: it lowers a loop for torch_xla's own fori_loop. Use "
    "torch_xla.experimental.fori_loop, or torch._higher_order_ops.while_loop, and build() its results"
)


class LoweringContext:
    """Lowers the graph that computes given tensors to an HLO module called ``name`` (default: ``FromIr``).

    Nothing runs, and the step stays as it is. The module's parameters are the tensors in device memory that the
    results depend on, in the order of their first use, followed by the lifted numbers of the step (learning rates,
    seeds) if there are any: a vector of floats and one of ints.
    """

    def __init__(self, name: str = "") -> None:
        self._name = name or "FromIr"
        self._stablehlo: bytes | None = None
        self._inputs: list[XLATensor] = []
        self._numbers: list[torch.Tensor] = []
        self._device = torch.device("xla")

    def set_name_string(self, name: str) -> None:
        """Set the name of the module that the next ``build`` makes."""
        self._name = name

    def get_name_string(self) -> str:
        """The module's name."""
        return self._name

    def build(self, tensors: Sequence[torch.Tensor]) -> None:
        """Lower the graph that computes ``tensors``. Raises TypeError for a tensor that is not on ``xla``."""
        with graph_of(tensors) as (trace, entries, outputs):
            slots, kept = read_inputs(trace, entries, outputs)
            distinct = tuple(dict.fromkeys(outputs))
            layout = trace.backend.layout(trace, entries, distinct, ())
            program = step_program.lower(trace, kept, distinct, layout, self._name)
            self._device = trace.device
            self._inputs = [_tensor(trace, slot) for slot in slots]
            last = entries[-1]
            vectors = (
                (trace.floats[: last.floats], torch.float64),
                (trace.ints[: last.ints], torch.int64),
            )
        self._numbers = [torch.tensor(v, dtype=dtype) for v, dtype in vectors if v]
        self._stablehlo = program.stablehlo

    def buildforiloop(
        self, tensors: Sequence[torch.Tensor], additional_inputs_list: Sequence[torch.Tensor] = ()
    ) -> None:
        """Raises NotImplementedError, whose message names the loops to use instead."""
        raise NotImplementedError(MSG_LOOP)

    def hlo(self) -> bytes:
        """The serialized HloModuleProto. Raises RuntimeError before ``build``."""
        return hlo_primitives.hlo_proto(self._built())

    def hlo_text(self) -> str:
        """The module as HLO text. Raises RuntimeError before ``build``."""
        return jax_private.hlo_text(self._built())

    def hlo_json(self) -> str:
        """The HloModuleProto as JSON: names, shapes, computations and their instructions."""
        return json.dumps(hlo_json.module_of(self.hlo()))

    def parameter_id_tensor_mapping(self) -> dict[int, torch.Tensor]:
        """The module's arguments as CPU tensors, by parameter number; their values are read."""
        arguments = [*(read(t) for t in self._inputs), *self._numbers]
        return dict(enumerate(arguments))

    def device_parameter_id_tensor_mapping(self) -> dict[int, torch.Tensor]:
        """The module's arguments as ``xla`` tensors, by parameter number; no value is read."""
        arguments = [*self._inputs, *(n.to(self._device) for n in self._numbers)]
        return dict(enumerate(arguments))

    def tensor_parameter_id(self, tensor: torch.Tensor) -> int:
        """The parameter number of ``tensor``, or -1 if it is not a parameter."""
        if not isinstance(tensor, XLATensor) or tensor._v is not None:
            return -1
        buffers = [id(t._s.buffer) for t in self._inputs]
        own = id(tensor._s.buffer)
        return buffers.index(own) if own in buffers and tensor._s.buffer is not None else -1

    def _built(self) -> bytes:
        if self._stablehlo is None:
            raise RuntimeError(MSG_NOT_BUILT.format(name=self._name))
        return self._stablehlo


def _tensor(trace: Trace, slot: int) -> XLATensor:
    """A tensor with the value of the step's input ``slot``."""
    meta = trace.touched[trace.input_storages[slot]].meta
    return trace.from_buffer(trace.inputs[slot], tensor_meta(meta.shape, meta.dtype))
