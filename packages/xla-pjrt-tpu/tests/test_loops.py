"""With xla-spmd: layers whose weights are gathered become loops on TPUs, without a word of the user."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from xla_pjrt_tpu import libtpu

pytestmark = [
    pytest.mark.skipif(
        libtpu.find_library({}) is None,
        reason="libtpu is not installed: its wheels are for Linux on x86-64 and CPython 3.11 to 3.14",
    ),
    pytest.mark.skipif(
        importlib.util.find_spec("xla_spmd") is None,
        reason="xla-spmd, which splits a program over a slice, is not installed",
    ),
]

LAYERS = 16  # the first one may stay outside: the loop has 15 or 16 iterations

SCRIPT = """
import json, os, sys
import numpy as np
import torch
from torch import nn
import torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch_xla.distributed.fsdp import checkpoint_module
from torch_xla.distributed.spmd import debugging
from torch_xla.experimental.spmd_fully_sharded_data_parallel import (
    SpmdFullyShardedDataParallel as FSDPv2,
)
from xla_core.extension_api.programs import all_programs, module_text
from xla_core.extension_api.runtime import trace_of

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(128), nn.Linear(128, 512), nn.Linear(512, 128)

    def forward(self, x):
        y = self.up(torch.tanh(self.norm(x) * 0.5 + 0.25).sin() * 2.0)
        return x + self.down(nn.functional.gelu(y + 0.125).relu() - 0.5)

xr.use_spmd()
chips = xr.global_runtime_device_count()
mesh = xs.Mesh(np.arange(chips), (chips, 1), ("fsdp", "tensor"))
wrapped = [FSDPv2(checkpoint_module(Block().to("xla")), mesh=mesh) for _ in range(int(sys.argv[1]))]
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


def test_fully_sharded_layers_are_loops():
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "TPU_", "PJRT_"))}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(LAYERS)],
        env=clean | {"PJRT_DEVICE": "TPU", "XLA_AOT_TOPOLOGY": "v5e:4x4"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    loops, one_by_one = json.loads(done.stdout.splitlines()[-1])
    assert (loops["loops"], one_by_one["loops"]) == (2, 0)  # forward and backward
    assert loops["memory"]["temporaries"] < one_by_one["memory"]["temporaries"]
    assert loops["memory"]["code"] < one_by_one["memory"]["code"]
    assert 0 < loops["gathers"] < one_by_one["gathers"]
