"""Whole training steps compiled for TPUs with the real compiler, on a machine that has none."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xla_core.protocol import ArraySpec, Topology
from xla_core.testing.programs import make_program
from xla_pjrt_tpu import TpuClient, create_client, libtpu
from xla_pjrt_tpu.hardware import generation

pytestmark = pytest.mark.skipif(
    libtpu.find_library({}) is None,
    reason="libtpu is not installed: its wheels are for Linux on x86-64 and CPython 3.11 to 3.14",
)
MODELS = Path(__file__).with_name("aot_models.py")
TRACED_FOR = "v5e:2x2"
TOPOLOGIES = (TRACED_FOR, "v4:2x2x1", "v5p:2x2x2")
USES = ("arguments", "outputs", "temporaries", "aliased", "code")
# A layout pads each array to whole tiles of 8 x 128 elements: 4 KiB for the smallest float32 vector
# (bias, norm) is 0.5 KiB; the rest of a figure is the weights themselves.
PADDING = 1.35


def aot(code, *arguments, **environment):
    """Run Python code with the TPU chosen, as a user would; returns the finished process."""
    command = [sys.executable, *(("-c", code) if isinstance(code, str) else (str(code),))]
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "TPU_", "PJRT_"))}
    return subprocess.run(
        [*command, *arguments],
        env=clean | {"PJRT_DEVICE": "TPU"} | environment,
        capture_output=True,
        text=True,
        timeout=600,
    )


def client_of(topology):
    return create_client(Topology(), {"XLA_AOT_TOPOLOGY": topology})


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    path = tmp_path_factory.mktemp("aot") / "programs.pkl"
    done = aot(MODELS, TRACED_FOR, str(path))
    assert done.returncode == 0, done.stderr
    return pickle.loads(path.read_bytes())


@pytest.fixture(scope="module")
def compiled(traced):
    """(figures, HLO) of a model on a topology; each is compiled once."""
    known = {}

    def get(model, topology):
        if topology == TRACED_FOR:
            return traced[model]["memory"], traced[model]["cost"], traced[model]["hlo"]
        if (model, topology) not in known:
            executable = client_of(topology).compile(traced[model]["program"])
            known[model, topology] = (
                executable.memory_analysis(),
                executable.cost_analysis(),
                executable.optimized_hlo(),
            )
        return known[model, topology]

    return get


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("model", ["digits", "gpt", "resnet18"])
def test_training_step_compiles_for_each_generation(compiled, traced, model, topology):
    memory, cost, hlo = compiled(model, topology)
    state = 3 if model == "digits" else 1  # Adam keeps two moments beside each parameter
    weights = state * traced[model]["parameter_bytes"]
    assert set(memory) == set(USES)
    assert weights <= memory["aliased"] <= PADDING * weights + (1 << 20)
    assert memory["aliased"] <= memory["outputs"] and memory["aliased"] <= memory["arguments"]
    assert memory["code"] > 0
    limit = generation(topology.split(":")[0]).memory_bytes
    assert sum(memory[u] for u in USES) - memory["aliased"] < limit
    assert cost["flops"] > 0 and cost["bytes accessed"] >= weights
    layout = re.search(r"entry_computation_layout=\{\((.*?)\)->", hlo)[1]
    # 32-bit numbers lie in tiles of 8 rows of 128 lanes
    assert re.search(r"f32\[\d+,\d+\]\{[01],[01]:T\(8,128\)\}", layout)
    assert "input_output_alias={" in hlo
    assert "f64[" not in hlo and "c128[" not in hlo
    assert ("convolution(" in hlo) or model == "gpt"  # on a TPU also what a matmul becomes


def test_same_step_costs_the_same_everywhere(compiled):
    """FLOPs are the program's, not the chip's; 10 % is what generations' rewrites differ by."""
    found = [compiled("gpt", topology)[1]["flops"] for topology in TOPOLOGIES]
    assert max(found) < 1.1 * min(found)


