"""What is to be run on a GPU runs, with tiny sizes on the CPU; how fast anything is, is not tested here."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def gpu(monkeypatch):
    """``benchmarks/gpu.py`` as a module."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    return imported("gpu", BENCHMARKS)


def imported(name, folder):
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("model", ["gpt", "bert", "resnet"])
def test_the_model_in_jax_is_the_same_model(gpu, model):
    """The loss of the first step, and after one update of every weight."""
    size = gpu.gpu_models.TINY[model]
    losses = {}
    for way in ("eager", "jax"):
        made = gpu.Way(way, size, "cpu")
        losses[way] = [made.read(made.step()) for _ in range(2)]
    assert losses["jax"] == pytest.approx(losses["eager"], rel=1e-4)
    assert losses["eager"][0] != losses["eager"][1]


def test_our_ways_compute_what_eager_computes(gpu):
    size = gpu.gpu_models.TINY["gpt"]
    figures = {way: gpu.measure(way, size, "cpu", 2) for way in ("eager", "lazy", "captured")}
    results = {"figures": {f"gpt {way}": found for way, found in figures.items()}}
    assert gpu.disagreements(results) == []
    assert gpu.table(results).count("| gpt ") == 3
    for found in figures.values():
        assert found["step_ms"] >= found["issue_ms"] > 0 and found["gpu_idle"] is None
    results["figures"]["gpt eager"]["losses"][3] *= 2
    assert len(gpu.disagreements(results)) == 2


def test_sizes_are_those_of_the_papers(gpu):
    """Parameters in millions: GPT-2 medium 355, BERT-base 110 and its output layer, ResNet-50 25.6."""
    counted = {}
    for name, size in gpu.gpu_models.SIZES.items():
        with torch.device("meta"):
            model = gpu.gpu_models.model_of(size)
        counted[name] = round(sum(p.numel() for p in model.parameters()) / 1e6)
    assert counted == {"gpt": 406, "bert": 132, "resnet": 26}  # outputs have weights of their own
    assert all(size.dtype == torch.bfloat16 for size in gpu.gpu_models.SIZES.values())


def test_a_way_that_fails_is_told_and_the_others_go_on(gpu, tmp_path, monkeypatch):
    def in_child(model, way, options, cache):
        return {"error": "no GPU"} if way == "eager" else gpu.measure("eager", size, "cpu", 2)

    size = gpu.gpu_models.TINY["bert"]
    monkeypatch.setattr(gpu, "in_child", in_child)
    out = tmp_path / "figures.json"
    chosen = ["--tiny", "--models", "bert", "--ways", "eager", "inductor", "--out", str(out)]
    assert gpu.main([*chosen, "--device", "cpu"]) == 1
    written = json.loads(out.read_text())
    assert written["figures"]["bert eager"] == {"error": "no GPU"}
    assert written["figures"]["bert inductor"]["per_second"] > 0
    assert written["machine"]["torch"] == torch.__version__


def test_runs_say_what_passed_what_failed_and_what_took_too_long(tmp_path, capsys, monkeypatch):
    runs = imported("gpu_runs", ROOT / "tools")
    chosen = (
        runs.Run("good", 60, ("-c", "import os; print(os.environ['TEST_PJRT_DEVICE'])")),
        runs.Run("bad", 60, ("-c", "raise SystemExit(3)")),
        runs.Run("slow", 1, ("-c", "import time; time.sleep(60)")),
    )
    monkeypatch.setattr(runs, "RUNS", chosen)
    assert runs.main(["--out", str(tmp_path), "--device", "cpu"]) == 1
    found = json.loads((tmp_path / "runs.json").read_text())["runs"]
    assert {name: f["verdict"] for name, f in found.items()} == {
        "good": "passed",
        "bad": "failed (3)",
        "slow": "out of time",
    }
    assert found["good"]["last_line"] == "CPU"
    assert "| slow | out of time |" in capsys.readouterr().out


def test_files_of_the_runs_are_there_and_all_fit_into_an_hour():
    runs = imported("gpu_runs", ROOT / "tools")
    assert sum(run.seconds for run in runs.RUNS) < 3600
    for run in runs.RUNS:
        named = [
            part for part in run.arguments if part.startswith(("packages/", "tools/", "examples/"))
        ]
        assert all((ROOT / part).exists() for part in named)
