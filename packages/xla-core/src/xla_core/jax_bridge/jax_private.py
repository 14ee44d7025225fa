"""Private or unstable names of jax and jaxlib for tracing, lowering and profiling; runtimes: ``jaxlib_runtime``.

Each use names the versions it was run with. Nothing here changes jax's configuration or starts one
of jax's own backends: a user's jax in the same process does not notice that we exist.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Final, Protocol, TypeAlias

import jax
import numpy as np

# jax 0.10.2: the flag of the tracing context that says how much of a traceback each op records.
from jax._src import config as _jax_config

# jax 0.10.2: Primitive, and the function of a jaxpr.
from jax._src import core as _jax_core

# jax 0.10.2: ShardingContext tells the lowering over how many partitions a program is laid out.
from jax._src import sharding_impls as _sharding_impls

# jax 0.10.2: FlatTree holds the arguments of a function that is traced
from jax._src import tree_util as _tree_util

# jax 0.10.2: read only by backends_started().
from jax._src import xla_bridge as _xla_bridge

# jax 0.10.2: the step from jaxpr to an MLIR module; the public way starts a backend on the way.
from jax._src.interpreters import mlir as _mlir

# jax 0.10.2: the step from a function to its jaxpr
from jax._src.interpreters import partial_eval as _partial_eval

# jaxlib 0.10.2: the extension module with clients, executables and arrays.
from jaxlib import _jax as _jaxlib

# jaxlib 0.10.2: the profiler without the parts of jax.profiler that start a backend.
from jaxlib import _profiler

# jaxlib 0.10.2: MLIR bindings; ``ir`` edits attributes, ``passmanager`` strips locations.
from jaxlib.mlir import ir
from jaxlib.mlir import passmanager as _passmanager

# jaxlib 0.10.2: builders of StableHLO operations, for lowering rules that jax has no primitive for.
from jaxlib.mlir.dialects import stablehlo as stablehlo

from xla_core.jax_bridge import mlir_contexts, module_attributes, pallas_kernels
from xla_core.jax_bridge.jax_versions import SINCE_0_11
from xla_core.jax_bridge.passes import manual_constants, partitioner_repairs, shardy_form

# jax 0.10.2: an operation of ours; public as jax.extend.core.Primitive, which takes 0.15 s to import
Primitive: TypeAlias = _jax_core.Primitive

STRIP_LOCATIONS: Final = "builtin.module(strip-debuginfo)"


# jax 0.10.2: one operation of a jaxpr
Equation: TypeAlias = _jax_core.JaxprEqn

# Platforms for which jax's lowering looks at nothing but the jaxpr.
_PLAIN: Final = ("cpu", "cuda", "rocm")

Relocation: TypeAlias = Callable[[str], "tuple[str, str, int] | None"]
"""From an operation's name to its new name, file and line; None leaves it as it is."""


class HasShape(Protocol):
    """Anything with a shape and a dtype: an ``ArraySpec``, a ``jax.ShapeDtypeStruct``, an array."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the dimensions."""
        ...

    @property
    def dtype(self) -> Any:
        """A numpy dtype, or what ``numpy.dtype`` takes."""
        ...


# --- lowering -----------------------------------------------------------------------------------


def lower(
    function: Callable[..., Any],
    avals: Sequence[HasShape],
    aliases: Sequence[tuple[int, int]],
    platform: str,
    name: str,
    *,
    num_replicas: int = 1,
    num_partitions: int = 1,
    input_shardings: Sequence[str | None] = (),
    output_shardings: Sequence[str | None] = (),
    mesh_of: shardy_form.MeshOf | None = None,
    debug_locations: bool = False,
    kept_prefix: str | None = None,
    relocate: Relocation | None = None,
    edit: Callable[[ir.Module], None] | None = None,
) -> bytes:
    """Lower ``function`` of ``len(avals)`` arrays to StableHLO bytecode for one ``platform``.

    ``name`` is the module's. Its program runs on ``num_replicas`` times ``num_partitions`` devices, with
    ``input_shardings`` and ``output_shardings`` over the latter. Every input stays an argument, used or not;
    outputs are the flattened result. ``aliases`` pairs an input with the output that takes over its memory.
    Shardings are HLO texts (``{devices=[2,1]<=[2]}``), one per input or output, or none at all; None means
    replicated for an input and the compiler's choice for an output. If ``mesh_of(texts)`` finds a mesh for all
    shardings of the program, it is rewritten for Shardy (``passes.shardy_form``). 64-bit types are on, whatever
    jax's configuration says, and no jax backend is started. Calls of inner functions (``jax.jit``) whose names
    begin with ``kept_prefix`` tell XLA to keep them as functions, each compiled once. Locations are left out unless
    ``debug_locations``, so that equal programs give equal bytes wherever they were traced. With ``relocate``
    operations keep their names (of ``jax.named_scope``) as it changes them; ``edit`` may change the module.
    Raises ValueError for an alias that does not fit, or if the function calls back into Python.
    """
    module = lower_to_module(
        function, avals, aliases, platform, name,
        num_replicas=num_replicas, num_partitions=num_partitions,
        input_shardings=input_shardings, output_shardings=output_shardings,
        mesh_of=mesh_of, debug_locations=debug_locations, kept_prefix=kept_prefix,
    )  # fmt: skip
    if edit is not None:
        edit(module)
    if relocate is not None:
        relocate_operations(module, relocate)
    return module_to_bytecode(module, debug_locations=debug_locations or relocate is not None)


