"""The remaining functions of ``torch_xla``, ``xm`` and ``xr`` that need one process."""

from __future__ import annotations

import importlib.metadata
import time

import pytest
import torch
from torch import nn

import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch_xla.utils import checkpoint as xla_checkpoint
from xla_core.api import program_report
from xla_core.support import counters

# -- random numbers -------------------------------------------------------------------------------


def test_torch_manual_seed_seeds_xla_too():
    torch.manual_seed(3)
    first = torch.rand(4, device="xla").tolist()
    torch.manual_seed(3)
    assert torch.rand(4, device="xla").tolist() == first
    torch.seed()
    assert torch.rand(4, device="xla").tolist() != first


def test_a_seed_set_before_torch_xla_is_imported_counts(run_python):
    code = "import torch; torch.manual_seed(3); {}; print(torch.rand(2, device='xla').tolist())"
    assert run_python(code.format("import torch_xla")) == run_python(code.format("0"))


def test_seeding_starts_no_device(run_python):
    run_python(
        """
        import torch, torch_xla
        from xla_core.execution import runtime
        torch.manual_seed(1)
        torch_xla.manual_seed(1)
        assert not runtime.started()
        """
    )


def test_fork_rng():
    xm.set_rng_state(7)
    with xm.fork_rng():
        inside = torch.rand(2, device="xla").tolist()
        torch.manual_seed(1)
    assert torch.rand(2, device="xla").tolist() == inside
    state = xm.get_rng_state()
    with xm.fork_rng(enabled=False):
        torch.rand(2, device="xla")
    assert xm.get_rng_state() != state


def test_torchs_accelerator_and_spare_backend_are_left_alone(run_python):
    out = run_python(
        """
        import torch
        before = torch.accelerator.current_accelerator(), torch._C._get_privateuse1_backend_name()
        import torch_xla
        torch.ones(1, device="xla").tolist()
        assert before == (torch.accelerator.current_accelerator(), torch._C._get_privateuse1_backend_name())
        print(torch.get_device_module("xla").device_count())
        """
    )
    assert out == "1\n"


# -- moving data ----------------------------------------------------------------------------------


def test_send_cpu_data_to_device_keeps_the_structure():
    data = {"x": torch.ones(2), "more": [(torch.zeros(1), 3)], "there": torch.ones(1, device="xla")}
    sent = xm.send_cpu_data_to_device(data, "xla")
    assert sent["x"].device.type == sent["more"][0][0].device.type == "xla"
    assert sent["more"][0][1] == 3
    assert sent["there"] is data["there"]
    assert data["x"].device.type == "cpu"
    back = xm._maybe_convert_to_cpu(sent)
    assert back["x"].device.type == back["there"].device.type == "cpu"
    assert xm._maybe_convert_to_cpu(sent, convert=False) is sent


class Spec:
    """What ``send_cpu_data_to_device`` asks of a sharding specification."""

    def __init__(self):
        self.sent = []

    def send(self, tensor, device):
        self.sent.append(tuple(tensor.shape))
        return tensor.to(device)


def test_an_input_sharding_sends_the_tensors():
    spec = Spec()
    xm.send_cpu_data_to_device([torch.ones(2, 2), torch.ones(3)], "xla", spec)
    assert spec.sent == [(2, 2), (3,)]
    by_key = Spec()
    batch = {"a": torch.ones(1, 4), "b": torch.ones(5, 5)}
    with pytest.raises(KeyError, match=r"Keys: \['b'\] are missing from input_sharding"):
        xm.send_cpu_data_to_device(batch, "xla", {"a": by_key})
    xm.send_cpu_data_to_device(batch, "xla", {"a": by_key, "b": None})
    assert by_key.sent == [(1, 4)]
    with pytest.raises(TypeError, match="the batch must be one too; it is a list"):
        xm.send_cpu_data_to_device([torch.ones(1)], "xla", {"a": spec})


def test_an_arena_converts_all_at_once():
    calls = []

    def convert(values):
        calls.append(list(values))
        return [v * 10 for v in values]

    arena = xm.ToXlaTensorArena(convert, lambda v: isinstance(v, int))
    assert arena.transform({"a": 1, "b": [2, (3, "x")]}) == {"a": 10, "b": [20, (30, "x")]}
    assert calls == [[1, 2, 3]]
    assert arena.transform("nothing") == "nothing"
    assert len(calls) == 1


