"""``use_spmd(auto=True)``: what those are shown who choose, and what becomes of their choice."""

from __future__ import annotations

# A chooser that lays the first dimension of everything with eight times as many elements over all devices.
CHOOSER = """
import torch, torch_xla
import torch_xla.runtime as xr
import torch_xla.distributed.spmd as xs
from torch import nn
from torch_xla import _XLAC
from xla_core.support import counters
from torch_xla.distributed.spmd import debugging
from xla_core.contract.hookspecs import hookimpl
from xla_core.contract.step_sharding import ShardingChoice
from xla_core.extension_api import plugins, runtime
from xla_core.extension_api.tensors import storage_of

seen = []

class Chooser:
    @hookimpl(tryfirst=True)
    def xla_core_choose_shardings(self, step):
        seen.append(step)
        specs = [
            ("all", *[None] * (len(one.shape) - 1)) if one.shape and one.shape[0] % 8 == 0 else None
            for one in step.inputs
        ]
        self.program = step.compiled((("all", 8),), specs).optimized_hlo()
        return ShardingChoice((("all", 8),), specs, "because of the test")

def split(tensor):
    storage = storage_of(tensor)
    return storage.trace.backend.sharding_of(storage.buffer)

OVER_ALL = "{devices=[8,1]0,1,2,3,4,5,6,7}"
"""


def test_a_step_is_shown_with_names_roles_and_work(run_python):
    out = run_python(
        CHOOSER
        + """
chooser = Chooser()
plugins.extensions().register(chooser)
xr.use_spmd(auto=True)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)).to("xla")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for p in model.parameters():
    optimizer.state[p]["momentum_buffer"] = torch.zeros(p.shape).to("xla")
x = torch.ones(32, 8).to("xla")
assert debugging.automatic_sharding() is None
model(x).sum().backward()
optimizer.step()
torch_xla.sync()
(step,) = seen
roles = {one.name: (one.role, one.shape) for one in step.inputs}
assert roles["0.weight"] == ("parameter", (16, 8)), roles
assert roles["momentum_buffer of 2.weight"] == ("state", (8, 16)), roles
assert roles["data float32[32, 8]"] == ("data", (32, 8)), roles
assert step.trains and step.devices == 8
# two products forward; backward one for each weight, and one for the values between the layers
assert step.flops == 5 * 2 * 32 * 8 * 16, step.flops
assert "f32[4,8]" in chooser.program  # the data's part
chosen = debugging.automatic_sharding()
assert chosen.axes == (("all", 8),) and str(chosen) == "because of the test"
assert chosen.specs["0.weight"] == ("all", None)
for p in (model[0].weight, model[2].weight, optimizer.state[model[0].weight]["momentum_buffer"], x):
    assert split(p) == OVER_ALL, split(p)
print("done")
"""
    )
    assert out == "done\n"


def test_later_data_never_lies_whole_on_a_device(run_python):
    out = run_python(
        CHOOSER
        + """
plugins.extensions().register(Chooser())
_XLAC._xla_set_auto_sharding()
assert _XLAC._xla_get_auto_sharding()
xr.use_spmd()
torch.manual_seed(0)
model = nn.Linear(8, 8)
twin = nn.Linear(8, 8)
twin.load_state_dict(model.state_dict())
model.to("xla")
optimizer, other = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin))
batches = [torch.randn(n, 8) for n in (32, 32, 32, 16, 5)]
parts = []
for batch in batches:
    x = batch.to("xla")
    for net, adjust, value in ((model, optimizer, x), (twin, other, batch)):
        net(value).square().mean().backward()
        adjust.step()
        adjust.zero_grad()
    torch_xla.sync()
    parts.append(split(x))
# 5 rows are not divided by eight devices
assert parts == [OVER_ALL] * 4 + [None], parts
assert len(seen) == 1 and counters.all_counters()["UncachedCompile"] == 3
torch.testing.assert_close(model.weight.cpu(), twin.weight)
print("done")
"""
    )
    assert out == "done\n"


def test_without_anybody_who_chooses_the_step_stays_as_it_was(run_python):
    out = run_python(
        CHOOSER
        + """
manager = plugins.extensions()
for one in manager.get_plugins():
    if any(c.name == "xla_core_choose_shardings" for c in manager.get_hookcallers(one) or ()):
        manager.unregister(one)
xr.use_spmd(auto=True)
layer = nn.Linear(8, 8).to("xla")
x = torch.ones(16, 8)
pending = layer(x.to("xla"))
try:
    torch_xla.sync()
    raise SystemExit("nothing was raised")
except RuntimeError as error:
    assert "pip install xla-plan" in str(error) and "mark_sharding" in str(error), error
manager.register(Chooser())
torch.testing.assert_close(pending.detach().cpu(), layer.cpu()(x).detach())
print("done")
"""
    )
    assert out == "done\n"


def test_auto_policy_is_the_same_choice(run_python):
    out = run_python(
        CHOOSER
        + """
from torch.distributed.device_mesh import DeviceMesh
plugins.extensions().register(Chooser())
xr.use_spmd()
mesh = DeviceMesh("xla", list(range(8)))
layer = xs.xla_distribute_module(nn.Linear(8, 8), mesh, xs.auto_policy)
layer(torch.ones(16, 8).to("xla")).sum().backward()
torch_xla.sync()
assert split(layer.weight) == OVER_ALL and len(seen) == 1
# a gradient lies as its parameter
assert split(layer.weight.grad) == OVER_ALL
print("done")
"""
    )
    assert out == "done\n"
