"""``call_jax``: calls a jax function on ``xla`` tensors, as one operation of the step.

The function is traced under the user's own jax configuration, so that it computes the same as in plain jax: unless
the user has enabled 64-bit types, it gets 64-bit arguments as 32-bit ones. The step's program contains the jaxpr,
so XLA fuses operations of PyTorch and of jax.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Final

import jax
import numpy as np
import torch

from xla_core.computations.computation import Computation
from xla_core.dispatch.functional import find_trace
from xla_core.jax_bridge import jax_private
from xla_core.jax_bridge.traced_values import JaxObject
from xla_core.operators.tensor_meta import TensorMeta, tensor_meta
from xla_core.recording.xla_tensor import XLATensor
from xla_core.support import caches
from xla_core.torch_bridge.dtypes import NUMPY_DTYPES, numpy_dtype
from xla_core.torch_bridge.operands import NamedOperands, Operands, Tree
from xla_core.torch_features.jax_coexistence import requires_jax

MSG_NOT_XLA: Final = (
    "call_jax takes tensors on an xla device; argument {position} (flattened) is on {device}. Move "
    "it first: .to('xla')"
)
MSG_EFFECTS: Final = (
    "{function} has side effects ({effects}), which a program for a device cannot have; remove "
    "jax.debug.print, io_callback and the like from it"
)
MSG_DTYPE: Final = "{function} returns an array of dtype {dtype}, which PyTorch does not have"
MSG_UNHASHABLE: Final = (
    "argument {position} (flattened) of {function} is of type {type}, which is not hashable; give "
    "tensors, arrays, or values such as numbers and strings"
)
# Functions that are defined anew in each step would fill memory, so the least recently used are dropped.
MAX_KEPT: Final = 1024

_TORCH_DTYPES: Final[Mapping[np.dtype, torch.dtype]] = {n: t for t, n in NUMPY_DTYPES.items()}
_TENSOR: Final = object()


@dataclasses.dataclass(frozen=True, slots=True)
class _Array:
    """A numpy or jax array among the arguments, which is a constant and compared by its content."""

    dtype: np.dtype
    shape: tuple[int, ...]
    content: bytes

    def value(self) -> np.ndarray:
        """The array."""
        return np.frombuffer(self.content, self.dtype).reshape(self.shape)


@dataclasses.dataclass(frozen=True, slots=True)
class _Traced:
    """A function that was traced for arguments of certain shapes, and the structure of its results."""

    function: object  # kept because its id may be part of the key
    computation: Computation
    structure: object


_traced: OrderedDict[Hashable, _Traced] = OrderedDict()
caches.register("functions of jax", bound=MAX_KEPT + 1, size=_traced.__len__, clear=_traced.clear)


@requires_jax
def call_jax(
    jax_func: Callable[..., object],
    args: Operands,
    kwargs: NamedOperands | None = None,
    name: str | None = None,
    override_hash: Hashable = None,
) -> Tree:
    """Call ``jax_func(*args, **kwargs)`` with jax arrays in place of ``xla`` tensors; returns ``xla`` tensors.

    ``jax_func`` must be pure and traceable by ``jax.jit``; arguments and results may be jax pytrees. Arguments that
    are not tensors are constants. The function is traced once per function (or ``override_hash``, if given),
    shapes, dtypes and constants. ``name`` (default: ``jax_func``) is the operation's name in dumps. The results
    have no autograd history; ``torch_xla.experimental.assume_pure.j2t_autograd`` has gradients. Raises TypeError
    for tensors on other devices, for arguments that are not hashable, and for results of dtypes that PyTorch lacks,
    ValueError for a function with side effects.
    """
    leaves, structure = jax.tree.flatten((args, kwargs or {}))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    constants = tuple(constant_of(jax_func, i, leaf) for i, leaf in enumerate(leaves))
    metas = tuple(tensor_meta(tuple(t.shape), t.dtype) for t in tensors)
    platform = find_trace(tensors).backend.platform
    key = (
        override_hash if override_hash is not None else _identity(jax_func),
        *(metas, tuple(map(key_of, constants)), structure, name, platform),
        jax_private.trace_context(),
    )
    traced = _traced.get(key)
    if traced is None:
        traced = _traced[key] = _trace(jax_func, name, metas, constants, structure, platform)
        if len(_traced) > MAX_KEPT:
            _traced.popitem(last=False)
    else:
        _traced.move_to_end(key)
    return jax.tree.unflatten(traced.structure, traced.computation(tensors))


def _identity(function: object) -> Hashable:
    try:
        hash(function)
    except TypeError:
        return id(function)
    return function  # type: ignore[no-any-return]


def key_of(constant: Hashable) -> Hashable:
    """A constant as part of a key, in which 1, 1.0, True and numbers of numpy's types differ.

    Numbers are compared by their text, in which 0.0 and -0.0 differ and nan equals itself.
    """
    if isinstance(constant, (bool, int, float, complex, np.generic)):
        return type(constant), repr(constant)
    return type(constant), constant


def constant_of(function: object, position: int, leaf: Tree) -> Hashable:
    """What argument number ``position`` is to the traced function: one object for tensors, or a hashable constant.

    Raises TypeError for a tensor on another device, and for a value that is not hashable.
    """
    if isinstance(leaf, torch.Tensor):
        if not isinstance(leaf, XLATensor):
            raise TypeError(MSG_NOT_XLA.format(position=position, device=leaf.device))
        return _TENSOR
    if isinstance(leaf, torch.dtype):
        return numpy_dtype(leaf)
    if isinstance(leaf, (np.ndarray, jax.Array)):
        array = np.asarray(leaf)
        return _Array(array.dtype, array.shape, array.tobytes())
    try:
        hash(leaf)
    except TypeError:
        text = MSG_UNHASHABLE.format(
            position=position, function=_name(function), type=type(leaf).__name__
        )
        raise TypeError(text) from None
    return leaf  # type: ignore[no-any-return]


def _name(function: object) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _trace(
    function: Callable[..., object],
    name: str | None,
    metas: tuple[TensorMeta, ...],
    constants: tuple[Tree, ...],
    structure: jax.tree_util.PyTreeDef,
    platform: str,
) -> _Traced:
    results: list[Tree] = []

    def flat(*arrays: jax.Array) -> list[jax.Array]:
        remaining = iter(arrays)
        leaves = [
            next(remaining) if c is _TENSOR else c.value() if isinstance(c, _Array) else c
            for c in constants
        ]
        args, kwargs = jax.tree.unflatten(structure, leaves)
        flattened, shape = jax.tree.flatten(function(*args, **kwargs))
        results[:] = [shape]
        return flattened

    # narrowed here, as the user's configuration requires, because jax 0.12.0 warns when it does so; 0.10.2 does not
    narrowed = [jax.dtypes.canonicalize_dtype(numpy_dtype(m.dtype)) for m in metas]
    structs = [jax.ShapeDtypeStruct(m.shape, t) for m, t in zip(metas, narrowed, strict=True)]
    jaxpr = jax.make_jaxpr(flat)(*structs)
    if jaxpr.effects:
        raise ValueError(MSG_EFFECTS.format(function=_name(function), effects=jaxpr.effects))
    return _Traced(function, _computation(function, name, jaxpr, platform), results[0])


def _computation(
    function: object, name: str | None, jaxpr: JaxObject, platform: str
) -> Computation:
    call = jax_private.jaxpr_function(jaxpr)
    dtypes = [aval.dtype for aval in jaxpr.in_avals]
    # The module identifies the computation, with its constants; the text of a jaxpr would contain addresses.
    module = jax_private.lower(lambda *arrays: call(*arrays), jaxpr.in_avals, (), platform, "jax")

    def evaluate(
        tensors: Sequence[jax.Array],
        _floats: Sequence[jax.Array],
        _ints: Sequence[jax.Array],
        _key: jax.Array,
    ) -> Sequence[jax.Array]:
        arrays = [a.astype(dtype) for a, dtype in zip(tensors, dtypes, strict=True)]
        return call(*arrays)  # type: ignore[no-any-return]

    outputs = [_meta(function, aval) for aval in jaxpr.out_avals]
    return Computation(name or "jax_func", platform.encode() + module, outputs, evaluate)


def _meta(function: object, aval: JaxObject) -> TensorMeta:
    dtype = _TORCH_DTYPES.get(np.dtype(aval.dtype)) if not _is_extended(aval.dtype) else None
    if dtype is None:
        raise TypeError(MSG_DTYPE.format(function=_name(function), dtype=aval.dtype))
    return tensor_meta(tuple(aval.shape), dtype)


def _is_extended(dtype: object) -> bool:
    """Whether a dtype is one of jax's own, such as that of random keys."""
    return bool(jax.dtypes.issubdtype(dtype, jax.dtypes.extended))
