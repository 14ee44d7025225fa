"""``PJRT_DEVICE=CUDA`` on a GPU: the conformance suite, and training as on the CPU."""

from __future__ import annotations

import os

import pytest
import torch

from xla_core.contract.device_protocol import Topology
from xla_core.testing.conformance import DeviceConformance
from xla_pjrt_cuda import create_client

if not create_client.is_available({}):
    pytest.skip(
        "no NVIDIA GPU, or no CUDA plugin of jax for it (pip install 'xla-pjrt-cuda[cuda13]')",
        allow_module_level=True,
    )

TRAIN = """
import torch
import torch_xla

device = torch_xla.device()
print(torch_xla.real_devices())
losses = []
for where in ("cpu", device):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    x, y = torch.randn(64, 8).to(where), torch.randn(64, 1).to(where)
    model.to(where)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(20):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        torch_xla.sync()
    losses.append(loss.item())
assert abs(losses[0] - losses[1]) < 1e-4 * losses[0], losses
"""


class TestCuda(DeviceConformance):
    # each client reserves most of a GPU's memory
    several_clients = False

    @classmethod
    def make_client(cls):
        return create_client(Topology(), os.environ)


def test_a_script_trains_as_on_the_cpu(run_on_cuda):
    printed = run_on_cuda(TRAIN)
    assert printed.startswith("['CUDA:0'")


BESIDE = """
import torch
import torch_xla
from torch_xla.debug import metrics

there = torch.randn(1024, 1024, device="cuda")
x = there.to("xla")
there.zero_()  # PyTorch's own memory
assert abs(x.std().item() - 1) < 0.1
y = (x @ x).to("cuda")
assert y.device.type == "cuda" and torch.isfinite(y).all()
for _ in range(100):  # each allocator reuses its memory meanwhile
    z = torch.full((256, 1024), 3.0, device="cuda").to("xla")
    assert (z + 1).to("cuda").sum().item() == 4.0 * z.numel()
assert metrics.counter_value("DlpackToDevice") == 101
assert metrics.counter_value("DlpackFromDevice") == 101
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this PyTorch has no CUDA")
def test_tensors_of_cuda_pytorch_are_copied_on_the_gpu(run_on_cuda):
    run_on_cuda(BESIDE, XLA_PYTHON_CLIENT_PREALLOCATE="0")


def test_measurements_are_in_the_persistent_cache(run_on_cuda, tmp_path):
    run_on_cuda(TRAIN, XLA_PERSISTENT_CACHE_PATH=str(tmp_path))
    assert (tmp_path / "autotuning").is_dir() and list(tmp_path.glob("*.xlaexe"))
