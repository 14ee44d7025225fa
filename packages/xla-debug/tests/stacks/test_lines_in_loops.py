"""``XLA_HLO_DEBUG``: operations in the body of a loop have their own lines."""

from __future__ import annotations

import os
import re
import subprocess
import sys

SCRIPT = """
import torch, torch_xla
from torch_xla.experimental.scan import scan
from torch_xla.utils.checkpoint import checkpoint
from xla_core.extension_api import programs

weights = torch.randn(3, 4, 4).to("xla").requires_grad_()
x = torch.randn(2, 4).to("xla")

def inner(x, w):
    y = x @ w
    return torch.sinh(y)

def body(x, w):
    return checkpoint(inner, x, w), None

scan(body, x, weights)[0].cosh().sum().backward()
torch_xla.sync()
print(programs.all_programs()[-1].executable.optimized_hlo())
"""


def test_operations_of_a_body_have_their_own_lines(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(path)],
        env=os.environ | {"PJRT_DEVICE": "CPU", "XLA_HLO_DEBUG": "1"},
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = SCRIPT.split("\n")
    frames = dict(re.findall(r"^(\d+) \{file_location_id=(\d+)", done.stdout, re.M))
    places = dict(re.findall(r"^(\d+) \{file_name_id=\d+ .*?line=(\d+) ", done.stdout, re.M))
    found = {
        (name, lines[int(places[frames[frame]]) - 1].strip())
        for name, frame in re.findall(r'op_name="([^"]*)" stack_frame_id=(\d+)', done.stdout)
    }
    assert any("while/body" in name and line == "return torch.sinh(y)" for name, line in found), (
        found
    )
    assert any("cosh" in name and "cosh()" in line for name, line in found)
    assert not any("@" in name for name, _ in found)
