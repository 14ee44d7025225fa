"""What vendors' packages do with torch_xla: a plugin in the shape of Tenstorrent's, and AWS's exporters.

There is no PJRT library of a CPU to load, so that the vendor's library is jaxlib's CPU client: everything but
loading a file is the plugin's way.
"""

from __future__ import annotations

import pytest

PLUGIN = """
import torch_xla
from torch_xla.experimental import plugins

class TTPlugin(plugins.DevicePlugin):
    made = 0

    def __init__(self):
        # a compiler that replaces patterns wants to see their numbers
        torch_xla._XLAC._set_xla_all_numbers_special_scalars(True)
        type(self).made += 1

    def library_path(self):
        return __file__

    def client_create_options(self):
        return {"mesh": "1x2", "trace_region": 4096}
"""

VENDOR = (
    f"    PLUGIN = {PLUGIN!r}\n"
    + """
    import json, os, pathlib, sys
    folder = pathlib.Path("site")
    folder.mkdir()
    (folder / "tt_like.py").write_text(PLUGIN)
    info = folder / "tt_like-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\\nName: tt-like\\nVersion: 1.0\\n")
    (info / "entry_points.txt").write_text("[torch_xla.plugins]\\ntt = tt_like:TTPlugin\\n")
    sys.path.insert(0, str(folder))
    os.environ.pop("PJRT_DEVICE", None)

    from xla_core.jax_bridge import jaxlib_runtime
    from xla_core.jax_bridge import pjrt_c_api
    seen = {}
    pjrt_c_api.load_library = lambda name, path: seen.update(library=(name, path))
    def make_client(name, options, distributed):
        seen["options"] = dict(options)
        return jaxlib_runtime.make_cpu_client(asynchronous=True, num_devices=2)
    pjrt_c_api.make_client = make_client

    import torch, torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr
    from torch_xla import _XLAC
"""
)

MODEL = """
    xr.set_device_type("TT")
    device = xm.xla_device()
    assert xr.device_type() == "TT" and xm.xla_device_hw(device) == "TT"
    from tt_like import TTPlugin
    assert TTPlugin.made == 1 and _XLAC._get_xla_all_numbers_special_scalars()
    assert seen["options"] == {"mesh": "1x2", "trace_region": 4096}
    assert seen["library"][0] == "tt" and seen["library"][1].endswith("tt_like.py")
    assert issubclass(TTPlugin, _XLAC.PjRtPlugin)

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 2))
    x = torch.randn(3, 4)
    wanted = model(x)
    model = model.to(device)
    got = model(x.to(device)) * 0.125
    assert "1.250000e-01" in xm.get_stablehlo([got])
    torch.testing.assert_close(got.cpu(), wanted * 0.125)

    torch_xla.set_custom_compile_options({"xla_cpu_enable_fast_math": False})
    torch.testing.assert_close((model(x.to(device)) + 0.5).cpu(), wanted + 0.5)
    torch_xla.set_custom_compile_options({})

    from torch_xla.experimental.mark_pattern_utils import StableHLOCompositeBuilder
    builder = StableHLOCompositeBuilder("tenstorrent.scaled", {"factor": 3})
    scale = torch.full((4,), 3.0).to(device)  # captured, not marked
    y = builder.mark_outputs(builder.mark_inputs(x.to(device)) * scale)
    assert 'stablehlo.composite "tenstorrent.scaled"' in xm.get_stablehlo([y])
    torch.testing.assert_close(y.cpu(), x * 3)

    z = x.to(device).tanh()
    assert _XLAC._set_xla_custom_op_name_prefix(z, "model/", 0)
    before = _XLAC._xla_get_num_cached_compilation_graph()
    torch.testing.assert_close(z.cpu(), x.tanh())
    assert _XLAC._xla_get_num_cached_compilation_graph() == before + 1
    xr.clear_computation_cache()
    assert _XLAC._xla_get_num_cached_compilation_graph() == 0
    torch.testing.assert_close((x.to(device) + 1).cpu(), x + 1)
    print("it ran")
"""

SHARDED = """
    import numpy as np
    xr.set_device_type("TT")
    xr.use_spmd()
    import torch_xla.distributed.spmd as xs
    mesh = xs.Mesh(np.arange(2), (1, 2), ("batch", "model"))
    w = torch.arange(16.0).reshape(4, 4)
    t = xs.mark_sharding(w.to(torch_xla.device()), mesh, (None, "model"))
    spec = _XLAC._get_xla_sharding_spec(t.global_tensor)
    assert spec == "{devices=[1,2]0,1}", spec
    torch.testing.assert_close((t @ t).cpu(), w @ w)
    sharding = _XLAC.OpSharding([[0], [1]], [], [], int(xs.ShardingType.TILED))
    made = _XLAC._global_tensor_from_cpu_shards([w[:2], w[2:]], sharding)
    torch.testing.assert_close(made.cpu(), w)
    print("it ran")
"""


@pytest.mark.parametrize("body", [MODEL, SHARDED], ids=["one device", "over a mesh"])
def test_a_plugin_in_the_shape_of_tenstorrents(run_program, body):
    assert "it ran" in run_program(VENDOR + body)


NEURON = """
    import torch, torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.core.xla_builder as xb
    import torch_xla.utils.serialization as xser
    from torch_xla import _XLAC

    assert not _XLAC._xla_runtime_is_initialized()
    device = xm.xla_device()
    _XLAC._init_xla_lazy_backend()
    assert _XLAC._xla_runtime_is_initialized()

    # a training loop of mark_step, with closures that read values
    model = torch.nn.Linear(4, 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(16, 4), torch.randn(16, 1)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x.to(device)), y.to(device))
        loss.backward()
        xm.optimizer_step(optimizer)
        xm.add_step_closure(lambda value: losses.append(value.item()), (loss.detach(),))
        xm.mark_step()
    assert len(losses) == 4 and losses[3] < losses[0]
    assert xm.rendezvous("epoch", b"x") == [b"x"]

    # tracing for a compiler: HLO with the weights as numbered arguments
    context = _XLAC.lowering.LoweringContext("Traced")
    example = x[:2].to(device)
    result = model(example)
    context.build([result])
    arguments = context.parameter_id_tensor_mapping()
    roles = {context.tensor_parameter_id(p): n for n, p in model.named_parameters()}
    assert sorted(roles.values()) == ["bias", "weight"] and -1 not in roles
    computation = xb.computation_from_module_proto("traced", context.hlo())
    assert "HloModule" in xb.get_computation_hlo(computation)
    ordered = [t.to(device) for _, t in sorted(arguments.items())]
    (again,) = xb.xla_computation_as_func(computation)(ordered)
    torch.testing.assert_close(again.cpu(), result.cpu())

    # what libraries use to move and save nested tensors
    arena = xm.ToXlaTensorArena(
        lambda ts: _XLAC._xla_tensors_from_aten(ts, [str(device)] * len(ts)),
        lambda v: isinstance(v, torch.Tensor) and v.device.type == "cpu",
    )
    moved = arena.transform({"a": x, "b": [y, 3]})
    assert moved["a"].device == device and moved["b"][1] == 3
    xser.save(moved, "nested.pt")
    back = xser.load("nested.pt")
    assert torch.equal(back["a"], x) and torch.equal(back["b"][0], y)
    print("it ran")
"""


def test_what_awss_libraries_do(run_program):
    assert "it ran" in run_program(NEURON)
