"""Models as StableHLO programs, which are called like the model, saved, loaded, and run on ``xla``."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import torch
from jax import Array
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from xla_core.compilation import build_program, stored_programs
from xla_core.compilation.program_identity import ProgramIdentity
from xla_core.compilation.program_table import hold, make_room
from xla_core.contract.device_protocol import ArraySpec, Executable, Program
from xla_core.dispatch.transfers import materialise
from xla_core.execution import runtime
from xla_core.export import arguments, bundle, program
from xla_core.export.bundle import (
    InputLocation,
    StableHLOFunc,
    StableHLOModelBundle,
    VariableSignature,
    VariableType,
)
from xla_core.export.options import StableHLOExportOptions
from xla_core.jax_bridge import portable_stablehlo
from xla_core.operators.tensor_meta import tensor_meta
from xla_core.recording.evictable import Kept, Table
from xla_core.recording.trace import Trace
from xla_core.recording.xla_tensor import XLATensor
from xla_core.torch_bridge.dtypes import numpy_dtype
from xla_core.torch_bridge.operands import Operand, Operands, Tree

MSG_NO_METHOD: Final = "there is no function {name!r}; this model has {known}"
MSG_NO_WEIGHT: Final = (
    "the model's weight {name!r} is not in this bundle, which was exported with export_weights=False or saved "
    "with save_weights=False. Put the weights, as numpy arrays, into _bundle.state_dict"
)
MSG_NOT_A_TENSOR: Final = "argument {position} is a {type}; the program takes a tensor there"
MSG_FORMAT: Final = (
    "an exported program keeps PyTorch's dtypes, but this process keeps {dtype} as {kept} on the device: "
    "unset XLA_USE_BF16, XLA_DOWNCAST_BF16 and XLA_USE_32BIT_LONG, or use another device"
)
MSG_SEVERAL_DEVICES: Final = (
    "an exported program runs on one device, and {device} stands for {count} (xr.use_spmd())"
)


# As for a large model, since the number of a program's operations is not known before it is compiled.
_OPERATIONS: Final = 2048


class _Compiled(Kept):
    """A compiled program for arguments of certain sizes, and the shapes of its results."""

    __slots__ = ("result_shapes",)

    def __init__(self, executable: Executable, result_shapes: list[tuple[int, ...]]) -> None:
        super().__init__(executable)
        self.result_shapes = result_shapes


class StableHLOGraphModule:
    """Programs with their weights, which are called like the exported model.

    A call runs on the ``xla`` device of its tensors (the current device for CPU tensors) and returns ``xla``
    tensors. A program is compiled at the first call with each set of argument sizes.
    """

    def __init__(self, bundle: StableHLOModelBundle) -> None:
        self._bundle = bundle
        self._functions = {f.meta.name: f for f in bundle.stablehlo_funcs}
        self._default = bundle.stablehlo_funcs[0].meta.name
        self._runners: dict[str, _Runner] = {}

    def evaluate(
        self, method_name: str, args: Sequence[Operand], kwargs: Mapping[str, object] | None = None
    ) -> Tree:
        """The result of the function ``method_name`` for these arguments.

        Raises KeyError for an unknown function, TypeError for arguments that do not fit, ValueError for sizes that
        the export excluded and for a missing weight.
        """
        if method_name not in self._runners:
            self._runners[method_name] = _Runner(self._function(method_name), self._bundle)
        return self._runners[method_name](args, kwargs or {})

    def __call__(self, *args: Operand, **kwargs: object) -> Tree:
        """The result of the first function."""
        return self.evaluate(self._default, args, kwargs)

    def get_stablehlo_bytecode(self, method_name: str | None = None) -> bytes:
        """The program of a function (default: the first one) as portable StableHLO (VHLO bytecode)."""
        return self._function(method_name).bytecode

    def get_stablehlo_text(self, method_name: str | None = None) -> str | None:
        """The program of a function (default: the first one) as text; None if it was exported without text."""
        return self._function(method_name).text

    def save(
        self, directory_path: str | os.PathLike[str], options: StableHLOExportOptions | None = None
    ) -> None:
        """Write programs and weights to a directory, which ``load`` and torch_xla's loaders read."""
        bundle.save(self._bundle, directory_path, options)

    @classmethod
    def load(cls, directory_path: str | os.PathLike[str]) -> StableHLOGraphModule:
        """Load a directory of ``save``, or of torch_xla's own ``save``, without running code from there.

        Raises FileNotFoundError if there is no model, ValueError if it is damaged.
        """
        return cls(bundle.load(directory_path))

    def _function(self, name: str | None) -> StableHLOFunc:
        function = self._functions.get(self._default if name is None else name)
        if function is None:
            raise KeyError(MSG_NO_METHOD.format(name=name, known=", ".join(self._functions)))
        return function


