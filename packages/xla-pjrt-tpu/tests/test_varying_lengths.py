"""A program for all lengths up to a bound compiles for TPUs, with the real compiler."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from xla_pjrt_tpu import libtpu

pytestmark = pytest.mark.skipif(
    libtpu.find_library({}) is None,
    reason="libtpu is not installed: its wheels are for Linux on x86-64 and CPython 3.11 to 3.14",
)

# A training step over four lengths is recorded; the compiler gets one program for all of them.
SCRIPT = """
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import torch_xla
from xla_core.extension_api.runtime import use_topology
from xla_core.testing.against_cpu import forget_pending
from xla_core.testing.lengths.programs import NotServedError, only_served
from xla_core.varying import bound_program, families, skeletons
from xla_core.varying.fit import fit

use_topology("v5e:2x2")
samples = []


def compiled(trace, key):
    wiped = skeletons.wiped(trace.cur.path())
    samples.append(np.array(wiped.numbers))
    if len(samples) == 4:
        fitted = fit(samples, wiped.sizes)
        step = families._recorded(trace, key)
        bound = bound_program.build(step, fitted, wiped.sizes, ((8,), (64,)), "varying")
        print([spec.shape for spec in bound.program.inputs][-1], bound.limits)
        print("while" in bound.executable.optimized_hlo(), bound.executable.memory_analysis()["temporaries"] > 0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(50, 16)
        self.conv = nn.Conv1d(16, 16, 3, stride=2, padding=1)
        self.gru = nn.GRU(16, 16, batch_first=True)
        self.head = nn.Linear(16, 5)

    def forward(self, words, present):
        x = F.dropout(self.words(words), 0.1)
        mask = (present > 0)[:, None, None]
        x = F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], attn_mask=mask)[:, 0]
        x = self.gru(self.conv(x.transpose(1, 2)).transpose(1, 2))[0]
        return self.head(x.mean(1))


families.serve = compiled
net = Net().to("xla")
for length in (17, 24, 21, 30):
    words = torch.empty(3, length, dtype=torch.int64, device="meta").to("xla")
    present = torch.empty(3, length, device="meta").to("xla")
    loss = F.cross_entropy(net(words, present), torch.empty(3, dtype=torch.int64, device="meta").to("xla"))
    net.zero_grad()
    loss.backward()
    try:
        with only_served():
            torch_xla.sync()
    except NotServedError:
        forget_pending()
"""


def test_a_program_for_a_bound_compiles_for_tpus():
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "TPU_", "PJRT_"))}
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=clean | {"PJRT_DEVICE": "TPU", "XLA_VARYING_SHAPES": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert process.returncode == 0, process.stderr
    # the lengths are the last argument; the recurrent net is a loop; the figures are libtpu's
    assert process.stdout.splitlines() == ["(1,) (64,)", "True True"]
