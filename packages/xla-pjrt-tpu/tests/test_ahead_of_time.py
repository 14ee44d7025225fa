"""Whole training steps compiled for TPUs with the real compiler, on a machine that has none."""

from __future__ import annotations

import functools
import importlib.util
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xla_core.contract import serialized_executable
from xla_core.contract.device_protocol import ArraySpec, Topology
from xla_core.extension_api.runtime import use_topology
from xla_core.pjrt import tpu_memory
from xla_core.testing.programs import make_program
from xla_pjrt_tpu import TpuClient, create_client, libtpu
from xla_pjrt_tpu.hardware import generation

pytestmark = pytest.mark.skipif(
    libtpu.find_library({}) is None,
    reason="libtpu is not installed: its wheels are for Linux on x86-64 and CPython 3.11 to 3.14",
)
TRACED_FOR = "v5e:2x2"
TOPOLOGIES = (TRACED_FOR, "v4:2x2x1", "v5p:2x2x2")
USES = ("arguments", "outputs", "temporaries", "aliased", "code")
# A layout pads each array to whole tiles of 8 x 128 elements: 4 KiB for the smallest float32 vector
# (bias, norm) is 0.5 KiB; the rest of a figure is the weights themselves.
PADDING = 1.35
# As HLO spells the dtypes of arguments.
HLO_NAMES = {"float32": "f32", "int64": "s64"}


def client_of(topology):
    return create_client(Topology(), {"XLA_AOT_TOPOLOGY": topology})


