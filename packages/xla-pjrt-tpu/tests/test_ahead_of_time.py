"""Scripts compiled for TPUs by the real compiler on a machine without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest

RUN = """
import json
import torch, torch_xla
from xla_core import runtime

seen = []
compile_program = runtime.Backend.compile


def watched(backend, program):
    seen.append(compile_program(backend, program))
    return seen[-1]


runtime.Backend.compile = watched
device = torch_xla.device()
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 8))
model.to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loss = model(torch.ones(16, 64, device=device)).sum()
loss.backward()
optimizer.step()
torch_xla.sync()
executable = seen[-1]
print(json.dumps({
    "devices": torch_xla.device_count(),
    "memory": dict(executable.memory_analysis()),
    "flops": executable.cost_analysis()["flops"],
    "hlo": executable.optimized_hlo(),
    "stored": len(executable.serialize()),
}))
READ
"""


def run(script, topology, **environment):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PJRT_DEVICE": "TPU", "XLA_AOT_TOPOLOGY": topology, **environment},
    )


# (topology, devices as PyTorch counts them): two cores of a v4 chip are one device (megacore)
@pytest.mark.parametrize(("topology", "devices"), [("v5e:2x2", 4), ("v4:2x2x1", 4)])
def test_a_training_step_is_compiled_for_the_topology(topology, devices):
    done = run(RUN.replace("READ", ""), topology)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["devices"] == devices
    parameters = 4 * (64 * 128 + 128 + 128 * 8 + 8)
    assert found["memory"]["arguments"] >= parameters
    assert found["memory"]["outputs"] >= 2 * parameters  # the parameters and their momentum
    # three products of (16, 64, 128) and of (16, 128, 8), less the gradient of the input
    assert found["flops"] > 2 * 16 * 128 * (2 * 64 + 3 * 8)
    assert "f32[128,64]{" in found["hlo"]
    assert ":T(" in found["hlo"]  # tiled layouts, which only a TPU has
    assert found["stored"] > 1000


def test_reading_a_value_is_refused_with_the_way_out():
    done = run(RUN.replace("READ", "loss.item()"), "v5e:2x2")
    assert done.returncode != 0
    assert "v5e:2x2" in done.stderr
    assert "XLA_AOT_READS=zeros" in done.stderr


def test_values_are_zeros_when_asked_for():
    done = run(RUN.replace("READ", "print(loss.item())"), "v5e:2x2", XLA_AOT_READS="zeros")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "0.0"


def test_an_unknown_topology_is_named():
    done = run("import torch_xla; torch_xla.device()", "v9z:2x2")
    assert done.returncode != 0
    assert "v9z" in done.stderr
