"""What is particular to XLA's compiler for GPUs: measurements that are kept, precision, determinism."""

from __future__ import annotations

import re

import numpy as np
import pytest

from xla_core.contract.device_protocol import ArraySpec, Capabilities, Placement, Program, Topology
from xla_core.testing.programs import make_program
from xla_pjrt_cuda import create_client, installation
from xla_pjrt_cuda.compiling import Tuning, of_gpus

needs_plugin = pytest.mark.skipif(
    installation.find_plugin() is None,
    reason="jax's CUDA plugin is not installed: pip install jax-cuda13-plugin (needs no GPU)",
)
PROGRAM = Program("p", b"", (), (), (), Placement((0,)), options={"xla_gpu_autotune_level": 1})
DIRECTORY = "xla_gpu_per_fusion_autotune_cache_dir"


def test_measurements_are_kept_in_the_persistent_cache(tmp_path, monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    tuning = Tuning()
    assert tuning.added_to(PROGRAM) is PROGRAM  # no persistent cache: nowhere
    tuning.keep(tmp_path, False)
    kept = tmp_path / "autotuning"
    assert kept.stat().st_mode & 0o777 == 0o700
    options = tuning.added_to(PROGRAM).options
    assert options == {
        "xla_gpu_autotune_level": 1,
        DIRECTORY: str(kept),
        "xla_gpu_experimental_autotune_cache_mode": "AUTOTUNE_CACHE_MODE_UPDATE",
    }
    monkeypatch.setenv("XLA_FLAGS", f"--{DIRECTORY}=/elsewhere")
    assert tuning.added_to(PROGRAM) is PROGRAM


def test_measurements_of_a_cache_that_is_only_read(tmp_path):
    tuning = Tuning()
    tuning.keep(tmp_path, True)
    assert not tuning.options and not list(tmp_path.iterdir())
    (tmp_path / "autotuning").mkdir()
    tuning.keep(tmp_path, True)
    assert tuning.options["xla_gpu_experimental_autotune_cache_mode"].endswith("_READ")


@needs_plugin
@pytest.mark.parametrize("readonly", [False, True])
def test_the_compiler_knows_these_options(tmp_path, readonly):
    """Each of them is refused by name where a jaxlib does not know it."""
    client = create_client(Topology(), {"XLA_AOT_TOPOLOGY": "h100:1"})
    tuning = Tuning()
    (tmp_path / "autotuning").mkdir()
    tuning.keep(tmp_path, readonly)
    program = make_program(client, lambda a: a @ a, [ArraySpec((64, 64), np.dtype(np.float32))])
    assert client.compile(tuning.added_to(program)).optimized_hlo()


@pytest.mark.parametrize(
    ("flags", "ordered"),
    [
        ("", False),
        ("--xla_gpu_deterministic_ops=true", True),
        ("--xla_dump_to=/tmp --xla_gpu_exclude_nondeterministic_ops", True),
        ("--xla_gpu_deterministic_ops=false", False),
    ],
)
def test_what_gpus_are(monkeypatch, flags, ordered):
    monkeypatch.setenv("XLA_FLAGS", flags)
    found = of_gpus(Capabilities(compiles_beside=True))
    assert found.tf32 and found.compiles_beside
    assert found.unordered_scatter is not ordered


TRAIN = """
import torch, torch_xla
from xla_core.extension_api.programs import program_figures

model = torch.nn.Sequential(
    torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(288, 4)
).to("xla")
optimizer = torch.optim.AdamW(model.parameters())
x, y = torch.randn(8, 3, 8, 8).to("xla"), torch.zeros(8, dtype=torch.int64).to("xla")
torch.nn.functional.cross_entropy(model(x), y).backward()
optimizer.step()
torch_xla.sync()
print(torch_xla.real_devices(), program_figures()[-1].limit)
"""


@needs_plugin
def test_a_training_step_is_compiled_for_a_gpu_that_is_not_here(run_on_cuda):
    printed = run_on_cuda(TRAIN, XLA_AOT_TOPOLOGY="h200:1")
    assert printed.split() == ["['CUDA:0']", str(143771 << 20)]


PRECISION = """
import sys
import torch, torch_xla
from xla_core.extension_api.runtime import client
from xla_core.contract.device_protocol import capabilities_of

torch.backends.cuda.matmul.allow_tf32 = sys.argv[1] == "tf32"
x = torch.randn(32, 32).to("xla")
torch_xla.sync()
print(capabilities_of(client()).tf32, torch_xla._XLAC._get_stablehlo([x @ x]))
"""


@needs_plugin
@pytest.mark.parametrize(("switch", "precision"), [("ieee", "HIGHEST"), ("tf32", "DEFAULT")])
def test_pytorchs_switch_decides_on_this_device(run_on_cuda, switch, precision):
    printed = run_on_cuda(PRECISION, switch, XLA_AOT_TOPOLOGY="h200:1")
    assert printed.startswith("True ")
    assert set(re.findall("HIGHEST|DEFAULT", printed)) == {precision}
