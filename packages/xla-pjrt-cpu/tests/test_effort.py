"""Programs are compiled with as much effort as they are worth, and by the program alone."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xla_core.contract.device_protocol import ArraySpec, Placement, Topology
from xla_core.pjrt.cpu_runtime import parsed
from xla_core.support import flags
from xla_core.testing.programs import make_program
from xla_pjrt_cpu import create_client, effort

F32 = np.dtype(np.float32)


@pytest.fixture(scope="module")
def client():
    return create_client(Topology(), {})


@pytest.fixture(autouse=True)
def nobody_decides(monkeypatch):
    monkeypatch.delenv("XLA_COMPILE_EFFORT", raising=False)
    monkeypatch.delenv("XLA_FLAGS", raising=False)


def f32(*shape):
    return ArraySpec(shape, F32)


def effort_of(program):
    return effort.effort_for(program, parsed(program.stablehlo))


def options_of(program, of_user=()):
    return effort.options_by_effort(program, parsed(program.stablehlo), of_user)


def add_ten_times(a):
    return jax.lax.fori_loop(0, 10, lambda _, b: b + a, a)


def until_large(a):
    return jax.lax.while_loop(lambda b: b[0] < 100, lambda b: b + 1, a)


@pytest.mark.parametrize(
    ("function", "shape", "expected"),
    [
        (lambda a: a * 2 + 1.5, (64, 64), "fast"),
        (lambda a: a * 2 + 1.5, (256, 256), "medium"),
        (lambda a: a * 2 + 1.5, (1024, 1024), "full"),
        (jnp.tanh, (64, 64), "medium"),
        (lambda a: a @ a, (64, 64), "fast"),
        (lambda a: a @ a, (512, 512), "full"),
        (lambda a: jnp.sort(a, axis=None), (128, 128), "full"),
        (add_ten_times, (1024,), "fast"),
        (add_ten_times, (16384,), "medium"),
        (until_large, (4,), "full"),
    ],
)
def test_effort_goes_by_what_a_program_computes(client, function, shape, expected):
    assert effort_of(make_program(client, function, [f32(*shape)])) == expected


def test_a_stage_counts_as_all_of_its_step(client):
    program = make_program(client, lambda a: a * 2 + 1.5, [f32(64, 64)])
    assert effort_of(dataclasses.replace(program, runs=8)) == "medium"
    assert effort_of(dataclasses.replace(program, runs=1000)) == "full"


def test_what_is_not_readable_is_optimized(client):
    program = make_program(client, jnp.negative, [f32(4)])
    assert effort_of(dataclasses.replace(program, stablehlo=b"ML\xefR junk")) == "full"
    assert effort_of(dataclasses.replace(program, stablehlo=b"HloModule")) == "full"


def test_compiling_leaves_the_module_that_it_is_handed(client):
    """A program whose options one jaxlib refuses is compiled again, from the same module."""
    program = make_program(client, lambda a: jnp.tanh(a) @ a, [f32(4, 4)])
    module = parsed(program.stablehlo)
    before = str(module)
    results = []
    for _ in range(2):
        executable = client.compile_module(program, module)
        argument = client.put(np.eye(4, dtype=np.float32), executable.program.placement)
        results += executable.execute([argument])
    assert str(module) == before
    for result in results:
        np.testing.assert_allclose(client.get(result), np.tanh(np.eye(4)), rtol=1e-6)


def test_the_users_options_hold(client, monkeypatch):
    program = make_program(client, lambda a: a * 2, [f32(4)])
    assert options_of(program) == effort.OPTIONS["fast"]
    of_user = flags.values_in("--xla_backend_optimization_level=2 --xla_cpu_max_isa")
    assert of_user == {"xla_backend_optimization_level": "2", "xla_cpu_max_isa": ""}
    assert "xla_backend_optimization_level" not in options_of(program, of_user)
    # a longer name is another flag
    assert options_of(program, ["xla_backend_optimization_level_2"]) == effort.OPTIONS["fast"]
    chosen = {"xla_backend_optimization_level": 3}
    compiled = client.compile(dataclasses.replace(program, options=chosen))
    # what it was compiled with is stored with it
    assert b'"xla_backend_optimization_level": 3' in compiled.serialize()
    assert b'"xla_backend_optimization_level": 0' in client.compile(program).serialize()
    monkeypatch.setenv("XLA_COMPILE_EFFORT", "full")
    assert options_of(program) == {}
    monkeypatch.setenv("XLA_COMPILE_EFFORT", "most")
    with pytest.raises(ValueError, match=r"XLA_COMPILE_EFFORT='most'.*auto, fast, medium, full"):
        client.compile(program)


def test_the_choice_is_in_the_cache_key(client, monkeypatch):
    automatic = client.fingerprint()
    monkeypatch.setenv("XLA_COMPILE_EFFORT", "full")
    full = client.fingerprint()
    assert automatic["effort"] != full["effort"]
    monkeypatch.setattr(effort, "RULE", "another rule")
    assert client.fingerprint()["effort"] != full["effort"]


def test_all_efforts_compute_the_same(client, monkeypatch):
    """To rounding: sums and products may be fused in one of them."""

    def layer(a, w):
        scores = jax.nn.softmax(a @ w, axis=-1)
        return jnp.sort(scores, axis=0).cumsum(1), jnp.where(scores > 0.1, jnp.log(scores), a @ w)

    program = make_program(client, layer, [f32(16, 16), f32(16, 16)])
    values = [np.random.default_rng(i).standard_normal((16, 16)).astype(F32) for i in range(2)]
    results = {}
    for chosen in ("full", "medium", "fast"):
        monkeypatch.setenv("XLA_COMPILE_EFFORT", chosen)
        arguments = [client.put(value, Placement((0,))) for value in values]
        results[chosen] = [client.get(b) for b in client.compile(program).execute(arguments)]
    for chosen in ("medium", "fast"):
        for found, expected in zip(results[chosen], results["full"], strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


STEPS = """
import sys
import torch
import torch_xla
from xla_pjrt_cpu import effort

met = []
inner = effort.effort_for
effort.effort_for = lambda *of: met.append(inner(*of)) or met[-1]
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(24, 24), torch.nn.Tanh(), torch.nn.Linear(24, 8)).to("xla")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.randn(16, 24).to("xla")
losses = []
for _ in range(3):
    optimizer.zero_grad()
    loss = model(data).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item().hex())
print(*losses, file=sys.stderr)
print("compiled", *met, file=sys.stderr)
"""


def test_a_step_gives_the_same_bits_cold_and_warm(tmp_path):
    environment = {**os.environ, "PJRT_DEVICE": "CPU", "XLA_PERSISTENT_CACHE_PATH": str(tmp_path)}
    losses, compiled = [], []
    for _ in range(2):
        ran = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(STEPS)],
            env=environment, capture_output=True, text=True, timeout=240,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr
        *_, values, efforts = ran.stderr.splitlines()
        losses.append(values)
        compiled.append(efforts.split()[1:])
    assert losses[0] == losses[1]
    assert set(compiled[0]) == {"fast"}
    assert compiled[1] == []
