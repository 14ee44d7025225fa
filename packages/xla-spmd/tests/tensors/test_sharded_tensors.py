"""XLAShardedTensor, its shards, input shardings, manual sharding, pictures, torch.compile, the cache."""

from __future__ import annotations

import re

import pytest
import torch

import torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.distributed.spmd.debugging as debugging
import torch_xla.distributed.spmd.xla_sharding as xla_sharding
from xla_core.extension_api.tensors import send_cpu_data_to_device
from xla_spmd.reports.visualize import cells

VALUES = torch.arange(64.0).reshape(8, 8)
XLAC = torch_xla._XLAC


def test_local_shards_say_what_they_are(mesh):
    marked = xs.mark_sharding(VALUES.to("xla"), mesh, ("data", None))
    shards = marked.local_shards
    assert [shard.shard_device for shard in shards] == [f"CPU:{i}" for i in range(8)]
    assert [shard.replica_id for shard in shards] == [0, 1] * 4
    for i, shard in enumerate(shards):
        assert shard.indices == [slice(i // 2 * 2, i // 2 * 2 + 2, 1), slice(0, 8, 1)]
        assert shard.data.device.type == "cpu"
        torch.testing.assert_close(shard.unpadded_data, VALUES[tuple(shard.indices)])
    whole = xs.mark_sharding(VALUES.to("xla"), mesh, (None, None))
    assert {str(shard.indices) for shard in whole.local_shards} == {"Ellipsis"}
    assert [shard.replica_id for shard in whole.local_shards] == list(range(8))


def test_the_names_of_the_c_module(mesh):
    tensor = VALUES.to("xla")
    assert XLAC._get_xla_sharding_spec(tensor) == "" and XLAC._get_xla_sharding_type(tensor) is None
    xs.mark_sharding(tensor, mesh, ("data", "model"))
    assert XLAC._get_xla_sharding_type(tensor) == int(xs.ShardingType.TILED)
    ((shards,), (places,)) = (
        XLAC._get_local_shards([tensor]),
        XLAC._get_local_shard_replica_and_indices([tensor]),
    )
    for (data, device), (replica, indices), number in zip(shards, places, range(8), strict=True):
        assert (device, replica) == (f"CPU:{number}", 0)
        torch.testing.assert_close(data, VALUES[tuple(indices)])
    XLAC._xla_clear_sharding(tensor)
    assert XLAC._get_xla_sharding_specs([tensor]) == [""]


def test_repr_and_attributes(mesh):
    marked = xs.mark_sharding(torch.zeros(2, 2).to("xla"), mesh, (None, "model"))
    assert repr(marked) == (
        "XLAShardedTensor(tensor([[0., 0.],\n        [0., 0.]], device='xla:0'))"
    )
    assert marked.mesh_shape == (4, 2) and marked.partition_spec == (None, "model")
    assert marked.sharding_type is xs.ShardingType.PARTIAL
    assert marked.sharding_spec == "{devices=[1,2,4]0,2,4,6,1,3,5,7 last_tile_dim_replicate}"
    assert type(marked + 1) is type(marked.global_tensor)
    assert torch.equal(marked.global_tensor.cpu(), torch.zeros(2, 2))


def test_shards_are_loaded_back(mesh):
    marked = xs.mark_sharding(torch.zeros(8, 8).to("xla"), mesh, ("data", "model"))
    plain = marked.global_tensor
    shards = marked.local_shards
    for shard in shards:
        shard.data = VALUES[tuple(shard.indices)]
    marked.load_local_shards_(shards)
    torch.testing.assert_close(marked.cpu(), VALUES)
    torch.testing.assert_close((plain * 2).cpu(), VALUES * 2)
    with pytest.raises(ValueError, match="got 1 shards; this process holds 8"):
        marked.load_local_shards_(shards[:1])
    shards[3].data = torch.zeros(1)
    with pytest.raises(ValueError, match=r"shard 3 has shape \(1,\)"):
        marked.load_local_shards_(shards)


def test_input_sharding_of_batches(mesh):
    spec = xs.ShardingSpec(mesh, ("data", None))
    images, labels = torch.ones(8, 4), torch.zeros(8, dtype=torch.long)
    assert spec.can_apply(images) and not spec.can_apply(labels)
    assert spec.xla_spec(images) == mesh.get_op_sharding(("data", None))
    assert spec.xla_spec(labels) is None
    sent = send_cpu_data_to_device({"x": images, "y": labels}, "xla", spec)
    assert XLAC._get_xla_sharding_spec(sent["x"]) == mesh.get_op_sharding(("data", None)).text
    assert XLAC._get_xla_sharding_spec(sent["y"]) == ""
    by_name = {"x": xs.ShardingSpec(mesh, (None, "model")), "y": None}
    sent = send_cpu_data_to_device({"x": images, "y": labels}, "xla", by_name)
    assert XLAC._get_xla_sharding_spec(sent["x"]) == mesh.get_op_sharding((None, "model")).text


def test_minibatches_of_one_process_are_the_batch(mesh):
    spec = xs.ShardingSpec(mesh, ("data", None), minibatch=True)
    sent = send_cpu_data_to_device(VALUES, "xla", spec)
    torch.testing.assert_close(sent.cpu(), VALUES)
    assert XLAC._get_xla_sharding_spec(sent) == mesh.get_op_sharding(("data", None)).text


def test_manual_sharding_computes_on_each_devices_part(mesh):
    tensor = VALUES.to("xla").requires_grad_()
    part = xs.enable_manual_sharding(tensor, ("data", None), mesh=mesh)
    assert part.shape == (2, 8)
    # a sum over rows is one over the two rows that a device has
    rows = part.sum(0, keepdim=True) * part
    whole = xs.disable_manual_sharding(rows, ("data", None), (8, 8), mesh=mesh)
    assert whole.shape == (8, 8)
    pairs = VALUES.reshape(4, 2, 8)
    torch.testing.assert_close(
        whole.detach().cpu(), (pairs.sum(1, keepdim=True) * pairs).reshape(8, 8)
    )
    whole.sum().backward()
    reference = VALUES.reshape(4, 2, 8).requires_grad_()
    (reference.sum(1, keepdim=True) * reference).sum().backward()
    torch.testing.assert_close(tensor.grad.cpu(), reference.grad.reshape(8, 8))


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("{devices=[2,2]0,1,2,3}", [[[0], [1]], [[2], [3]]]),
        ("{devices=[2,1,2]0,1,2,3 last_tile_dim_replicate}", [[[0, 1]], [[2, 3]]]),
        ("{devices=[1,2,2]0,2,1,3 last_tile_dim_replicate}", [[[0, 2], [1, 3]]]),
        ("{devices=[4]0,1,2,3}", [[[0], [1], [2], [3]]]),
        ("{devices=[1,2,2]<=[4]}", [[[0], [1]], [[2], [3]]]),
        ("{replicated}", [[list(range(8))]]),
    ],
)
def test_pictures_show_which_device_holds_what(text, rows, capsys):
    assert cells(xla_sharding.ShardingSpec and debugging_parse(text), text) == rows
    debugging.visualize_sharding(text, use_color=False)
    shown = capsys.readouterr().out
    for row in rows:
        for devices in row:
            assert f"CPU {devices}" in shown


