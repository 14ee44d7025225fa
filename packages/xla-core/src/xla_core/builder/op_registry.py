"""``xla_op_registry``: makes functions on tensors from functions that build computations."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable

import numpy as np
import torch
from torch.utils import _pytree as pytree

from xla_core.builder.hlo import XlaComputation
from xla_core.builder.xla_builder import Op as BuilderOp
from xla_core.builder.xla_builder import create_computation, tensor_shape
from xla_core.computations import pytrees
from xla_core.computations.call_jax import key_of
from xla_core.torch_bridge.dtypes import to_numpy
from xla_core.torch_bridge.operands import Operand

# Functions among keyword arguments that are defined anew for each call would fill memory.
_MOST = 1024


class Op:
    """A function on ``xla`` tensors whose computation ``opfn`` builds, once per shapes and keyword arguments."""

    def __init__(self, name: str, opfn: Callable[..., BuilderOp]) -> None:
        self._name = name
        self._opfn = opfn
        self._lock = threading.Lock()
        # with the keyword arguments, which are kept because the id of one may be in the key
        self._computations: dict[Hashable, tuple[XlaComputation, object]] = {}

    def __call__(self, *args: torch.Tensor, **kwargs: object) -> torch.Tensor | list[torch.Tensor]:
        """The result for these tensors, or a list of several; keyword arguments are passed to ``opfn``."""
        leaves, structure = pytree.tree_flatten(kwargs)
        key = (pytrees.metas(args), structure, tuple(map(_key_of, leaves)))
        with self._lock:
            if key not in self._computations:
                shapes = tensor_shape(args)
                computation = create_computation(self._name, self._opfn, shapes, **kwargs)
                if len(self._computations) >= _MOST:
                    del self._computations[next(iter(self._computations))]  # the oldest
                self._computations[key] = computation, kwargs
            computation = self._computations[key][0]
        results = computation.run(f"xla::_op_{self._name}", args)
        return results[0] if len(results) == 1 else results


def _key_of(argument: Operand) -> Hashable:
    """A part of a keyword argument in a key: arrays count by content, and what cannot be hashed by its id."""
    if isinstance(argument, torch.Tensor):
        argument = to_numpy(argument.cpu())
    if isinstance(argument, np.ndarray):
        return argument.dtype, argument.shape, argument.tobytes()
    try:
        hash(argument)
    except TypeError:
        return type(argument), id(argument)
    return key_of(argument)


def register(name: str, opfn: Callable[..., BuilderOp]) -> Op:
    """A function on ``xla`` tensors, called ``name``, whose computation ``opfn`` builds with ``xla_builder``."""
    return Op(name, opfn)