@functools.cache
def models():
    """tests/aot_models.py, with the topology of this process chosen."""
    use_topology(TRACED_FOR)
    path = Path(__file__).with_name("aot_models.py")
    spec = importlib.util.spec_from_file_location("aot_models", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def traced(model):
    return models().training_step(model)


def executables(model, topologies):
    """The step compiled for each topology; what it was traced for is compiled already."""
    made, _, _ = traced(model)
    yield TRACED_FOR, made.executable
    for topology in topologies:
        yield topology, client_of(topology).compile(made.program)


@pytest.mark.long
@pytest.mark.parametrize("model", ["resnet18", "gpt", "digits"])
def test_training_step_compiles_for_each_generation(model):
    made, _, updated = traced(model)
    flops = []
    for topology, executable in executables(model, TOPOLOGIES[1:]):
        memory, cost = executable.memory_analysis(), executable.cost_analysis()
        assert set(memory) == set(USES)
        # parameters and the optimizer's state take over the memory that they had
        assert updated <= memory["aliased"] <= PADDING * updated + (1 << 20), topology
        assert memory["aliased"] <= memory["outputs"] and memory["aliased"] <= memory["arguments"]
        assert memory["code"] > 0
        limit = generation(topology.split(":")[0]).memory_bytes
        assert total(memory) + memory["code"] < limit
        assert cost["bytes accessed"] >= updated
        check_hlo(executable.optimized_hlo(), made.program.inputs)
        flops.append(cost["flops"])
    # FLOPs are the program's, not the chip's; 10 % is what generations' rewrites differ by
    assert 0 < max(flops) < 1.1 * min(flops)


def check_hlo(hlo, inputs):
    """Dtypes, layouts and donation, as the compiler wrote them down."""
    layout = re.search(r"entry_computation_layout=\{\((.*?)\)->", hlo)[1]
    found = re.findall(r"(\w+)\[([\d,]*)\]\{([\d,]*):T\(([\d,]+)\)", layout)
    wanted = [(HLO_NAMES[s.dtype.name], ",".join(map(str, s.shape))) for s in inputs]
    assert [(dtype, shape) for dtype, shape, *_ in found] == wanted
    # 32-bit matrices lie in tiles of 8 rows of 128 lanes, their rows one after the other
    matrices = [rest for dtype, shape, *rest in found if dtype == "f32" and shape.count(",") == 1]
    assert matrices and all(rest == ["1,0", "8,128"] for rest in matrices)
    assert "input_output_alias={" in hlo
    assert "f64[" not in hlo and "c128[" not in hlo
    assert "convolution(" in hlo  # on a TPU also what a matmul becomes


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


@pytest.mark.long
def test_memory_is_that_of_the_same_model_in_jax():
    """Within 2 %: rates that come in one vector, so that a schedule recompiles nothing, cost some.

    Taking them out is a kernel of its own, for which libtpu reserves up to 1.5 MB of temporaries on
    v5e whatever the model's size; jax has none of it with rates that are constants.
    """
    batch, (inner, outer) = 512, (2048, 8192)
    weights = [(outer, inner), (outer,), (inner, outer), (inner,)]
    shapes = [(batch, inner), (batch, inner), *weights, *weights]
    specs = [ArraySpec(s, np.dtype(np.float32)) for s in shapes]
    aliases = [(2 + i, 1 + i) for i in range(8)]
    for topology, executable in executables("mlp", ["v5p:2x2x2"]):
        device = client_of(topology)
        wanted = device.compile(make_program(device, jax_step, specs, aliases=aliases))
        found, other = executable.memory_analysis(), wanted.memory_analysis()
        assert abs(total(found) - total(other)) <= 0.02 * total(other), (found, other)
        for use in ("arguments", "outputs", "aliased"):
            assert abs(found[use] - other[use]) <= 0.02 * other[use], use
        ours, theirs = executable.cost_analysis()["flops"], wanted.cost_analysis()["flops"]
        assert abs(ours - theirs) <= 0.02 * theirs
    check_figures(traced("mlp"))


def test_gaps_between_temporaries_count_once():
    """In what is compiled, and in what an older version stored with PJRT's number."""
    executable = traced("digits")[0].executable
    stored = executable.serialize()
    code, report = unpacked(stored)
    size, gaps = tpu_memory.block_of_temporaries(code)
    assert 0 < gaps < size
    assert executable.memory_analysis()["temporaries"] == report["memory"]["temporaries"] == size

    report["memory"]["temporaries"] = size + gaps
    client, program = client_of(TRACED_FOR), traced("digits")[0].program
    older = serialized_executable.pack(client.plugin, program, code, report=report)
    for payload in (stored, older):
        loaded = client.deserialize(payload, program.name, program.placement)
        assert loaded.memory_analysis() == executable.memory_analysis()


def test_temporaries_are_the_block_that_the_compiler_lays_out(tmp_path):
    """As its report says, which it writes into the folder of ``xla_dump_to``."""
    options = {"xla_dump_to": str(tmp_path), "xla_dump_hlo_as_text": True}
    device, spec = client_of(TRACED_FOR), ArraySpec((8000, 8000), np.dtype(np.float32))
    program = make_program(device, flipped, [spec], options=options)
    temporaries = device.compile(program).memory_analysis()["temporaries"]
    (report,) = tmp_path.glob("*after_optimizations-buffer-assignment.txt")
    (size,) = re.findall(
        r"^allocation \d+: size (\d+), preallocated-temp", report.read_text(), re.M
    )
    assert temporaries == int(size) > 3 * 8000 * 8000 * 4


def flipped(x):
    return jnp.exp(x.T[::-1]).T[1:] + jnp.flip(x, 1)[:-1], x.T[:3000].T


def unpacked(stored):
    program = traced("digits")[0].program
    plugin = client_of(TRACED_FOR).plugin
    _, code = serialized_executable.unpack(plugin, stored, program.name, program.placement)
    return code, dict(serialized_executable.report(stored))


def test_what_a_program_does_not_say_is_what_pjrt_reports():
    for stored in (b"", b"no program", bytes(100)):
        assert tpu_memory.without_gaps(1000, stored) == 1000


def total(memory):
    return memory["arguments"] + memory["outputs"] - memory["aliased"] + memory["temporaries"]


def check_figures(step):
    """What the report says is what the compiler says."""
    made, figures, _ = step
    memory = made.executable.memory_analysis()
    assert {use: getattr(figures, use) for use in USES} == {use: memory[use] for use in USES}
    assert figures.total == total(memory) + memory["code"]
    assert figures.limit == generation(TRACED_FOR.split(":")[0]).memory_bytes
    assert str(figures).startswith("step_") and "FLOPs" in str(figures)
    assert figures.flops > 0 and figures.bytes_accessed > memory["arguments"]
    # three products of 512 x 2048 x 8192 forward and back, 4 x 128 x 128 x 2 operations a cycle at most
    assert figures.cycles > figures.flops / (4 * 128 * 128 * 2)
    assert f"estimated {figures.cycles:.3g} cycles" in str(figures)


SCRIPT = """
import torch, torch_xla
import torch_xla.core.xla_model as xm
from xla_core.extension_api.runtime import is_ahead_of_time
from xla_core.support import counters
from xla_core.extension_api.programs import program_figures

device = torch_xla.device()
model = torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.Dropout()).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    x = torch.randn(8, 300).to(device)
    optimizer.zero_grad()
    loss = model(x).double().pow(2).mean()
    loss.backward()
    xm.optimizer_step(optimizer, barrier=True)
print([f.name for f in program_figures()])
print(len(torch_xla.devices()), xm.xla_device_hw(device), loss.dtype, is_ahead_of_time())
print(xm.get_memory_info(device)["bytes_limit"], [f.total for f in program_figures()])
print(sorted(n for n in counters.all_counters() if n in ("UncachedCompile", "PersistentCacheHit")))
print("value", loss.item(), model[0].weight.cpu().abs().max().item())
"""


def test_script_is_compiled_kept_and_walked_through(run_on_tpu, tmp_path):
    """A read is refused; with zeros the whole script runs, with the programs that were kept."""
    settings = {"XLA_AOT_TOPOLOGY": "v5e:4x4", "XLA_PERSISTENT_CACHE_PATH": str(tmp_path / "cache")}
    first = run_on_tpu(SCRIPT, **settings)
    a = first.stdout.splitlines()
    assert a[1] == "16 TPU torch.float64 True"
    assert a[2].startswith(str(generation("v5e").memory_bytes))
    assert a[3:] == ["['UncachedCompile']"]
    assert first.returncode == 1
    assert "there is no value to read" in first.stderr and "float32[]" in first.stderr
    assert "XLA_AOT_READS=zeros" in first.stderr
    second = run_on_tpu(SCRIPT, **settings, XLA_AOT_READS="zeros")
    assert second.returncode == 0, second.stderr
    b = second.stdout.splitlines()
    assert b[:3] == a[:3]  # names and figures are the stored ones
    assert b[3:] == ["['PersistentCacheHit']", "value 0.0 0.0"]


STEPS = """
import torch, torch_xla
from xla_core.testing.internals import key_text
from xla_core.contract import events

def listen(step):
    print(key_text(step.entries, step.outputs, step.aliases).decode())

{choose}
events.subscribe(events.ProgramMissing, listen)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.Dropout()).to("xla")
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
for _ in range(2):
    x = torch.empty(8, 30, device="xla").normal_()
    mask = torch.empty(8, 20, device="xla")
    mask[:, :10] = 1.0
    (model(x) * mask).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    torch_xla.sync()
"""


def test_steps_are_those_that_a_device_with_values_records(run_on_tpu):
    """Or a host with chips would not find what was compiled for them."""
    chosen = 'from xla_core.extension_api.runtime import use_topology; use_topology("v5e:2x2")'
    ahead = run_on_tpu(STEPS.format(choose=chosen))
    real = run_on_tpu(STEPS.format(choose=""), PJRT_DEVICE="NULL")
    assert (ahead.returncode, real.returncode) == (0, 0), ahead.stderr + real.stderr
    assert ahead.stdout == real.stdout
    assert ahead.stdout.count("outputs [") == 2 and "bernoulli_" in ahead.stdout


def test_chips_have_the_fingerprint_of_their_topology():
    """A host's client sees devices of these kinds and places; no more goes into the key."""
    topology = client_of("v5e:4x4")
    host = TpuClient.__new__(TpuClient)  # without starting libtpu on chips, which are not here
    host._client = topology._by_id[0].client
    host._descriptions = tuple(reversed(topology.devices()))
    host._flags = topology._flags
    assert host.fingerprint() == topology.fingerprint()
    assert host.fingerprint() != client_of("v6e:4x4").fingerprint()


FIRST_STEP = """
import json, sys
import torch
import torch_xla
from xla_core.contract.device_protocol import Topology
from xla_core.support import counters
from xla_core.testing.internals import PersistentCache
from xla_pjrt_tpu import TpuClient, create_client

def reports_chips(self, topology, options):
    # what libtpu reports of these chips; programs are loaded, as shapes, and never compiled
    self.shown = create_client(Topology(), {"XLA_AOT_TOPOLOGY": "v5e:2x2", "XLA_AOT_READS": "zeros"})
    self._client = self.shown._by_id[0].client
    self._descriptions = tuple(self.shown.devices())
    self._local = [self.shown._by_id[one.id] for one in self._descriptions]
    self._flags = self.shown._flags

def refuses(self, program):
    raise AssertionError(f"{program.name} is compiled, though it was ahead of time")

if sys.argv[1] == "host":
    TpuClient.__init__, TpuClient.compile = reports_chips, refuses
    for name in ("devices local_devices put get copy allocate placement_of wait deserialize").split():
        setattr(TpuClient, name, lambda self, *given, _name=name: getattr(self.shown, _name)(*given))

keys, get = [], PersistentCache.get
def noted(self, key):
    keys.append({name: value.hex() for name, value in key.entries})
    return get(self, key)
PersistentCache.get = noted

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.Dropout(), torch.nn.Linear(20, 3)).to("xla")
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.ones(8, 30).to("xla")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    torch_xla.sync()
found = counters.all_counters()
print(json.dumps([keys, {name: found.get(name, 0) for name in ("UncachedCompile", "PersistentCacheHit")}]))
"""


def test_the_first_step_on_chips_finds_what_was_compiled_for_their_topology(run_on_tpu, tmp_path):
    """The whole key is the same; the host's client is a stand-in in what it reports, and compiles nothing."""
    settings = {"XLA_PERSISTENT_CACHE_PATH": str(tmp_path / "cache"), "XLA_CACHE_PREFETCH": "0"}
    ahead = run_on_tpu(
        FIRST_STEP, "ahead", XLA_AOT_TOPOLOGY="v5e:2x2", XLA_AOT_READS="zeros", **settings
    )
    assert ahead.returncode == 0, ahead.stderr
    keys, counts = json.loads(ahead.stdout.splitlines()[-1])
    assert counts == {"UncachedCompile": len(keys), "PersistentCacheHit": 0} and keys
    host = run_on_tpu(FIRST_STEP, "host", **settings)
    assert host.returncode == 0, host.stderr
    keys_there, counts = json.loads(host.stdout.splitlines()[-1])
    for ours, theirs in zip(keys, keys_there, strict=True):
        assert ours.keys() == theirs.keys()
        assert [name for name in ours if ours[name] != theirs[name]] == []
    assert counts == {"UncachedCompile": 0, "PersistentCacheHit": len(keys)}
    assert {"program", "settings", "layouts", "lowering", "placement"} < keys[0].keys()
    device = {name for name in keys[0] if name.startswith("device:")}
    assert {"device:devices", "device:libtpu_flags", "device:platform_version"} <= device


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
from xla_core.extension_api.runtime import use_topology
from xla_core.pjrt import tpu_memory
from xla_core.extension_api.programs import program_figures

use_topology("v5p:2x2x1")
with torch.device("meta"):
    model = torch.nn.Sequential(*[torch.nn.Linear(16384, 16384, dtype=torch.bfloat16) for _ in range(32)])
model.to_empty(device="xla")
x = torch.empty(16, 16384, dtype=torch.bfloat16, device="meta").to("xla")
with torch.no_grad():
    y = model(x)
torch_xla.sync()
figures = program_figures()[-1]
print(sum(p.numel() for p in model.parameters()), figures.arguments)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def test_model_of_eight_billion_parameters_is_never_allocated(run_on_tpu):
    done = run_on_tpu(MEMORY)
    assert done.returncode == 0, done.stderr
    numbers, peak = done.stdout.splitlines()
    parameters, arguments = map(int, numbers.split())
    assert parameters > 8e9
    assert arguments >= 2 * parameters
    # the weights would be 17 GB; libraries and compiler are what is left
    assert int(peak) < 4 << 30


LATE = """
import torch, torch_xla
from xla_core.extension_api.runtime import use_topology
from xla_core.pjrt import tpu_memory
for attempt in (
    lambda: torch.nn.Linear(2, 2, device="meta").to("xla"),
    lambda: use_topology("v5e:2x2"),
):
    try:
        attempt()
    except Exception as error:
        print(type(error).__name__, error)
"""


def test_with_a_device_that_has_values(run_on_tpu):
    """There ``meta`` tensors stay an error, and a topology comes too late."""
    refused, late = run_on_tpu(LATE, PJRT_DEVICE="NULL").stdout.splitlines()
    assert "meta" in refused
    assert late.startswith("RuntimeError the NULL client is already running")
