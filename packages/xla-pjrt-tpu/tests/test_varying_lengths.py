"""A program for all lengths up to a bound compiles for TPUs, with the real compiler."""

from __future__ import annotations

import pytest

from xla_pjrt_tpu import libtpu

pytestmark = pytest.mark.skipif(
    libtpu.find_library({}) is None,
    reason="libtpu is not installed: its wheels are for Linux on x86-64 and CPython 3.11 to 3.14",
)

# A training step over four lengths is recorded; the compiler gets one program for all of them.
SCRIPT = """
import torch
from torch import nn
from torch.nn import functional as F

from xla_core.extension_api.runtime import use_topology
from xla_core.testing.lengths.bounds import compiled_for

use_topology("v5e:2x2")


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
        x = F.interpolate(self.conv(x.transpose(1, 2)), size=words.shape[1], mode="linear")
        x = self.gru(x.transpose(1, 2))[0]
        return self.head(x.mean(1))


def on_device(*sizes, dtype=torch.int64):
    return torch.empty(*sizes, dtype=dtype, device="meta").to("xla")


def record(length):
    scores = net(on_device(3, length), on_device(3, length))
    net.zero_grad()
    F.cross_entropy(scores, on_device(3)).backward()


net = Net().to("xla")
program = compiled_for(record, (17, 24, 21, 30), ((8,), (64,)))
print("while" in program.optimized_hlo(), program.memory_analysis()["temporaries"] > 0)
"""


def test_a_program_for_a_bound_compiles_for_tpus(run_on_tpu):
    process = run_on_tpu(SCRIPT, XLA_VARYING_SHAPES="1")
    assert process.returncode == 0, process.stderr
    # the recurrent net is a loop; the figures are libtpu's
    assert process.stdout.splitlines() == ["True True"]