def jax_step(*arrays):
    """The step of aot_models' ``mlp``, as one writes it in jax: rates are constants."""
    x, y, *state = arrays
    weights, momenta = state[:4], state[4:]

    def loss_of(weights):
        w1, b1, w2, b2 = weights
        return jnp.mean((jax.nn.relu(x @ w1.T + b1) @ w2.T + b2 - y) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(weights)
    momenta = [0.9 * m + g for m, g in zip(momenta, gradients, strict=True)]
    weights = [w - 0.1 * m for w, m in zip(weights, momenta, strict=True)]
    return (loss, *weights, *momenta)


@pytest.mark.parametrize("topology", [TRACED_FOR, "v5p:2x2x2"])
def test_memory_is_that_of_the_same_model_in_jax(compiled, topology):
    """Within 2 %: rates that come in one vector, so that a schedule recompiles nothing, cost some.

    Taking them out is a kernel of its own, for which libtpu reserves up to 1.5 MB of temporaries on
    v5e whatever the model's size; jax has none of it with rates that are constants.
    """
    found, cost, _ = compiled("mlp", topology)
    batch, (inner, outer) = 512, (2048, 8192)
    weights = [(outer, inner), (outer,), (inner, outer), (inner,)]
    shapes = [(batch, inner), (batch, inner), *weights, *weights]
    device = client_of(topology)
    specs = [ArraySpec(s, np.dtype(np.float32)) for s in shapes]
    aliases = [(2 + i, 1 + i) for i in range(8)]
    executable = device.compile(make_program(device, jax_step, specs, aliases=aliases))
    wanted = executable.memory_analysis()
    assert abs(total(found) - total(wanted)) <= 0.02 * total(wanted), (found, wanted)
    for use in ("arguments", "outputs", "aliased"):
        assert abs(found[use] - wanted[use]) <= 0.02 * wanted[use], use
    flops = executable.cost_analysis()["flops"]
    assert abs(cost["flops"] - flops) <= 0.02 * flops


def total(memory):
    return memory["arguments"] + memory["outputs"] - memory["aliased"] + memory["temporaries"]


def test_figures_of_a_program(traced):
    found = traced["mlp"]["figures"]
    memory = traced["mlp"]["memory"]
    assert {use: getattr(found, use) for use in USES} == {use: memory[use] for use in USES}
    assert found.total == total(memory) + memory["code"]
    assert found.limit == generation(TRACED_FOR.split(":")[0]).memory_bytes
    assert str(found).startswith("step_") and "FLOPs" in str(found)
    assert found.flops > 0 and found.bytes_accessed > memory["arguments"]


SCRIPT = """
import torch, torch_xla
import torch_xla.core.xla_model as xm
from xla_core import aot, counters, report

device = torch_xla.device()
model = torch.nn.Linear(300, 200).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    x = torch.randn(8, 300).to(device)
    optimizer.zero_grad()
    loss = model(x).double().pow(2).mean()
    loss.backward()
    xm.optimizer_step(optimizer, barrier=True)
print(len(torch_xla.devices()), xm.xla_device_hw(device), loss.dtype, aot.active())
print(xm.get_memory_info(device)["bytes_limit"])
print([f.name for f in report.program_figures()], [f.total for f in report.program_figures()])
print(sorted(n for n in counters.all_counters() if n in ("UncachedCompile", "PersistentCacheHit")))
print("value", loss.item(), model.weight.cpu().abs().max().item())
"""


def test_script_is_compiled_and_a_read_is_refused():
    done = aot(SCRIPT, XLA_AOT_TOPOLOGY="v5e:4x4")
    lines = done.stdout.splitlines()
    assert lines[0] == "16 TPU torch.float64 True"
    assert lines[1] == str(generation("v5e").memory_bytes)
    assert done.returncode == 1
    assert "there is no value to read" in done.stderr and "float32[]" in done.stderr
    assert "XLA_AOT_READS=zeros" in done.stderr
    assert "value" not in done.stdout


def test_script_goes_through_with_zeros_and_its_programs_are_kept(tmp_path):
    settings = {
        "XLA_AOT_TOPOLOGY": "v5e:4x4",
        "XLA_AOT_READS": "zeros",
        "XLA_PERSISTENT_CACHE_PATH": str(tmp_path / "cache"),
    }
    first, second = aot(SCRIPT, **settings), aot(SCRIPT, **settings)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    a, b = first.stdout.splitlines(), second.stdout.splitlines()
    assert a[3:] == ["['UncachedCompile']", "value 0.0 0.0"]
    assert b[3:] == ["['PersistentCacheHit']", "value 0.0 0.0"]
    assert a[2] == b[2]  # names and figures are the stored ones
    other = aot(SCRIPT, **settings | {"XLA_AOT_TOPOLOGY": "v6e:4x4"})
    assert other.stdout.splitlines()[3] == "['UncachedCompile']"


def test_chips_have_the_fingerprint_of_their_topology():
    """A host's client sees devices of these kinds and places; no more goes into the key."""
    topology = client_of("v5e:4x4")
    host = TpuClient.__new__(TpuClient)  # without starting libtpu on chips, which are not here
    host._client = topology._by_id[0].client
    host._descriptions = tuple(reversed(topology.devices()))
    host._flags = topology._flags
    assert host.fingerprint() == topology.fingerprint()


def test_stored_program_has_the_runtimes_own_form():
    """What a host loads is what the runtime serialized: the description is taken off before."""
    device = client_of("v5e:2x2")
    program = make_program(device, lambda a: a + 1, [ArraySpec((8,), np.dtype(np.float32))])
    executable = device.compile(program)
    payload = executable.serialize()
    assert payload.endswith(executable._compiled.serialize())
    assert device.deserialize(payload, "again", program.placement).serialize() == payload


MEMORY = """
import resource, time, torch, torch_xla
from xla_core import aot, report

aot.use_topology("v5p:2x2x1")
with torch.device("meta"):
    model = torch.nn.Sequential(*[torch.nn.Linear(16384, 16384, dtype=torch.bfloat16) for _ in range(32)])
model.to_empty(device="xla")
x = torch.empty(16, 16384, dtype=torch.bfloat16, device="meta").to("xla")
with torch.no_grad():
    y = model(x)
torch_xla.sync()
figures = report.program_figures()[-1]
print(sum(p.numel() for p in model.parameters()), figures.arguments)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def test_model_of_eight_billion_parameters_is_never_allocated():
    done = aot(MEMORY)
    assert done.returncode == 0, done.stderr
    numbers, peak = done.stdout.splitlines()
    parameters, arguments = map(int, numbers.split())
    assert parameters > 8e9
    assert arguments >= 2 * parameters
    assert (
        int(peak) < 4 << 30
    )  # the weights would be 17 GB; libraries and compiler are what is left


def test_meta_tensors_stay_an_error_where_values_are():
    code = "import torch, torch_xla; torch.nn.Linear(2, 2, device='meta').to('xla')"
    done = aot(code, PJRT_DEVICE="NULL")
    assert done.returncode == 1
    assert "meta" in done.stderr


def test_topology_cannot_be_chosen_too_late():
    code = """
import torch, torch_xla
from xla_core import aot
torch_xla.device()
aot.use_topology("v5e:2x2")
"""
    done = aot(code, PJRT_DEVICE="NULL")
    assert "RuntimeError: the NULL client runs already" in done.stderr