class _Runner:
    """Calls one function, and keeps its compiled programs and its weights on the devices."""

    def __init__(self, function: StableHLOFunc, bundle: StableHLOModelBundle) -> None:
        self.meta = function.meta
        self.bytecode = function.bytecode
        self.bundle = bundle
        self.in_spec = _spec(self.meta.input_pytree_spec)
        self.out_spec = _spec(self.meta.output_pytree_spec)
        self.executables = Table()
        self.held: dict[object, tuple[object, XLATensor]] = {}

    def __call__(self, args: Sequence[Operand], kwargs: Mapping[str, Operand]) -> Tree:
        leaves = arguments.flatten(self.in_spec, args, kwargs)
        trace = next((a._s.trace for a in leaves if isinstance(a, XLATensor)), None)
        trace = trace or runtime.trace_of(None)
        with torch.no_grad(), trace.lock:
            places = zip(self.meta.input_locations, self.meta.input_signature, strict=True)
            tensors = [self._argument(place, wanted, leaves, trace) for place, wanted in places]
            results = self._run(tensors, trace)
        return results if self.out_spec is None else pytree.tree_unflatten(results, self.out_spec)

    def _argument(
        self,
        place: InputLocation,
        wanted: VariableSignature,
        leaves: Sequence[Operand],
        trace: Trace,
    ) -> XLATensor:
        if place.type_ is VariableType.INPUT_ARG:
            return _given(place.position, leaves[place.position], wanted, trace)
        key = (place.name or place.position, trace.device)
        source: Operand
        if place.type_ is VariableType.CONSTANT:
            source = self.bundle.additional_constants[place.position]
        else:
            source = self.bundle.state_dict.get(place.name)
            if source is None:
                raise ValueError(MSG_NO_WEIGHT.format(name=place.name))
        held = self.held.get(key)
        if held is None or held[0] is not source:
            held = self.held[key] = (source, _uploaded(source, wanted, trace))
        return held[1]

    def _run(self, tensors: Sequence[XLATensor], trace: Trace) -> list[torch.Tensor]:
        backend = trace.backend
        buffers = [_buffer(t, trace) for t in tensors]
        shapes = tuple(tuple(t.shape) for t in tensors)
        key = (trace.device, shapes)
        compiled = self.executables.get(key)
        if compiled is None:
            compiled = self._compiled(shapes, trace)
            compiled.keep(self.executables, key)
            hold(compiled)
        compiled.mark_used()
        results = compiled.executable.execute(buffers)
        backend.launched(results)
        dtypes = [_dtype(s) for s in self.meta.output_signature]
        return [
            trace.from_buffer(r, tensor_meta(shape, dtype))
            for r, shape, dtype in zip(results, compiled.result_shapes, dtypes, strict=True)
        ]

    def _compiled(self, shapes: Sequence[tuple[int, ...]], trace: Trace) -> _Compiled:
        backend = trace.backend
        count = len(backend.placement.devices)
        if count > 1:
            raise RuntimeError(MSG_SEVERAL_DEVICES.format(device=trace.device, count=count))
        inputs = _specs(trace, self.meta.input_signature, shapes)
        stablehlo = portable_stablehlo.from_portable(self.bytecode, inputs)
        result_shapes = portable_stablehlo.result_shapes(stablehlo)
        make_room(_OPERATIONS)
        name = f"{self.meta.name}_{hashlib.sha256(stablehlo).hexdigest()[:12]}"
        client, placement = backend.client, backend.placement
        # without the settings of this process, as the program was lowered when it was exported
        identity = ProgramIdentity(b"stablehlo\n" + stablehlo, client, b"", b"")
        key = identity.cache_key(name, placement)
        executable = stored_programs.load(client, key, name, placement)
        if executable is None:
            outputs = _specs(trace, self.meta.output_signature, result_shapes)
            program = Program(name, stablehlo, inputs, outputs, (), placement)
            executable = build_program.compile_program(client, program)
            stored_programs.store(key, executable)
        return _Compiled(executable, result_shapes)


