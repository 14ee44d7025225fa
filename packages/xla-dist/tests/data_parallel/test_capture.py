"""Captured steps with collectives, in two processes: bit-equal to ordinary ones on both."""

from __future__ import annotations

import json
import os
import subprocess
import sys

TRAINING = """
import json
import torch, torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch_xla.experimental.capture import capture
from xla_core.support import counters


def train(index, captured, every):
    device = torch_xla.device()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.25), torch.nn.Linear(8, 1))
    inputs, targets = torch.randn(8, 4), torch.randn(8, 1)
    model.to(device)
    xm.set_rng_state(7 + index)
    share = slice(index, None, xr.world_size())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def step(x, y):
        optimizer.zero_grad()
        results = backward(x, y)
        xm.optimizer_step(optimizer)
        return results

    def backward(x, y):
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        return xm.all_reduce(xm.REDUCE_SUM, loss.detach()), loss

    def update():
        xm.optimizer_step(optimizer)
        optimizer.zero_grad()
        return xm.all_reduce(xm.REDUCE_SUM, torch.ones(1, device=device))

    called = step if every == 1 else backward
    if captured:
        called, update = capture(called), capture(update)
    losses = []
    for i in range(8 * every):
        whole, own = called((inputs[share] + i).to(device), targets[share].to(device))
        if every > 1 and i % every == every - 1:
            update()
        torch_xla.sync()
        losses.append([whole.item(), own.item()])
    values = [p.detach().cpu().tolist() for p in model.parameters()]
    return {"losses": losses, "values": values}


def main(index):
    for every in 1, 2:
        before = counters.all_counters().get("CapturedStepReplayed", 0)
        ordinary = train(index, False, every)
        captured = train(index, True, every)
        replayed = counters.all_counters()["CapturedStepReplayed"] - before
        found = {"every": every, "same": ordinary == captured, "replayed": replayed, **captured}
        print("RESULT" + json.dumps(found), flush=True)


if __name__ == "__main__":
    torch_xla.launch(main)
"""


def test_a_training_step_with_collectives(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(TRAINING)
    done = subprocess.run(
        [sys.executable, str(path)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "2"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    texts = done.stdout.split("RESULT")[1:]
    found = [json.JSONDecoder().raw_decode(text)[0] for text in texts]
    # gradients of two batches: five of the calls that find none, six of those that find some, five updates
    for every, replays in ((1, 5), (2, 16)):
        first, second = (one for one in found if one["every"] == every)
        assert first["same"]
        assert second["same"]
        assert first["replayed"] == second["replayed"] == replays
        assert first["values"] == second["values"]
        wholes = [[whole for whole, _ in one["losses"]] for one in (first, second)]
        assert wholes[0] == wholes[1]
        for (whole, one), (_, other) in zip(first["losses"], second["losses"], strict=True):
            assert abs(whole - one - other) < 1e-5 * abs(whole)
        assert one != other