def test_shared_views_are_found():
    x = torch.zeros(4, device="xla")
    xm.check_view_sharing([x, x, torch.zeros(4, device="xla")])
    with pytest.raises(RuntimeError, match="are views of one storage"):
        xm.check_view_sharing({"a": x, "b": x[1:]})


# -- graphs ---------------------------------------------------------------------------------------


def test_stablehlo_of_what_is_pending():
    x = torch.ones(2, 3, device="xla")
    torch_xla.sync()
    y = (x + 1).exp()
    z = y.sum()
    before = sum(p.runs for p in program_report.program_runs())
    text = xm.get_stablehlo([y])
    assert "stablehlo.exponential" in text
    assert "stablehlo.reduce" not in text
    assert "tensor<2x3xf32>" in text
    assert "stablehlo.reduce" in xm.get_stablehlo()
    assert xm.get_stablehlo_bytecode([z])[:4] == b"ML\xefR"
    assert sum(p.runs for p in program_report.program_runs()) == before
    assert z.item() == pytest.approx(6 * 7.389056)
    torch_xla.sync()
    with pytest.raises(RuntimeError, match="no graph to show"):
        xm.get_stablehlo()
    with pytest.raises(TypeError, match="got one on cpu"):
        xm.get_stablehlo([torch.ones(1)])


def test_unlazy_runs_and_waits():
    x = torch.ones(2, device="xla") + 1
    xm.unlazy([x])
    assert x._s.buffer.is_ready()


def test_an_optimization_barrier_keeps_equal_computations_apart():
    x = torch.ones(8, device="xla")
    torch_xla.sync()
    first = (x + 2).exp()
    copy = x.clone()
    xm.optimization_barrier_([copy, torch.ones(1)])
    second = (copy + 2).exp()
    text = xm.get_stablehlo([first, second])
    assert text.count("stablehlo.optimization_barrier") == 1
    assert torch.equal(first, second)


def test_cached_programs_are_counted_and_cleared(compile_count):
    x = torch.ones(13, device="xla")
    torch_xla.sync()
    (x + 1).tolist()
    before = compile_count()
    (x + 1).tolist()
    assert compile_count() == before
    assert xr.get_num_cached_compilation_graph() > 0
    y = x + 5
    xr.clear_computation_cache()
    assert xr.get_num_cached_compilation_graph() == 0
    assert y.tolist() == [6.0] * 13
    (x + 1).tolist()
    assert compile_count() > before


def test_checkpointing_computes_again_behind_a_barrier():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5)).to("xla")
    x = torch.randn(3, 4, device="xla", requires_grad=True)
    found = []
    for run in (
        lambda: model(x),
        lambda: xla_checkpoint.checkpoint(model, x),
        lambda: xla_checkpoint.checkpoint(model, x, use_reentrant=False),
        lambda: torch.utils.checkpoint.checkpoint(model, x, use_reentrant=True),
        lambda: torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False),
    ):
        model.zero_grad()
        x.grad = None
        torch.manual_seed(5)
        run().square().sum().backward()
        text = xm.get_stablehlo([x.grad])
        found.append((x.grad.cpu(), model[0].weight.grad.cpu(), "optimization_barrier" in text))
    for grads in found[1:]:
        torch.testing.assert_close(grads[0], found[0][0])
        torch.testing.assert_close(grads[1], found[0][1])
    assert [barrier for *_, barrier in found] == [False, True, True, False, False]
    with pytest.raises(ValueError, match="unexpected keyword arguments: depth"):
        xla_checkpoint.checkpoint(model, x, depth=3)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("trained", [True, False])
