"""``Any`` only at torch's and jax's borders: each folder has at most as many as are counted here.

A type that has a name is written by its name: ``Operand``, ``Operands``, ``NamedOperands``, ``Tree`` and
``Gradients`` (``torch_bridge/operands.py``), ``Scalar`` in rules, ``Struct`` in the builder, ``StateDict`` in
checkpoints, ``Buffer`` and ``Executable`` of the device protocol, ``jax.Array``, ``torch.Tensor``. What nobody
looks into is an ``object``. Lower a number when a folder needs fewer.
"""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest
from source_tree import SOURCES, parsed

MOST = {
    "torch_xla": 1,
    "xla_core/api": 37,
    "xla_core/attach": 10,
    "xla_core/builder": 27,
    "xla_core/capture": 65,
    "xla_core/compilation": 25,
    "xla_core/computations": 82,
    "xla_core/contract": 29,
    "xla_core/dispatch": 28,
    "xla_core/dynamo": 25,
    "xla_core/execution": 45,
    "xla_core/export": 26,
    "xla_core/extension_api": 5,
    "xla_core/jax_bridge": 127,
    "xla_core/kernels": 50,
    "xla_core/launching": 11,
    "xla_core/lowering": 165,
    "xla_core/multiprocess": 10,
    "xla_core/operators": 50,
    "xla_core/pjrt": 50,
    "xla_core/plugins": 15,
    "xla_core/recording": 215,
    "xla_core/support": 26,
    "xla_core/testing": 40,
    "xla_core/torch_bridge": 81,
    "xla_core/torch_features": 30,
    "xla_core/varying": 141,
    "xla_debug": 25,
    "xla_debug/cli": 10,
    "xla_debug/live": 15,
    "xla_debug/run_report": 20,
    "xla_debug/stacks": 10,
    "xla_debug/steps": 10,
    "xla_dist": 5,
    "xla_dist/collectives": 25,
    "xla_dist/data_parallel": 35,
    "xla_dist/fsdp": 30,
    "xla_dist/job_health": 40,
    "xla_dist/operators": 30,
    "xla_dist/processes": 45,
    "xla_pjrt_cpu": 25,
    "xla_pjrt_cuda": 25,
    "xla_pjrt_tpu": 25,
    "xla_plan": 1,
    "xla_plan/compiled": 2,
    "xla_plan/planning": 17,
    "xla_plan/reports": 1,
    "xla_plan/steps": 15,
    "xla_spmd": 10,
    "xla_spmd/checkpoint": 30,
    "xla_spmd/lowering": 30,
    "xla_spmd/reports": 10,
    "xla_spmd/sharding": 15,
    "xla_spmd/tensors": 20,
    "xla_spmd/training": 15,
}


def folder_of(path: Path) -> str:
    """``xla_core/dispatch``; the package where a module lies in none of its folders."""
    # the last "src": the repository itself may lie in a folder of that name
    parts = path.parts[-path.parts[::-1].index("src") : -1]
    return "/".join(parts[:2])


def uses_of_any(tree: ast.AST) -> int:
    """How often a module writes ``Any``."""
    return sum(isinstance(node, ast.Name) and node.id == "Any" for node in ast.walk(tree))


COUNTS = Counter[str]()
for source in SOURCES:
    COUNTS[folder_of(source)] += uses_of_any(parsed(source))


@pytest.mark.parametrize("folder", sorted(COUNTS))
def test_no_folder_writes_any_more_often(folder):
    assert COUNTS[folder] <= MOST.get(folder, 0)


def test_every_folder_of_the_table_exists():
    assert not MOST.keys() - COUNTS.keys()


def test_uses_are_counted():
    assert uses_of_any(ast.parse("def f(x: Any, *y: list[Any]) -> dict[str, Any]: ...")) == 3
