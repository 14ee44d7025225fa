"""``xla_op_registry``: a builder's function as a function of tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any

import torch

from xla_core.builder.hlo import XlaComputation
from xla_core.builder.xla_builder import Op as BuilderOp
from xla_core.builder.xla_builder import create_computation, tensor_shape
from xla_core.computations import pytrees


class Op:
    """A function on ``xla`` tensors that ``opfn`` builds, once per shapes and keyword arguments."""

    def __init__(self, name: str, opfn: Callable[..., BuilderOp]) -> None:
        self._name = name
        self._opfn = opfn
        self._lock = threading.Lock()
        self._computations: dict[Hashable, XlaComputation] = {}

    def __call__(self, *args: torch.Tensor, **kwargs: object) -> Any:
        """The result for these tensors, or a list of several; keyword arguments are ``opfn``'s."""
        key = (pytrees.metas(args), repr(sorted(kwargs.items())))
        with self._lock:
            computation = self._computations.get(key)
            if computation is None:
                shapes = tensor_shape(args)
                computation = create_computation(self._name, self._opfn, shapes, **kwargs)
                self._computations[key] = computation
        results = computation.run(f"xla::_op_{self._name}", args)
        return results[0] if len(results) == 1 else results


def register(name: str, opfn: Callable[..., BuilderOp]) -> Op:
    """The operation ``name`` on ``xla`` tensors that ``opfn`` builds from ``xla_builder`` operations."""
    return Op(name, opfn)