def test_checkpoints_read_weights_behind_a_barrier(reentrant, trained):
    """What the first computation makes of a weight would live until the second one otherwise."""
    weight = nn.Parameter(torch.randn(8, 4, device="xla"), requires_grad=trained)
    x = torch.randn(3, 4, device="xla", requires_grad=True)

    def function(x):
        half = weight.to(torch.bfloat16)
        assert half.requires_grad == (trained and torch.is_grad_enabled())
        return nn.functional.linear(x.to(torch.bfloat16), half).float()

    xla_checkpoint.checkpoint(function, x, use_reentrant=reentrant).square().sum().backward()
    text = xm.get_stablehlo([x.grad])
    behind = [line for line in text.splitlines() if "optimization_barrier" in line]
    assert sum("tensor<8x4xf32>" in line for line in behind) == 1
    found = x.grad.cpu(), weight.grad.cpu() if trained else None
    x.grad = weight.grad = None
    function(x).square().sum().backward()
    torch.testing.assert_close(found, (x.grad.cpu(), weight.grad.cpu() if trained else None))


def test_a_checkpoint_leaves_parameters_in_their_place():
    """FSDP looks for the node that adds a parameter's gradient up, while layers are computed again."""
    layer = nn.Linear(4, 4).to("xla")
    found = []

    def function(x):
        if torch.is_grad_enabled():
            found.append(layer.weight.expand_as(layer.weight).grad_fn.next_functions[0][0])
        return layer(x)

    x = torch.randn(3, 4, device="xla", requires_grad=True)
    xla_checkpoint.checkpoint(function, x).sum().backward()
    assert [node.variable is layer.weight for node in found] == [True]
    assert layer.weight.grad is not None


# -- figures --------------------------------------------------------------------------------------


def test_rate_tracker(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    tracker = xm.RateTracker(smooth_factor=0.5)
    tracker.add(10)
    now[0] += 2
    assert tracker.rate() == 5
    tracker.add(30)
    now[0] += 2
    assert tracker.rate() == 10  # halfway between 15 and 5
    assert tracker.global_rate() == 10
    assert xm.RateTracker().rate() == 0


def test_devices_and_processes_of_a_process_that_is_alone():
    assert (xr.process_index(), xr.process_count(), xr.host_index()) == (0, 1, 0)
    assert (xr.global_ordinal(), xr.local_ordinal(), xm.get_local_ordinal()) == (0, 0, 0)
    assert (xr.world_size(), xr.local_process_count()) == (1, 1)
    assert xr.global_device_count() == xr.local_device_count() == torch_xla.device_count()
    assert xr.global_runtime_device_count() == xr.addressable_runtime_device_count()
    assert xr.get_master_ip() == "127.0.0.1"
    assert xr.is_bf16_supported()
    assert xr.runtime_device_attributes("CPU:0")["name"] == "CPU:0"
    assert xr.runtime_device_attributes("xla:0") in xr.global_runtime_device_attributes()
    assert xm.xla_device_kind() == xm.xla_device_kind("xla:0") != ""


def test_gradients_in_order():
    model = nn.Linear(2, 1).to("xla")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert xm._fetch_gradients(optimizer) == []
    model.weight.sum().backward()
    (gradient,) = xm._fetch_gradients(optimizer)
    assert gradient is model.weight.grad


@pytest.mark.parametrize(
    ("old", "value"),
    [(xm.get_ordinal, 0), (xm.xrt_world_size, 1), (xr.using_pjrt, True)],
)
def test_removed_names_work_and_warn(old, value):
    with pytest.warns(DeprecationWarning, match=r"is deprecated; use"):
        assert old() == value


# -- the official package -------------------------------------------------------------------------


def test_the_official_package_beside_ours_is_named(run_interpreter, tmp_path):
    info = tmp_path / "site" / "torch_xla-2.9.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_xla\nVersion: 2.9.0\n")
    error = run_interpreter("import torch_xla", fails=True, PYTHONPATH=str(tmp_path / "site"))
    assert f"the official package torch_xla 2.9.0 in {tmp_path / 'site'} is installed" in error
    assert "pip uninstall torch_xla" in error
    assert run_interpreter("import torch; print(1)", PYTHONPATH=str(tmp_path / "site")) == "1\n"


def test_our_own_metadata_package_is_welcome(run_interpreter, tmp_path):
    info = tmp_path / "site" / "torch_xla-2.9.0.dist-info"
    info.mkdir(parents=True)
    version = torch_xla.__version__
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch_xla\nVersion: {version}\n")
    out = run_interpreter(
        "import torch_xla; print(torch_xla.__version__)", PYTHONPATH=str(tmp_path / "site")
    )
    assert out.strip() == version
    assert importlib.metadata.version("xla-core") in version
    assert counters.all_counters()