def _spec(text: str | None) -> pytree.TreeSpec | None:
    return None if text is None else pytree.treespec_loads(text)


def _dtype(signature: VariableSignature) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, signature.dtype)
    return dtype


def _specs(
    trace: Trace, signatures: Sequence[VariableSignature], shapes: Sequence[tuple[int, ...]]
) -> tuple[ArraySpec, ...]:
    """The specs of arguments or results. Raises RuntimeError if the device would keep them in another dtype."""
    specs = []
    for signature, shape in zip(signatures, shapes, strict=True):
        wanted = numpy_dtype(_dtype(signature))
        kept = trace.backend.numpy_dtype(wanted)
        if kept != wanted:
            raise RuntimeError(MSG_FORMAT.format(dtype=wanted, kept=kept))
        specs.append(ArraySpec(shape, wanted))
    return tuple(specs)


def _given(position: int, a: Operand, wanted: VariableSignature, trace: Trace) -> XLATensor:
    """A caller's argument on the device."""
    if isinstance(a, np.ndarray):
        a = torch.from_numpy(a)
    if not isinstance(a, torch.Tensor):
        raise TypeError(MSG_NOT_A_TENSOR.format(position=position, type=type(a).__name__))
    arguments.check(position, a, wanted)
    tensor: XLATensor = a.detach().to(trace.device)
    return tensor


def _uploaded(array: object, wanted: VariableSignature, trace: Trace) -> XLATensor:
    """A weight or constant on the device, in the dtype that the program takes."""
    dtype = _dtype(wanted)
    kept = np.asarray(array, numpy_dtype(dtype))
    return trace.from_buffer(trace.backend.put(kept), tensor_meta(kept.shape, dtype))


def _buffer(tensor: XLATensor, trace: Trace) -> Array:
    """The buffer of a tensor's value, computed if it is pending."""
    own = tensor if tensor._v is None else tensor.clone()
    s = own._s
    if materialise(trace, s) is None:  # it was never written to
        s.bind(trace.backend.allocate(s.meta))
    return trace.backend.device_buffer(s)


# -- exporting ------------------------------------------------------------------------------------


def exported_program_to_stablehlo(
    exported_model: ExportedProgram, options: StableHLOExportOptions | None = None
) -> StableHLOGraphModule:
    """Lower a program of ``torch.export.export`` to StableHLO; the result is called with the same arguments.

    Raises RuntimeError, which names all operators without a lowering, and LoweringError (a RuntimeError) for an
    operator that cannot be lowered for the sizes or dtypes of its operands.
    """
    return StableHLOGraphModule(program.export(exported_model, options))


def save_as_stablehlo(
    exported_model: ExportedProgram,
    stablehlo_dir: str | os.PathLike[str],
    options: StableHLOExportOptions | None = None,
) -> None:
    """Write ``exported_program_to_stablehlo(exported_model, options)`` to ``stablehlo_dir``, created if needed."""
    exported_program_to_stablehlo(exported_model, options).save(stablehlo_dir, options)


def save_torch_model_as_stablehlo(
    torchmodel: torch.nn.Module,
    args: Operands,
    path: str | os.PathLike[str],
    options: StableHLOExportOptions | None = None,
) -> None:
    """Export a module for the example arguments ``args``, and write it to the directory ``path``."""
    save_as_stablehlo(torch.export.export(torchmodel, args), path, options)