@pytest.mark.parametrize("installed", [True, False])
def test_scripts_can_ask_whether_there_are_pictures(installed, run_python):
    code = """
        import torch_xla.distributed.spmd.debugging as debugging
        try:
            debugging.visualize_sharding("{devices=[2]0,1}")
            drawn = True
        except ImportError:
            drawn = False
        print(debugging.RICH_ENABLED, drawn)
    """
    if not installed:
        code = "        import sys\n        sys.modules['rich'] = None" + code
    answer = run_python(code).splitlines()[-1]
    assert answer == ("True True" if installed else "False False")


def debugging_parse(text):
    from xla_spmd.sharding.hlo_sharding import parse

    return parse(text)


def test_pictures_of_tensors(mesh, capsys):
    tensor = VALUES.to("xla")
    with pytest.raises(ValueError, match="no sharding to show"):
        debugging.visualize_tensor_sharding(tensor)
    xs.mark_sharding(tensor, mesh, ("data", "model"))
    table = debugging.visualize_tensor_sharding(tensor, use_color=False, max_width=60)
    assert table.row_count == 4
    assert re.findall(r"CPU \[(\d)\]", capsys.readouterr().out) == list("01234567")
    with pytest.raises(ValueError, match="splits 3 dimensions"):
        debugging.visualize_sharding("{devices=[2,2,2]<=[8]}")
    with pytest.raises(ValueError, match="each device has its own value"):
        debugging.visualize_sharding("{manual}")


