"""What torch_xla's names in xla-dist and xla-debug say of tensors that xla-spmd has split."""

from __future__ import annotations

import pytest

SPLIT = """
import torch, torch_xla
import torch_xla.distributed.spmd as xs, torch_xla.runtime as xr
xr.use_spmd()
mesh = xs.Mesh(list(range(8)), (8,), ("data",))
tensor = torch.arange(32.0).reshape(8, 4).to("xla")
"""
LOADER = """
import torch_xla.distributed.parallel_loader as pl
batch = {"x": torch.zeros(8), "y": torch.zeros(8)}
loader = pl.MpDeviceLoader([batch], "xla", input_sharding={"x": xs.ShardingSpec(mesh, ("data",))})
try:
    next(iter(loader))
except KeyError as error:
    assert "Keys: ['y'] are missing from input_sharding." in str(error), error
else:
    raise AssertionError("no error for a key without a sharding")
"""
COUNTERS = """
import torch_xla.debug.metrics as met
torch_xla.sync()
met.clear_all()
xs.mark_sharding(tensor, mesh, ("data", None))
assert met.counter_value("XlaMarkSharding") == met.counter_value("SetShardingSpec") == 1
found = tensor * 2
torch_xla.sync()
assert found.shape == (8, 4)
assert met.counter_value("ExecuteReplicated") == met.metric_data("ExecuteReplicatedTime")[0] == 1
assert "ExecuteTime" not in met.metric_names()
assert met.counter_value("ExecuteComputation") is None
"""
PUT_TOGETHER = """
import torch_xla.debug.metrics as met
whole = xs.mark_sharding(torch.ones(8, 4).to("xla"), mesh, (None, None))
xs.mark_sharding(tensor, mesh, ("data", None))
torch_xla.sync()
met.clear_all()
count = lambda: met.counter_value("ReplicateShardedData")
assert whole.cpu().sum() == 32 and tensor.sum().item() == 496
assert count() is None  # these are whole on every device
assert tensor.cpu().sum() == 496 and count() == 1
assert (tensor * 2).cpu().sum() == 992 and count() == 2
assert xs.clear_sharding(tensor).cpu().sum() == 496 and count() == 3
"""
DEBUG_TEXT = """
from torch_xla import _XLAC
xs.mark_sharding(tensor, mesh, ("data", None))
torch_xla.sync()
text = _XLAC._get_xla_tensor_debug_info(tensor)
assert "\\nDevice: SPMD:0\\n" in text, text
assert f"\\nShardingSpec: {_XLAC._get_xla_sharding_spec(tensor)}\\n" in text, text
assert "NumShards: 8" in text, text
"""
COMPILED_TEXT = """
import os
from torch_xla import _XLAC
xs.mark_sharding(tensor, mesh, ("data", None))
total = tensor.sum()
assert "all-reduce" not in _XLAC._get_xla_tensors_hlo([total])
os.environ["XLA_DUMP_POST_OPTIMIZATIONS"] = "1"
assert "all-reduce(" in _XLAC._get_xla_tensors_hlo([total])
"""


@pytest.mark.parametrize(
    "script",
    [LOADER, COUNTERS, PUT_TOGETHER, DEBUG_TEXT, COMPILED_TEXT],
    ids=["loader", "counters", "put together", "debug text", "compiled text"],
)
def test_over_a_mesh(script, run_program):
    output = run_program(SPLIT + script + "print('right')", CPU_NUM_DEVICES="8")
    assert output.strip().endswith("right"), output