def lower_to_module(
    function: Callable[..., object],
    avals: Sequence[HasShape],
    aliases: Sequence[tuple[int, int]],
    platform: str,
    name: str,
    *,
    num_replicas: int = 1,
    num_partitions: int = 1,
    input_shardings: Sequence[str | None] = (),
    output_shardings: Sequence[str | None] = (),
    mesh_of: shardy_form.MeshOf | None = None,
    debug_locations: bool = False,
    kept_prefix: str | None = None,
) -> ir.Module:
    """``lower`` up to the MLIR module, for callers that edit it first."""
    with jax.enable_x64(True), location_detail(debug_locations):
        jaxpr = _traced(function, avals)
        module = jaxpr_to_module(jaxpr, platform, name, num_partitions)
    if kept_prefix is not None:
        module_attributes.keep_functions(module, lambda name: name.startswith(kept_prefix))
        with module.context:
            _passmanager.PassManager.parse("builtin.module(func.func(cse,canonicalize))").run(
                module.operation
            )
    module_attributes.set_module_counts(module, num_replicas, num_partitions)
    if num_partitions > 1:
        input_shardings = [text or "{replicated}" for text in input_shardings]
    module_attributes.annotate(module, aliases, input_shardings, output_shardings)
    if num_partitions > 1:
        if mesh_of is not None:
            shardy_form.convert(module, mesh_of)
        module_attributes.pin_unannotated_inputs(module)
        manual_constants.separate_constants(module)
        partitioner_repairs.correct(module, num_partitions)
    if platform == "cpu" and num_partitions * num_replicas > 1:
        partitioner_repairs.lay_out_transforms(module)
    return module


def _traced(function: Callable[..., object], avals: Sequence[HasShape]) -> Any:
    """The jaxpr of ``function``."""
    if SINCE_0_11 or any(type(n) is not int for a in avals for n in a.shape):
        structs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
        return jax.make_jaxpr(function)(*structs)
    # jax 0.10.2: what make_jaxpr does after it has looked for shardings, donations and names, for 0.2 ms
    given = tuple(_jax_core.ShapedArray(a.shape, np.dtype(a.dtype)) for a in avals)
    arguments = _tree_util.FlatTree.flatten((given, {}))
    nameless = _jax_core.DebugInfo("jit", "step", None, None)  # for error messages
    jaxpr, _ = _partial_eval.trace_to_jaxpr(lambda *arrays: function(*arrays), arguments, nameless)
    return jaxpr


def module_to_bytecode(module: ir.Module, *, debug_locations: bool = False) -> bytes:
    """The bytecode of an MLIR module, or of what ``jax.jit(f).lower()`` returned.

    Without ``debug_locations`` the module loses its locations: it is changed in place.
    """
    if hasattr(module, "compiler_ir"):
        module = module.compiler_ir("stablehlo")
    if not debug_locations:
        with module.context:
            _passmanager.PassManager.parse(STRIP_LOCATIONS).run(module.operation)
    output = io.BytesIO()
    module.operation.write_bytecode(file=output)
    mlir_contexts.count(output.tell())
    return output.getvalue()


def inline_functions(stablehlo: bytes, names: Collection[str]) -> bytes:
    """StableHLO bytecode whose kept functions (see ``lower``) of these names are inlined by XLA."""
    with _mlir.make_ir_context():  # jax 0.10.2
        module = ir.Module.parse(stablehlo)
        module_attributes.release_functions(module, names)
        return module_to_bytecode(module, debug_locations=True)


def operation_names(stablehlo: bytes) -> frozenset[str] | None:
    """The names of all operations in StableHLO bytecode, with their dialects; None if it is not readable."""
    with _mlir.make_ir_context():  # jax 0.10.2
        try:
            module = ir.Module.parse(stablehlo)
        except (ir.MLIRError, ValueError):
            return None
        operations = module_attributes.all_operations(module.body)
        return frozenset({"builtin.module", *(operation.name for operation in operations)})


def module_text(stablehlo: bytes) -> str:
    """StableHLO bytecode as readable MLIR."""
    # jax 0.10.2: a context in which all dialects that XLA accepts are loaded
    with _mlir.make_ir_context():
        return str(ir.Module.parse(stablehlo))


def hlo_text(stablehlo: bytes, tupled: bool = False) -> str:
    """StableHLO bytecode as the text of the HLO module that XLA makes of it, not optimised.

    ``tupled``: its results are one tuple, also where there is just one.
    """
    # jaxlib 0.10.2
    computation = _jaxlib.mlir.mlir_module_to_xla_computation(stablehlo, False, tupled)
    text: str = computation.get_hlo_module().to_string()
    return text


