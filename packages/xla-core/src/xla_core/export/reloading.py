"""Compares saved models with their programs (``torch_xla.utils.stablehlo_test_utils``)."""

from __future__ import annotations

import importlib.util
import os

import torch
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from xla_core.export.saved_model import SERVING_KEY, tensorflow
from xla_core.torch_bridge.operands import Operand, Operands, Tree


def has_tf_package() -> bool:
    """Whether the package tensorflow is installed."""
    return importlib.util.find_spec("tensorflow") is not None


def load_save_model_and_inference(path: str | os.PathLike[str], args: Operands) -> Tree:
    """The results, by name, of the TensorFlow SavedModel at ``path``. Raises ImportError without TensorFlow."""
    tf = tensorflow("load_save_model_and_inference")
    signature = tf.saved_model.load(os.fspath(path)).signatures[SERVING_KEY]
    _, wanted = signature.structured_input_signature
    given = {f"args_{i}": _numpy(a) for i, a in enumerate(pytree.tree_leaves(args))}
    return signature(**{name: tf.constant(given[name]) for name in wanted})


def compare_exported_program_and_saved_model_result(
    ep: ExportedProgram,
    saved_model_path: str | os.PathLike[str],
    args: tuple[torch.Tensor, ...],
    atol: float = 1e-7,
) -> None:
    """Raise AssertionError unless a SavedModel returns the same values as the exported program.

    ``atol`` is the absolute tolerance (default: 1e-7); the relative one is 1.3e-6. Raises ImportError without
    TensorFlow.
    """
    expected = ep.module()(*args)
    results = list(load_save_model_and_inference(saved_model_path, args).values())
    wanted = expected if isinstance(expected, (list, tuple)) else [expected]
    for got, want in zip(results, wanted, strict=True):
        torch.testing.assert_close(torch.from_numpy(got.numpy()), want, atol=atol, rtol=1.3e-6)


def _numpy(value: Operand) -> object:
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value
