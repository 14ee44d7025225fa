"""accelerate and transformers' Trainer: several processes train what one trains.

What the processes run, and how they are started, is in dist_accelerate.py.
"""

from __future__ import annotations

import json

import dist_jobs
import torch
from dist_jobs import clean_environment

# The sums over the processes are rounded differently: 4e-7 seen in weights, 1e-7 in losses.
CLOSE = {"rtol": 0.0, "atol": 2e-5}


def same(got, wanted):
    """Whether two nested results agree."""
    assert got.keys() == wanted.keys()
    for name, values in wanted.items():
        if isinstance(values, dict):
            same(got[name], values)
        else:
            torch.testing.assert_close(
                torch.tensor(got[name]), torch.tensor(values), msg=lambda text, n=name: f"{n}: {text}",
                **CLOSE,
            )  # fmt: skip


def test_processes_train_as_one(start_program, tmp_path):
    environment = clean_environment(1)
    program = start_program(environment, dist_jobs.trains_with_accelerate, str(tmp_path))
    status, text, _ = program.join(
        timeout=500
    )  # 7 processes, of which each compiles some 40 programs
    assert status == 0, text
    (one,) = results(tmp_path, 1)
    steps = len(one["losses again"])
    assert one["losses"][steps:] == one["losses again"]  # as after load_state
    trainer = one["trainer"]
    assert trainer["weights"] == trainer["weights again"]
    assert trainer["loss"][-1] < trainer["loss"][0]
    for count in (2, 4):
        for of_process in results(tmp_path, count):
            same(of_process, one)


def results(folder, count):
    """What each of the job's processes found."""
    paths = [folder / f"process {index} of {count}" for index in range(count)]
    return [json.loads(path.read_text()) for path in paths]