def test_the_operator_for_torch_compile(mesh):
    tensor = VALUES.to("xla")
    marked = torch.ops.xla.dynamo_mark_sharding(
        tensor, list(range(8)), [4, 2], "('data', 'model')", "('data', None)"
    )
    result = (marked * 2).contiguous()
    torch_xla.sync()
    assert XLAC._get_xla_sharding_spec(result) == mesh.get_op_sharding(("data", None)).text
    torch.testing.assert_close(result.cpu(), VALUES * 2)


def test_marking_inside_a_compiled_function(mesh):
    def function(x):
        return xs.mark_sharding(x * 2, mesh, ("data", None), use_dynamo_custom_op=True) + 1

    torch._dynamo.trace_rules.clear_lru_cache()  # init_process_group does it
    compiled = torch.compile(function, backend="openxla", fullgraph=True)
    with torch.no_grad():
        result = compiled(VALUES.to("xla"))
    torch.testing.assert_close(result.cpu(), VALUES * 2 + 1)
    assert XLAC._get_xla_sharding_spec(result) == mesh.get_op_sharding(("data", None)).text


def test_the_persistent_cache_serves_sharded_programs(run_python, tmp_path):
    code = """
        import numpy as np, torch, torch_xla
        import torch_xla.runtime as xr, torch_xla.distributed.spmd as xs
        from xla_core.support import counters
        xr.use_spmd()
        mesh = xs.Mesh(np.arange(8), (4, 2), ("data", "model"))
        torch.manual_seed(0)
        layer = torch.nn.Linear(16, 32).to("xla")
        xs.mark_sharding(layer.weight, mesh, ("model", "data"))
        optimizer = torch.optim.Adam(layer.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            loss = layer(torch.ones(8, 16).to("xla")).square().mean()
            loss.backward()
            optimizer.step()
            torch_xla.sync()
        print(loss.item(), torch_xla._XLAC._get_xla_sharding_spec(optimizer.state[layer.weight]["exp_avg"]))

        def made():
            found = counters.all_counters()
            return found.get("UncachedCompile", 0), found.get("PersistentCacheHit", 0)

        def evaluate():
            return layer(torch.ones(8, 16).to("xla")).square().mean().item()

        evaluate()
        before = sum(made())
        evaluate()
        assert sum(made()) == before
        xs.mark_sharding(layer.weight, mesh, ("data", None))
        evaluate()
        assert sum(made()) == before + 1  # the same step over another sharding is another program
        print(*made())
    """
    cache = {"XLA_PERSISTENT_CACHE_PATH": str(tmp_path / "cache")}
    (first, compiled), (second, served) = (run_python(code, **cache).splitlines() for _ in range(2))
    assert first == second and first.endswith("{devices=[2,4]0,2,4,6,1,3,5,7}")
    count = int(compiled.split()[0])
    # in this order: two of training, two of evaluation
    assert (compiled, served) == (f"{count} 0", f"0 {count}") and count == 4


def test_a_compiled_function_with_marks_is_trained(mesh):
    """The operator has a gradient; forward and backward are one program each."""
    torch.manual_seed(0)
    host = torch.nn.Linear(8, 8)
    layer = torch.nn.Linear(8, 8)
    layer.load_state_dict(host.state_dict())
    layer.to("xla")
    xs.mark_sharding(layer.weight, mesh, ("model", None))

    def loss_of(x):
        hidden = xs.mark_sharding(layer(x), mesh, ("data", "model"), use_dynamo_custom_op=True)
        return hidden.square().mean()

    compiled = torch.compile(loss_of, backend="openxla", fullgraph=True)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    reference = torch.optim.SGD(host.parameters(), lr=0.1)
    for _ in range(3):
        compiled(VALUES.to("xla")).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync()
        host(VALUES).square().mean().backward()
        reference.step()
        reference.zero_grad()
    torch.testing.assert_close(
        layer.weight.detach().cpu(), host.weight.detach(), rtol=1e-4, atol=1e-3
    )
    assert XLAC._get_xla_sharding_spec(layer.weight) == mesh.get_op_sharding(("model", None)).text