def jaxpr_function(jaxpr: object) -> Callable[..., list[Any]]:
    """The function that computes what a closed jaxpr says."""
    # jax 0.10.2; public as jax.extend.core.jaxpr_as_fun
    return _jax_core.jaxpr_as_fun(jaxpr)  # type: ignore[no-any-return]


def trace_context() -> object:
    """What of jax's configuration decides how a function is traced, hashable."""
    # jax 0.10.2
    return _jax_config.trace_context()


def backends_started() -> tuple[str, ...]:
    """Names of the backends that jax itself has started in this process (none because of us)."""
    return tuple(_xla_bridge._backends)


@contextlib.contextmanager
def location_detail(wanted: bool) -> Iterator[None]:
    """Whether operations that are traced inside keep where they come from."""
    # jax 0.10.2: collecting frames for locations that are stripped anyway costs time per op
    if wanted:
        yield
    else:
        with _jax_config.traceback_in_locations_limit(0):
            yield


def jaxpr_to_module(jaxpr: Any, platform: str, name: str, num_partitions: int) -> ir.Module:
    """The MLIR module of a jaxpr; symbolic sizes become its first arguments."""
    jaxpr = pallas_kernels.expanded(jaxpr)
    avals = list(jaxpr.in_avals)
    # jax 0.11.2 and 0.12.0 ask for the results' types, too.
    results = {"out_avals": list(jaxpr.out_avals)} if SINCE_0_11 else {}
    axes = _sharding_impls.ShardingContext(num_partitions)
    sizes = (n for aval in avals for n in getattr(aval, "shape", ()))
    plain = platform in _PLAIN and num_partitions == 1 and not jaxpr.effects
    if plain and all(type(n) is int for n in sizes):
        module, callbacks = mlir_contexts.lower_jaxpr(jaxpr, platform, name, axes, results)
    else:
        # jax 0.10.2: all arguments are keyword arguments without defaults.
        result = _mlir.lower_jaxpr_to_module(
            name,
            jaxpr,
            num_const_args=0,
            in_avals=avals,
            **results,
            ordered_effects=[],
            platforms=(platform,),
            # without one, the lowering of a kernel for TPUs would start jax's own client of the chips
            backend=pallas_kernels.Compiler(platform) if platform == "tpu" else None,
            axis_context=axes,
            donated_args=[False] * len(avals),
            num_partitions=num_partitions,
            lowering_parameters=_mlir.LoweringParameters(hoist_constants_as_args=False),
        )
        module, callbacks = result.module, result.host_callbacks
    if callbacks:
        raise ValueError(f"{name} calls back into Python; a program for a device cannot")
    return module


def relocate_operations(module: ir.Module, relocate: Relocation) -> None:
    """Give operations the names and lines that ``relocate`` makes of the names they have."""

    with module.context:
        for operation in module_attributes.all_operations(module.body):
            location = operation.location
            if isinstance(location, ir.NameLoc):
                placed = relocate(location.name_str)
                if placed is not None:
                    name, filename, line = placed
                    inner = ir.Location.file(filename, line, 0) if filename else None
                    operation.location = ir.Location.name(name, childLoc=inner)


# --- profiling ----------------------------------------------------------------------------------

Session: TypeAlias = _profiler.ProfilerSession


def profiler_session(*, python_frames: bool = False) -> Session:
    """Start to record what the runtimes and this process's threads do; no jax backend is started.

    Raises RuntimeError while another session records.
    """
    # jaxlib 0.10.2: jax.profiler.start_trace would start a backend of jax's own
    options = _profiler.ProfileOptions()
    options.python_tracer_level = int(python_frames)
    options.raise_error_on_start_failure = True
    return _profiler.ProfilerSession(options)


def profiler_export(session: Session, directory: str) -> None:
    """End a session and write it below ``directory`` as TensorBoard's profile plugin expects."""
    # jaxlib 0.10.2
    session.stop_and_export(directory)


def profiler_server(port: int) -> object:
    """A server that records when asked over the network, while the returned object lives."""
    # jaxlib 0.10.2
    return _profiler.start_server(port)


def trace_me(name: str, **details: object) -> object:
    """A context manager whose time shows as ``name`` in profiles; nearly free when none is taken."""
    # jaxlib 0.10.2
    return _profiler.TraceMe(name, **details)


def scan_operands(equation: Equation) -> tuple[int, int]:
    """How many operands of a ``scan`` are the same in every step, and how many it carries; the others are items."""
    params = equation.params
    if not SINCE_0_11:  # jax 0.10.2 counts them
        return params["num_consts"], params["num_carry"]
    # jax 0.11.2, 0.12.0: a tree of three groups
    constants, carried, _ = params["ft_in"].update(equation.invars).unpack()
    return len(list(constants)), len(list(carried))
