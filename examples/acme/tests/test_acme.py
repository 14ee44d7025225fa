"""Acme's device: the conformance suite, and what users see."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from xla_core.contract.device_protocol import Topology
from xla_core.extension_api import plugins
from xla_core.testing.conformance import DeviceConformance
from xla_pjrt_acme import AcmeClient, create_client, library

TRAIN = """
import torch
import torch_xla

torch.manual_seed(0)
model = torch.nn.Linear(3, 1).to("xla")
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
x = torch.randn(64, 3).to("xla")
target = (x @ torch.tensor([1.0, -2.0, 0.5]).to("xla")).unsqueeze(1)
losses = []
for _ in range(60):
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(x), target)
    loss.backward()
    optimizer.step()
    torch_xla.sync()
    losses.append(loss.detach())
print(torch_xla.real_devices(), losses[-1].item() < 0.05 * losses[0].item())
"""


class TestTwoDevices(DeviceConformance):
    @classmethod
    def make_client(cls):
        return create_client(Topology(), {"ACME_NUM_DEVICES": "2"})


def test_entry_point_starts_this_client():
    client = plugins.start_client("acme", plugins.new_manager(), {"ACME_NUM_DEVICES": "3"})
    assert isinstance(client, AcmeClient)
    assert (client.device_type, len(client.local_devices())) == ("ACME", 3)


def test_a_script_trains_on_it():
    done = subprocess.run(
        [sys.executable, "-c", TRAIN],
        env=os.environ | {"PJRT_DEVICE": "ACME", "ACME_NUM_DEVICES": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.split("\n")[0] == "['ACME:0'] True", done.stderr


def test_any_library_by_path_and_what_is_none(tmp_path):
    named = {"ACME_LIBRARY_PATH": str(library({}))}
    assert create_client.is_available(named)
    text = tmp_path / "libtext.so"
    text.write_text("this is no library")
    assert create_client.find({"ACME_LIBRARY_PATH": str(tmp_path / "missing.so")}) is None
    with pytest.raises(RuntimeError, match=r"ACME: there is no PJRT library at .*missing\.so; pip"):
        create_client(Topology(), {"ACME_LIBRARY_PATH": str(tmp_path / "missing.so")})


@pytest.mark.parametrize("count", ["0", "two", "-1"])
def test_wrong_device_count(count):
    with pytest.raises(ValueError, match=r"ACME_NUM_DEVICES is .*whole number"):
        create_client(Topology(), {"ACME_NUM_DEVICES": count})
