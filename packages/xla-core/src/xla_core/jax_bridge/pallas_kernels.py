"""Pallas kernels of jax: how they are traced and lowered here, and the kernels that jax ships for TPUs.

Each private or unstable name says the versions it was run with. The modules with jax's kernels take half
a second to import, so they are imported by the first program that uses them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeVar

import jax

# jax 0.10.2: the switch that makes every pallas_call that is traced run as plain operations
from jax._src import config as _jax_config

# jax 0.10.2: primitives of our own
from jax._src import core as _jax_core

# jax 0.10.2: over how many devices a program is laid out
from jax._src import sharding_impls as _sharding_impls

# jax 0.10.2: the lowering of primitives
from jax._src.interpreters import mlir as _mlir

# jax 0.12.0: the step before it, where operations stand for functions
from jax._src.interpreters import partial_eval as _partial_eval

# jax 0.10.2: the description of a device that this process need not have
from jax._src.mesh import AbstractDevice as _AbstractDevice

# jaxlib 0.10.2: MLIR bindings
from jaxlib.mlir import ir

from xla_core.jax_bridge.module_attributes import all_operations

_Jaxpr = TypeVar("_Jaxpr")
_OPS: Final = "jax.experimental.pallas.ops.tpu"
_CUSTOM_CALL: Final = "tpu_custom_call"


@dataclasses.dataclass(frozen=True, slots=True)
class Compiler:
    """Stands for jax's backend while a module is lowered: kernels ask it for its version.

    Without a version they are written in the current form, that of the libtpu that belongs to this jaxlib.
    """

    platform: str
    # jax 0.10.2: names that mosaic's lowering reads
    platform_version: str = ""
    runtime_type: str = ""


Tracing = Callable[[], contextlib.AbstractContextManager[None]]
"""How kernels are traced: ``for_tpu(...)`` or ``interpreted``."""


def for_tpu(kind: str, cores: int) -> Tracing:
    """Trace kernels for TPUs called ``kind``; jax is not asked for its own devices."""

    @contextlib.contextmanager
    def tracing() -> Iterator[None]:
        device = _AbstractDevice(kind, cores, "tpu")
        mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
        with jax.sharding.use_abstract_mesh(mesh), _known_products():
            yield

    return tracing


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Trace kernels into operations that any device has; values are the same, memory spaces ignored."""
    # jax 0.10.2
    switch = _jax_config.pallas_tpu_interpret_mode_context_manager
    former = switch.swap_local(True)
    try:
        yield
    finally:
        switch.set_local(former)


def call(function: Callable[..., Any], tracing: Tracing, *args: Any, **kwargs: Any) -> jax.Array:
    """``function(*args, **kwargs)``, with the kernels in it traced so; what is no jax array is constant.

    Inside, numbers have 32 bits unless they come with more: kernels know no others. ``function`` must not
    hold arrays of the caller's trace.
    """
    leaves, structure = jax.tree.flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
    results: list[Any] = []

    def flattened(*arrays: jax.Array) -> list[object]:
        given = dict(zip(places, arrays, strict=True))
        filled = [given.get(i, leaf) for i, leaf in enumerate(leaves)]
        inner_args, inner_kwargs = jax.tree.unflatten(structure, filled)
        flat_results, shape = jax.tree.flatten(function(*inner_args, **inner_kwargs))
        results[:] = [shape]
        return flat_results

    operands = [leaves[i] for i in places]
    with jax.enable_x64(False), tracing():
        jaxpr = expanded(jax.make_jaxpr(flattened)(*operands))
    return jax.tree.unflatten(results[0], _narrow_p.bind(*operands, jaxpr=jaxpr))


def expanded(jaxpr: _Jaxpr) -> _Jaxpr:
    """A jaxpr without the operations that stand for functions of jax's, as ``jnp.searchsorted`` does."""
    # jax 0.12.0; older ones have the attribute, and no such operations
    if not getattr(jaxpr, "is_high", False):
        return jaxpr
    lowered: _Jaxpr = _partial_eval.lower_jaxpr2(jaxpr)
    return lowered


def _lower_narrow(ctx: _mlir.LoweringRuleContext, *operands: jax.Array, jaxpr: object) -> object:
    # jax 0.10.2: kernels refuse programs of several partitions outside of jax's own shard_map. Here
    # they stand between manual shardings, or every device computes all of it.
    module = ctx.module_context.replace(axis_context=_sharding_impls.ShardingContext(1))
    with jax.enable_x64(False):
        lower = _mlir.lower_fun(_jax_core.jaxpr_as_fun(jaxpr), multiple_results=True)
        return lower(ctx.replace(module_context=module), *operands)


# jax 0.10.2: a call whose inside is lowered with 32-bit numbers; lowering a kernel makes some
_narrow_p: Final = _jax_core.Primitive("xla_narrow_call")
_narrow_p.multiple_results = True
_narrow_p.def_abstract_eval(lambda *_operands, jaxpr: jaxpr.out_avals)
_mlir.register_lowering(_narrow_p, _lower_narrow)


_patching: Final = threading.RLock()


@contextlib.contextmanager
def _known_products() -> Iterator[None]:
    """Keep megablox from asking jax's own devices whether they multiply bfloat16: every TPU since v4 does."""
    common: Any = importlib.import_module(f"{_OPS}.megablox.common")
    with _patching:
        # jax 0.10.2: the question would start jax's own client of the chips, which this process has
        former = common.supports_bfloat16_matmul
        common.supports_bfloat16_matmul = lambda: True
        try:
            yield
        finally:
            common.supports_bfloat16_matmul = former


def first_payload(module: ir.Module) -> str | None:
    """The compiled form of the first kernel for TPUs in an MLIR module; None if it calls none."""
    with module.context:
        for operation in all_operations(module.body):
            if operation.name == "stablehlo.custom_call":
                attributes = operation.attributes
                if ir.StringAttr(attributes["call_target_name"]).value == _CUSTOM_CALL:
                    return str(ir.StringAttr(attributes["backend_config"]).value)
    return None


def call_payload(
    payload: str, results: Sequence[tuple[tuple[int, ...], object]], *operands: jax.Array
) -> object:
    """Call a compiled kernel; ``results`` are shapes and dtypes."""
    # jaxlib 0.10.2: kernels are calls of the API's first version, with their form as plain text
    call = jax.ffi.ffi_call(
        _CUSTOM_CALL,
        [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in results],
        custom_call_api_version=1,
        legacy_backend_config=payload,
    )
    return call(*operands)


def flash_attention() -> Any:
    """Jax's module of the flash attention kernels, forward and backward."""
    # jax 0.10.2: _flash_attention_impl, _flash_attention_bwd_dkv, _flash_attention_bwd_dq
    return importlib.import_module(f"{_OPS}.flash_attention")


def paged_attention() -> Any:
    """Jax's kernel for one query per sequence on paged keys and values."""
    return importlib.import_module(f"{_OPS}.paged_attention").paged_attention


def ragged_paged_attention() -> Any:
    """Jax's kernel for sequences of different lengths on paged keys and values."""
    return importlib.import_module(f"{_OPS}.ragged_paged_attention").ragged_paged_attention


def grouped_products() -> Any:
    """Jax's module of the kernels ``gmm`` and ``tgmm``."""
    return importlib.import_module(f"{_OPS}.megablox.gmm")


def splash_attention() -> tuple[Any, Any]:
    """Jax's modules of the splash attention kernels and of their masks."""
    package = f"{_OPS}.splash_attention"
    kernel = importlib.import_module(f"{package}.splash_attention_kernel")
    return kernel, importlib.import_module(f"{package}.splash_attention_mask")
