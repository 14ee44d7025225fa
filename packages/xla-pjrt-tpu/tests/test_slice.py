"""With xla-spmd: one training step over all 256 chips of a slice, compiled by the real compiler."""

from __future__ import annotations

import collections
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from xla_pjrt_tpu import libtpu

pytestmark = [
    pytest.mark.skipif(
        libtpu.find_library({}) is None,
        reason="libtpu is not installed: its wheels are for Linux on x86-64 and CPython 3.11 to 3.14",
    ),
    pytest.mark.skipif(
        importlib.util.find_spec("xla_spmd") is None,
        reason="xla-spmd, which makes one program of a whole slice, is not installed",
    ),
]

LAYERS = 4

SCRIPT = """
import json, sys
import numpy as np
import torch
import torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch.nn import functional as F
from torch_xla.distributed.spmd import debugging
from xla_core.extension_api.runtime import use_topology
from xla_core.extension_api.programs import all_programs

sys.path.insert(0, sys.argv[1])
from aot_models import GPT, shape

xr.use_spmd()
use_topology("v6e:16x16")
chips = xr.global_runtime_device_count()
mesh = xs.Mesh(np.arange(chips), (16, 16), ("data", "model"))
with torch.device("meta"):
    model = GPT(512, 256, int(sys.argv[2]), 16, 64)
model.to_empty(device="xla")
for name, parameter in model.named_parameters():
    if parameter.dim() == 2:
        rows = name.endswith(("out.weight", "mlp.2.weight"))
        xs.mark_sharding(parameter, mesh, ("data", "model") if rows else ("model", "data"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
tokens, targets = (shape(64, 64, dtype=torch.int64) for _ in range(2))
for batch in (tokens, targets):
    xs.mark_sharding(batch, mesh, ("data", None))
F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
optimizer.step()
optimizer.zero_grad()
torch_xla.sync()
made = all_programs()[-1]
executable = made.executable
print(json.dumps({
    "chips": chips,
    "partitions": made.program.num_partitions,
    "parameters": sum(p.numel() * p.element_size() for p in model.parameters()),
    "memory": executable.memory_analysis(),
    "collectives": [(c.kind, c.bytes) for c in debugging.collectives(made)],
}))
"""


def test_gpt_over_all_chips():
    """Weights and batch are split over both axes, so every chip holds 1/256 of the matrices."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "TPU_", "PJRT_"))}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(Path(__file__).parent), str(LAYERS)],
        env=clean | {"PJRT_DEVICE": "TPU"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["chips"], found["partitions"]) == (256, 256)
    # the few vectors are whole on each chip; parts of matrices are padded to tiles of 8 x 128
    whole, memory = found["parameters"], found["memory"]
    assert whole / 256 < memory["aliased"] < whole / 50
    assert memory["aliased"] <= memory["arguments"] < whole / 50
    kinds = collections.Counter(kind for kind, _ in found["collectives"])
    # each layer's products add over "model" forward and over "data" backward, attention and MLP
    assert kinds["all-reduce"] >= 4 * LAYERS
    assert kinds["all-gather"] >= 1
    assert all(nbytes > 0 for _, nbytes in found["collectives"])
