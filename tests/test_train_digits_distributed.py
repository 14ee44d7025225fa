"""The example of many processes: started by torchrun, and by itself."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "train_digits_distributed.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.long
@pytest.mark.parametrize("command", [TORCHRUN, [sys.executable]], ids=["torchrun", "python"])
def test_two_processes_learn_the_digits(command):
    environment = {
        **os.environ,
        "PJRT_DEVICE": "CPU",
        "CPU_NUM_DEVICES": "2",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [*command, str(EXAMPLE), "--epochs", "2"],
        capture_output=True, text=True, timeout=170, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("2 processes, 32 digits each in a step") == 1
    shown = re.findall(r"epoch \d: train loss (\S+), held-out accuracy (\S+)%", done.stdout)
    assert len(shown) == 2
    assert float(shown[1][0]) < float(shown[0][0])
    assert float(shown[1][1]) > 70
