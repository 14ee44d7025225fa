"""With xla-spmd: training steps over the chips of a slice, compiled by the real compiler."""

from __future__ import annotations

import collections
import importlib.util
import json
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

OVER_ALL_CHIPS = """
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


FULLY_SHARDED = """
import json, os, sys
import numpy as np
import torch
from torch import nn
import torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch_xla.distributed.spmd import debugging
from torch_xla.experimental.spmd_fully_sharded_data_parallel import (
    SpmdFullyShardedDataParallel as FSDPv2,
)
from torch_xla.utils.checkpoint import checkpoint
from xla_core.extension_api.programs import all_programs, module_text
from xla_core.extension_api.runtime import trace_of

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(128), nn.Linear(128, 512), nn.Linear(512, 128)

    def forward(self, x):
        return checkpoint(self.again, x)

    def again(self, x):
        y = self.up(torch.tanh(self.norm(x) * 0.5 + 0.25).sin() * 2.0)
        return x + self.down(nn.functional.gelu(y + 0.125).relu() - 0.5)

xr.use_spmd()
chips = xr.global_runtime_device_count()
mesh = xs.Mesh(np.arange(chips), (chips, 1), ("fsdp", "tensor"))
wrapped = [FSDPv2(Block().to("xla"), mesh=mesh) for _ in range(int(sys.argv[1]))]
model = FSDPv2(nn.Sequential(*wrapped).to("xla"), mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.zeros(4 * chips, 64, 128).to("xla").requires_grad_()
xs.mark_sharding(x, mesh, ("fsdp", None, None))
found = []
for choice in (None, "0"):
    if choice is not None:
        os.environ["XLA_LOOP_REPEATS"] = choice
        trace_of(None).forget()
    model(x).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    x.grad = None
    torch_xla.sync()
    step = all_programs()[-1]
    found.append({
        "loops": module_text(step.program.stablehlo).count("stablehlo.while"),
        "memory": step.executable.memory_analysis(),
        "gathers": sum(c.kind == "all-gather" for c in debugging.collectives(step)),
    })
print(json.dumps(found))
"""


@pytest.fixture
def printed(run_on_tpu):
    """What a script prints last."""

    def run(script, *arguments, **environment):
        done = run_on_tpu(script, *arguments, **environment)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


def test_gpt_over_all_chips(printed):
    """Weights and batch are split over both axes, so every chip holds 1/256 of the matrices."""
    found = printed(OVER_ALL_CHIPS, str(Path(__file__).parent), str(LAYERS))
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


@pytest.mark.long
def test_fully_sharded_layers_are_loops(printed):
    """Without a word of the user: their weights are gathered, and they are computed again in the backward pass."""
    # the first layer may stay outside: the loops have 15 or 16 iterations
    loops, one_by_one = printed(FULLY_SHARDED, "16", XLA_AOT_TOPOLOGY="v5e:4x4")
    assert (loops["loops"], one_by_one["loops"]) == (2, 0)  # forward and backward
    assert loops["memory"]["temporaries"] < one_by_one["memory"]["temporaries"]
    assert loops["memory"]["code"] < one_by_one["memory"]["code"]
    assert 0 < loops["gathers"] < one_by_one["gathers"]
