"""The SPMD examples of torch_xla's documents, word for word.

The published page lost line breaks and prints curly quotes; ``lines`` undoes that, nothing else.
"""

from __future__ import annotations

import collections
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch_xla.distributed.spmd import HybridMesh, Mesh

MARK_SHARDING = """
mesh_shape = (4, 2) num_devices = xr.global_runtime_device_count() device_ids = np.array(range(num_devices)) mesh = Mesh(device_ids, mesh_shape, (‘x’, ‘y’))

# 4-way data parallel input = torch.randn(8, 32).to(xm.xla_device()) xs.mark_sharding(input, mesh, (0, None))

# 2-way model parallel linear = nn.Linear(32, 10).to(xm.xla_device()) xs.mark_sharding(linear.weight, mesh, (None, 1))
"""  # noqa: E501 - as printed
MESH = """
mesh_shape = (4, 2) num_devices = len(xm.get_xla_supported_devices()) device_ids = np.array(range(num_devices)) mesh = Mesh(device_ids, mesh_shape, (‘x’, ‘y’)) mesh.get_logical_mesh()
"""  # noqa: E501 - as printed
HYBRID = """
# This example is assuming 2 slices of v4-8. ici_mesh_shape = (1, 4, 1) # (data, fsdp, tensor) dcn_mesh_shape = (2, 1, 1)

mesh = HybridMesh(ici_mesh_shape, dcn_mesh_shape, (‘data’,’fsdp’,’tensor’)) print(mesh.shape())
"""  # noqa: E501 - as printed
_STATEMENT = re.compile(
    r" (?=(?:num_devices|device_ids|mesh|input|linear|ici_mesh_shape|dcn_mesh_shape) = "
    r"|xs\.mark_sharding|mesh\.get_logical|print)"
)


def lines(text):
    """The statements of a printed example, one per line, with straight quotes."""
    return _STATEMENT.sub("\n", text.replace("‘", "'").replace("’", "'"))


def run(text):
    names = {
        "xr": xr, "xm": xm, "xs": xs, "np": np, "torch": torch, "nn": nn, "Mesh": Mesh,
        "HybridMesh": HybridMesh,
    }  # fmt: skip
    exec(compile(lines(text), "<document>", "exec"), names)  # noqa: S102 - an example of a document
    return names


def test_mark_sharding():
    names = run(MARK_SHARDING)
    assert names["input"].shape == (8, 32)
    shards = xs.wrap_if_sharded(names["input"]).local_shards
    assert {tuple(shard.data.shape) for shard in shards} == {(2, 32)}
    shards = xs.wrap_if_sharded(names["linear"].weight).local_shards
    assert {tuple(shard.data.shape) for shard in shards} == {(10, 16)}
    assert names["linear"](names["input"]).shape == (8, 10)


def test_hybrid_mesh(capsys):
    mesh = run(HYBRID)["mesh"]
    shape = collections.OrderedDict([("data", 2), ("fsdp", 4), ("tensor", 1)])
    assert mesh.shape() == shape
    assert capsys.readouterr().out == f"{shape}\n"


def test_mesh_counts_devices_one_by_one_outside_spmd_mode(run_python):
    code = f"""
import numpy as np
import torch_xla.core.xla_model as xm
from torch_xla.distributed.spmd import Mesh
{lines(MESH)}
print(mesh.get_logical_mesh().tolist(), mesh.shape())
"""
    found = run_python(code)
    assert "[[0, 1], [2, 3], [4, 5], [6, 7]]" in found
    assert str(collections.OrderedDict([("x", 4), ("y", 2)])) in found


def test_the_virtual_device_wraps_all_devices():
    assert xm.xla_device() == torch.device("xla:0")
    assert xr.is_spmd()
    assert xr.global_runtime_device_count() == 8


@pytest.mark.parametrize("name", ["mark_sharding", "clear_sharding", "set_global_mesh", "Mesh"])
def test_names_of_the_reference_are_documented(name):
    assert getattr(xs, name).__doc__


def test_the_readmes_example():
    text = (Path(__file__).parents[1] / "README.md").read_text()
    names = {}
    exec(text.split("```python\n")[1].split("```")[0], names)  # noqa: S102 - our own example
    shards = xs.wrap_if_sharded(names["model"].weight).local_shards
    assert {tuple(shard.data.shape) for shard in shards} == {(16, 64)}
    assert names["optimizer"].state[names["model"].weight]["step"] == 1
