"""Two CPU processes: every collective against what it is defined as, training, a process that fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

COLLECTIVES = """
import json
import torch, torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr


def main(index):
    device = torch_xla.device()
    mine = xr.global_ordinal()
    t = torch.tensor([1.0, 2.0]).to(device) + 10 * mine
    found = {
        "sum": xm.all_reduce(xm.REDUCE_SUM, t),
        "max": xm.all_reduce(xm.REDUCE_MAX, t),
        "min": xm.all_reduce(xm.REDUCE_MIN, t),
        "mul": xm.all_reduce(xm.REDUCE_MUL, t),
        "scaled": xm.all_reduce(xm.REDUCE_SUM, t, scale=0.5),
        "gathered": xm.all_gather(t),
        "exchanged": xm.all_to_all(t, 0, 0, 2),
        "scattered": xm.reduce_scatter(xm.REDUCE_SUM, t, 1.0, 0, 2),
        "swapped": xm.collective_permute(t, [[0, 1], [1, 0]]),
    }
    values = {name: value.cpu().tolist() for name, value in found.items()}
    values["meshed"] = xm.mesh_reduce("ordinals", mine, sum)
    values["world"] = [mine, xr.world_size()]
    print("RESULT" + json.dumps(values), flush=True)


if __name__ == "__main__":
    torch_xla.launch(main)
"""

TRAINING = """
import json
import torch, torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr


def main(index):
    device = torch_xla.device()
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    inputs, targets = torch.randn(8, 4), torch.randn(8, 1)
    model.to(device)
    share = slice(index, None, xr.world_size())
    mine, wanted = inputs[share].to(device), targets[share].to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(5):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(mine), wanted).backward()
        xm.optimizer_step(optimizer)
        torch_xla.sync()
    print("RESULT" + json.dumps(model.weight.detach().cpu().flatten().tolist()), flush=True)


if __name__ == "__main__":
    torch_xla.launch(main)
"""

FAILING = """
import torch_xla
import torch_xla.core.xla_model as xm


def main(index):
    device = torch_xla.device()
    if index == 1:
        raise ValueError("the second process gives up")
    xm.rendezvous("never reached by both")


if __name__ == "__main__":
    torch_xla.launch(main)
"""


def launch(tmp_path, script, processes):
    path = tmp_path / "script.py"
    path.write_text(script)
    return subprocess.run(
        [sys.executable, str(path)],
        capture_output=True,
        text=True,
        timeout=180,
        env={**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(processes)},
    )


def results(tmp_path, script, processes):
    done = launch(tmp_path, script, processes)
    assert done.returncode == 0, done.stdout + done.stderr
    # the processes share one pipe: text and line end of a print may be apart
    found = done.stdout.split("RESULT")[1:]
    assert len(found) == processes
    return [json.JSONDecoder().raw_decode(text)[0] for text in found]


def test_collectives_are_what_they_are_defined_as(tmp_path):
    first, second = sorted(results(tmp_path, COLLECTIVES, 2), key=lambda found: found["world"])
    for found in (first, second):
        assert found["sum"] == [12.0, 14.0]
        assert found["max"] == [11.0, 12.0]
        assert found["min"] == [1.0, 2.0]
        assert found["mul"] == [11.0, 24.0]
        assert found["scaled"] == [6.0, 7.0]
        assert found["gathered"] == [1.0, 2.0, 11.0, 12.0]
        assert found["meshed"] == 1
    assert [first["world"], second["world"]] == [[0, 2], [1, 2]]
    assert [first["exchanged"], second["exchanged"]] == [[1.0, 11.0], [2.0, 12.0]]
    assert [first["scattered"], second["scattered"]] == [[12.0], [14.0]]
    assert [first["swapped"], second["swapped"]] == [[11.0, 12.0], [1.0, 2.0]]


def test_two_halves_of_a_batch_train_as_the_whole_of_it(tmp_path):
    (alone,) = results(tmp_path, TRAINING, 1)
    together = results(tmp_path, TRAINING, 2)
    # means of halves are summed in another order than the whole
    assert together[0] == pytest.approx(alone, rel=1e-5)
    assert together[0] == together[1]


def test_a_process_that_raises_ends_the_job_and_is_named(tmp_path):
    done = launch(tmp_path, FAILING, 2)
    assert done.returncode != 0
    assert "the second process gives up" in done.stdout + done.stderr
