"""``_XLAC.lowering.LoweringContext``: what computes tensors, as HLO for other tools, with its arguments."""

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
    "buildforiloop writes a loop down for torch_xla's own fori_loop, which is not there: use "
    "torch_xla.experimental.fori_loop, or torch._higher_order_ops.while_loop, and build() its results"
)


class LoweringContext:
    """Writes the computation of tensors down as an HLO module called ``name``.

    Nothing runs and the step stays as it is. The module's parameters are the tensors in device memory that
    the results need, in the order in which they were used first, and then, if there are any, the numbers
    of the step that may change (learning rates, seeds): a vector of floats and one of ints.
    """

    def __init__(self, name: str = "") -> None:
        self._name = name or "FromIr"
        self._stablehlo: bytes | None = None
        self._inputs: list[XLATensor] = []
        self._numbers: list[torch.Tensor] = []

    def set_name_string(self, name: str) -> None:
        """Let the module of the next ``build`` be called so."""
        self._name = name

    def get_name_string(self) -> str:
        """The module's name."""
        return self._name

    def build(self, tensors: Sequence[torch.Tensor]) -> None:
        """Write down what computes ``tensors``. Raises TypeError for one that is on no ``xla`` device."""
        with graph_of(tensors) as (trace, entries, outputs):
            slots, kept = read_inputs(trace, entries, outputs)
            distinct = tuple(dict.fromkeys(outputs))
            layout = trace.backend.layout(trace, entries, distinct, ())
            program = step_program.lower(trace, kept, distinct, layout, self._name)
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
        """Not here: raises NotImplementedError that says how loops are written."""
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
        """The module's arguments as CPU tensors, by parameter number; reads the values."""
        given = [*(read(t) for t in self._inputs), *self._numbers]
        return dict(enumerate(given))

    def device_parameter_id_tensor_mapping(self) -> dict[int, torch.Tensor]:
        """The module's arguments as ``xla`` tensors, by parameter number; no value is read."""
        given = [*self._inputs, *(n.to("xla") for n in self._numbers)]
        return dict(enumerate(given))

    def tensor_parameter_id(self, tensor: torch.Tensor) -> int:
        """The number of the parameter that ``tensor`` is, or -1 where it is none."""
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
    """A tensor with the value that is the step's input ``slot``."""
    meta = trace.touched[trace.input_storages[slot]].meta
    return trace.from_buffer(trace.inputs[slot], tensor_meta(meta.shape, meta.dtype))
