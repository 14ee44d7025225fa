"""Lowers a program of ``torch.export`` to StableHLO by the lazy device's lowering rules."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch._decomp import decomposition_table
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind, SymIntArgument
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from xla_core.export import arguments
from xla_core.export.bundle import (
    InputLocation,
    StableHLOFunc,
    StableHLOFunctionMeta,
    StableHLOModelBundle,
    VariableSignature,
)
from xla_core.export.interpreter import (
    MSG_UNSUPPORTED,
    ExportRun,
    draw_seeds,
    graphs_of,
    scalar_constants,
    unsupported_operators,
)
from xla_core.export.locations import relocation
from xla_core.export.options import StableHLOExportOptions
from xla_core.export.results import result_spec
from xla_core.export.symbols import Symbols, is_dynamic
from xla_core.jax_bridge import portable_stablehlo
from xla_core.jax_bridge.passes.composites import build_composites
from xla_core.jax_bridge.portable_stablehlo import PortableProgram
from xla_core.jax_bridge.traced_values import TracedValue
from xla_core.lowering import compile_settings, load_rules
from xla_core.operators.decompositions import lowerable
from xla_core.operators.lowering_registry import find_multi_view
from xla_core.torch_bridge.dtypes import numpy_dtype, to_numpy
from xla_core.torch_bridge.op_library import kernel_from_outside
from xla_core.torch_bridge.operands import Operand

METHOD: Final = "forward"

MSG_NOT_EXPORTED: Final = (
    "exported_program_to_stablehlo takes the result of torch.export.export(), got {type}; for a module "
    "call save_torch_model_as_stablehlo, or export it first"
)
MSG_SYMBOLIC_NUMBER: Final = (
    "argument {position} ({name}) is a number of any value, but a StableHLO program takes tensors; "
    "pass it as a tensor, or export with a fixed number"
)

MSG_RESULT: Final = (
    "the model returns a {type}, but a StableHLO program returns tensors and numbers; leave it out of the "
    "result"
)

# bool comes first, as it is a subclass of int
_NUMBERS: Final = (
    (bool, "bool"),
    ((int, torch.SymInt), "int64"),
    ((float, torch.SymFloat), "float64"),
)
_WRITES: Final = tuple(
    kind
    for kind in OutputKind
    if kind.name in ("BUFFER_MUTATION", "PARAMETER_MUTATION", "USER_INPUT_MUTATION")
)


@dataclasses.dataclass(frozen=True, slots=True)
class _Results:
    """The program's results, a node or a number each, and the structure of the caller's result."""

    values: tuple[object, ...]
    spec: pytree.TreeSpec


def export(
    exported: ExportedProgram, options: StableHLOExportOptions | None = None
) -> StableHLOModelBundle:
    """The bundle of an exported program; its only function is ``forward``.

    Buffers have their present values in it; writes to them are dropped, unless ``options.return_mutations``. Raises
    RuntimeError, which names all operators without a lowering, LoweringError for an operator whose lowering fails,
    TypeError for anything but an exported program.
    """
    if not isinstance(exported, ExportedProgram):
        raise TypeError(MSG_NOT_EXPORTED.format(type=type(exported).__name__))
    return _Export(exported, options or StableHLOExportOptions()).bundle()


class _Export:
    """The export of one program."""

    def __init__(self, exported: ExportedProgram, options: StableHLOExportOptions) -> None:
        load_rules()
        self.options = options
        self.custom = frozenset(options.custom_ops_allowed_in_graph)
        self.examples = _example_inputs(exported, options)
        self.program = _decomposed(exported, self.custom)
        self.graph: GraphModule = self.program.graph_module
        self.results = self._results()
        missing = unsupported_operators(self.graph, self.custom)
        if missing:
            raise RuntimeError(MSG_UNSUPPORTED.format(operators=", ".join(missing)))
        self.symbols = Symbols(self.program.range_constraints)
        self.seeds = draw_seeds(self.graph)
        self.scalars = {} if options.inline_all_constant else scalar_constants(self.graph)

    def bundle(self) -> StableHLOModelBundle:
        """Lower the program, and describe how to call it."""
        used, unused = self._arguments()
        constants = self._constants()
        lowered = self._lower([node for node, _, _ in used], constants)
        locations = [place for _, place, _ in used]
        signatures = [signature for _, _, signature in used]
        meta = StableHLOFunctionMeta(
            name=METHOD,
            stablehlo_version=lowered.version,
            input_signature=signatures + [_signature_of_array(a) for a in constants],
            output_signature=[self._result_signature(value) for value in self.results.values],
            input_locations=locations + [InputLocation.constant(i) for i in range(len(constants))],
            unused_inputs=unused,
            input_pytree_spec=pytree.treespec_dumps(self.program.call_spec.in_spec),
            output_pytree_spec=pytree.treespec_dumps(self.results.spec),
        )
        return StableHLOModelBundle(
            state_dict=self._weights() if self.options.export_weights else {},
            additional_constants=constants,
            stablehlo_funcs=[StableHLOFunc(meta, lowered.bytecode, lowered.text)],
        )

    # -- arguments ----------------------------------------------------------------------------------

    def _arguments(
        self,
    ) -> tuple[
        list[tuple[Node, InputLocation, VariableSignature]],
        list[tuple[InputLocation, VariableSignature]],
    ]:
        """The program's arguments, and the caller's arguments that the program does not use."""
        used, unused = [], []
        placeholders = [n for n in self.graph.graph.nodes if n.op == "placeholder"]
        position = 0
        for node, spec in zip(placeholders, self.program.graph_signature.input_specs, strict=True):
            if spec.kind is InputKind.USER_INPUT:
                place = InputLocation.input_arg(position)
                position += 1
                signature = self._given_signature(place.position, node)
                if isinstance(spec.arg, SymIntArgument) and node.users:
                    text = MSG_SYMBOLIC_NUMBER.format(position=place.position, name=node.name)
                    raise ValueError(text)
                if not node.users:
                    unused.append((place, signature))
                    continue
            elif node.users:
                assert spec.target is not None
                place = InputLocation.parameter(spec.target)
                signature = self._signature(node.meta["val"])
            else:
                continue
            used.append((node, place, signature))
        return used, unused

    def _signature(self, value: Operand) -> VariableSignature:
        """The shape and dtype of an example value, with the size at the export in symbolic dimensions."""
        if not isinstance(value, torch.Tensor):
            return VariableSignature([], type(value).__name__)
        return VariableSignature(
            shape=[_hint(size) for size in value.shape],
            dtype=_dtype_name(value.dtype),
            dynamic_dims=[i for i, size in enumerate(value.shape) if is_dynamic(size)],
        )

    def _result_signature(self, value: Operand) -> VariableSignature:
        """The signature of a result; numbers are returned as tensors of shape ()."""
        example = value.meta["val"] if isinstance(value, Node) else value
        for kind, dtype in _NUMBERS:
            if isinstance(example, kind):
                return VariableSignature([], dtype)
        if not isinstance(example, torch.Tensor):
            raise TypeError(MSG_RESULT.format(type=type(example).__name__))
        return self._signature(example)

    def _given_signature(self, position: int, node: Node) -> VariableSignature:
        """The signature of a caller's argument, with the sizes of the example argument if there is one."""
        signature = self._signature(node.meta.get("val"))
        example = self.examples[position] if self.examples else None
        if isinstance(example, torch.Tensor):
            arguments.check(position, example, signature)
            signature.shape = list(example.shape)
        elif example is not None:
            signature.dtype = type(example).__name__
        return signature

    def _weights(self) -> dict[str, np.ndarray]:
        """Copies of the model's parameters, buffers and constant tensors, as numpy arrays by name."""
        known = {**self.program.constants, **self.program.state_dict}
        wanted = [
            spec.target
            for spec in self.program.graph_signature.input_specs
            if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
        ]
        return {name: to_numpy(known[name].cpu()).copy() for name in wanted if name is not None}

    def _constants(self) -> list[np.ndarray]:
        """The numbers that are arguments of the program: those in its code, and seeds."""
        if self.options.inline_all_constant:
            return []
        return [*self.scalars.values(), *(np.asarray(s, np.int64) for s in self.seeds.values())]

    # -- results ------------------------------------------------------------------------------------

    def _results(self) -> _Results:
        """Choose the results, and remove nodes that they do not depend on from the graph."""
        (output,) = [n for n in self.graph.graph.nodes if n.op == "output"]
        pairs = list(zip(self.program.graph_signature.output_specs, output.args[0], strict=True))
        given = [value for spec, value in pairs if spec.kind is OutputKind.USER_OUTPUT]
        values = [v for v in given if v is not None]
        written = None
        if self.options.return_mutations:
            new = {s.target: v for s, v in pairs if s.kind in _WRITES and s.target is not None}
            values += new.values()
            written = list(new)
        nothing = [v is None for v in given]
        spec = result_spec(self.program.call_spec.out_spec, nothing, written)
        output.args = (tuple(values),)
        self.graph.graph.eliminate_dead_code()
        return _Results(tuple(values), spec)

    # -- lowering -----------------------------------------------------------------------------------

    def _lower(self, nodes: Sequence[Node], constants: Sequence[np.ndarray]) -> PortableProgram:
        scopes: dict[str, Node] | None = {} if self.options.export_node_metadata else None
        metas = [self.symbols.meta(node.meta["val"]) for node in nodes]
        avals = [jax.ShapeDtypeStruct(m.shape, numpy_dtype(m.dtype)) for m in metas]

        def function(*arrays: TracedValue) -> tuple[object, ...]:
            given = dict(zip(nodes, arrays, strict=False))
            numbers = arrays[len(nodes) :]
            scalars = dict(zip(self.scalars, numbers, strict=False))
            drawn = numbers[len(scalars) :] or self.seeds.values()
            seeds = dict(zip(self.seeds, drawn, strict=True))
            run = ExportRun(self.symbols, self.custom, seeds, scalars, scopes)
            placeholders = (n for n in self.graph.graph.nodes if n.op == "placeholder")
            results = run.run(self.graph, [given.get(node) for node in placeholders])
            return tuple(jnp.asarray(r) for r in results)

        with compile_settings.matmul_precision():
            return portable_stablehlo.lower_portable(
                function,
                [*avals, *constants],
                METHOD,
                with_text=self.options.include_human_readable_text,
                edit=build_composites,
                relocate=None if scopes is None else relocation(scopes),
            )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _hint(size: int | torch.SymInt) -> int:
    """The size that a symbolic one had when the model was exported."""
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)


def _signature_of_array(array: np.ndarray) -> VariableSignature:
    return VariableSignature(list(array.shape), str(array.dtype))


def _decomposed(exported: ExportedProgram, custom: frozenset[str]) -> ExportedProgram:
    """The program, with operators that have no rule replaced by PyTorch's definitions of them."""
    with warnings.catch_warnings():
        # torch 2.13 copies its own specs in a way that it has deprecated
        warnings.filterwarnings("ignore", "`isinstance\\(treespec, LeafSpec\\)`", FutureWarning)
        kernels = _kernels_from_outside(exported, custom)
        return exported.run_decompositions({**_decompositions(custom), **kernels})


def _kernels_from_outside(
    exported: ExportedProgram, custom: frozenset[str]
) -> dict[OpOverload, object]:
    """The kernels for ``xla`` tensors that the user or a library has registered for the program's operators."""
    targets = {n.target for graph in graphs_of(exported.graph_module) for n in graph.graph.nodes}
    kernels = {
        target: kernel_from_outside(target)
        for target in targets
        if isinstance(target, OpOverload) and target.namespace not in custom
    }
    return {t: kernel for t, kernel in kernels.items() if kernel is not None and not lowerable(t)}


def _decompositions(custom: frozenset[str]) -> dict[OpOverload, object]:
    """PyTorch's definitions of the operators that have no rule here."""
    known = {**decomposition_table, **dict(torch.export.default_decompositions().items())}
    return {
        overload: definition
        for overload, definition in known.items()
        if isinstance(overload, OpOverload)
        and not lowerable(overload)
        and find_multi_view(overload) is None
        and overload.namespace not in custom
    }


def _example_inputs(exported: ExportedProgram, options: StableHLOExportOptions) -> list[object]:
    """The example arguments, flattened, whose sizes are written into signatures; empty if there are none."""
    spec = exported.call_spec.in_spec
    if options.override_tracing_arguments is not None:
        chosen = options.override_tracing_kwargs or {}
        return arguments.flatten(spec, options.override_tracing_arguments, chosen)
    if exported.example_inputs is None:
        return []
    return arguments.flatten(spec, *exported.example_inputs)
