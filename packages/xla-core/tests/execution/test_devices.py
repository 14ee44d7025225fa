"""Devices: their names, several in one process, host numbers among operands, the attachment to torch."""

from __future__ import annotations

import pytest
import torch

import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from xla_core.plugins import discovery
from xla_core.torch_bridge import device_guard, torch_private

# -- names ----------------------------------------------------------------------------------------


def test_the_device_by_all_its_names():
    device = torch.device("xla", 0)
    assert torch_xla.device() == torch_xla.device(0) == xm.xla_device() == device
    assert torch_xla.devices() == [device]
    assert torch_xla.device_count() == xr.addressable_device_count() == 1
    assert torch_xla.real_devices() == xm.xla_real_devices() == ["CPU:0"]
    assert xm.get_xla_supported_devices() == ["xla:0"]
    assert xr.device_type() == "CPU"
    assert xm.xla_device_hw(device) == xm.xla_device_hw("xla") == xm.xla_device_hw("cpu") == "CPU"
    assert xm.is_master_ordinal() and xm.is_master_ordinal(local=False)
    assert (xr.global_ordinal(), xr.world_size(), xr.process_index(), xr.process_count()) == (
        0,
        1,
        0,
        1,
    )
    assert xm.is_xla_tensor(torch.ones(1, device=device)) and not xm.is_xla_tensor(torch.ones(1))


def test_ordinals_look_for_no_plugin_once_the_client_runs(monkeypatch):
    """Training loops ask in every step; a look at all installed packages took 20 ms."""
    torch_xla.device_count()
    monkeypatch.setattr(discovery, "_entry_points", None)
    assert xm.is_master_ordinal() and xm.is_master_ordinal(local=False)
    assert (xm.get_local_ordinal(), xr.host_index(), xr.local_process_count()) == (0, 0, 1)
    xm.master_print("first")


def test_a_device_that_is_not_there_is_named_with_those_that_are():
    with pytest.raises(IndexError, match=r"Device index 9 out of range in \['xla:0'\]"):
        torch_xla.device(9)
    with pytest.raises(IndexError, match="Device index -1 out of range"):
        xm.xla_device(-1)
    for make in (
        lambda: torch.ones(2, device="xla:9"),
        lambda: torch.ones(2).to("xla:9"),
        lambda: torch.ones(2, device="xla").to("xla:9"),
        lambda: torch.empty(2, device="xla:9"),
        lambda: torch.ones_like(torch.ones(2, device="xla"), device="xla:9"),
    ):
        with pytest.raises(RuntimeError, match="there is no device xla:9; this process has xla:0"):
            make()
    with pytest.raises(RuntimeError, match=r"there is no TPU device; this process has \['CPU:0'\]"):
        xm.xla_device(devkind="TPU")


def test_the_module_of_the_device_type():
    module = torch.get_device_module("xla")
    assert module is torch.xla
    assert module.is_available() and module.device_count() == 1 and module.current_device() == 0
    state = module.get_rng_state()
    first = torch.rand(3, device="xla")
    module.set_rng_state(state)
    assert torch.equal(torch.rand(3, device="xla"), first)
    with torch.random.fork_rng(device_type="xla"):
        torch.rand(3, device="xla")
        inside = xm.get_rng_state()
    assert xm.get_rng_state() != inside
    module.manual_seed_all(5)
    assert xm.get_rng_state() == 5
    with module.device(0):
        module.synchronize()


def test_a_client_that_runs_already_stays():
    torch_xla.device()
    xr.set_device_type("cpu")
    with pytest.raises(RuntimeError, match="the CPU client is already running; choose NULL before"):
        xr.set_device_type("NULL")


# -- host tensors among the operands ------------------------------------------------------------------

NUMBER = torch.tensor(2.0)


@pytest.mark.parametrize(
    ("mixed", "expected"),
    [
        (lambda x: x + NUMBER, [3.0, 4.0]),
        (lambda x: NUMBER - x, [1.0, 0.0]),
        (lambda x: x * torch.tensor(2, dtype=torch.float64), [2.0, 4.0]),
        (lambda x: torch.where(x > 1, x, torch.tensor(0.0)), [0.0, 2.0]),
        (lambda x: x.clone().mul_(NUMBER), [2.0, 4.0]),
        (lambda x: torch.maximum(x, torch.tensor(1.5)), [1.5, 2.0]),
        (lambda x: x**NUMBER, [1.0, 4.0]),
        (lambda x: x / torch.tensor(4), [0.25, 0.5]),
    ],
)
def test_a_number_on_the_cpu_may_take_part(mixed, expected):
    result = mixed(torch.tensor([1.0, 2.0], device="xla"))
    assert result.dtype is torch.float32
    assert result.device.type == "xla"
    assert result.tolist() == expected


def test_the_number_can_differ_from_step_to_step_without_compiling(compile_count):
    x = torch.ones(2, device="xla")
    torch_xla.sync()
    assert (x * torch.tensor(2.0)).tolist() == [2.0] * 2
    compiled = compile_count()
    for value in (3.5, 0.0, 1.0, float("inf"), -1e30):
        assert (x * torch.tensor(value)).tolist() == [torch.tensor(value).item()] * 2
    assert compile_count() == compiled


def test_gradients_reach_a_number_on_the_cpu():
    scale = torch.tensor(3.0, requires_grad=True)
    x = torch.tensor([1.0, 2.0], device="xla", requires_grad=True)
    (x * scale).sum().backward()
    assert x.grad.tolist() == [3, 3]
    assert scale.grad.device.type == "cpu"
    assert scale.grad.item() == 3


HOST = torch.ones(2)


@pytest.mark.parametrize(
    "mixed",
    [
        lambda x: x + HOST,
        lambda x: HOST + x,
        lambda x: x.add_(HOST),
        lambda x: HOST.clone().add_(x),
        lambda x: x.dot(HOST),
        lambda x: torch.cat([x, HOST]),
        lambda x: torch.stack([HOST, x]),
        lambda x: torch.where(HOST > 0, x, x),
        lambda x: torch.nn.functional.linear(x, torch.ones(2, 2)),
        lambda x: torch.nn.functional.mse_loss(x, HOST),
        lambda x: torch.outer(x, HOST),
        lambda x: torch.einsum("i,i", x, HOST),
        lambda x: torch.add(x, x, out=HOST.clone()),
        lambda x: torch.addcmul(x, x, HOST),
        lambda x: torch.equal(x, HOST),
        lambda x: torch.nn.functional.layer_norm(x, (2,), weight=HOST),
        lambda x: torch._foreach_add([x], [HOST]),
    ],
)
def test_other_tensors_on_the_cpu_are_refused(mixed):
    message = (
        r"Input tensor is not an XLA tensor: torch\.\w+Tensor\. .* move them to one device first"
    )
    with pytest.raises(RuntimeError, match=message):
        mixed(torch.ones(2, device="xla"))


def test_a_linear_layer_that_was_left_on_the_cpu():
    with pytest.raises(
        RuntimeError, match=r"Input tensor is not an XLA tensor: torch\.FloatTensor"
    ):
        torch.nn.Linear(10, 20)(torch.randn(10, device="xla"))
    with pytest.raises(
        RuntimeError, match=r"Input tensor is not an XLA tensor: torch\.FloatTensor"
    ):
        torch.nn.Linear(10, 20).to("xla")(torch.randn(10))


# -- several devices ------------------------------------------------------------------------------


def test_four_devices_in_one_process(run_python):
    """Values, gradients and errors on and between the devices of one process."""
    run_python(
        """
        import torch, torch_xla, torch_xla.core.xla_model as xm
        assert torch_xla.device_count() == 4
        devices = torch_xla.devices()
        assert [str(d) for d in devices] == ["xla:0", "xla:1", "xla:2", "xla:3"]
        assert torch_xla.real_devices() == ["CPU:0", "CPU:1", "CPU:2", "CPU:3"]

        for i, device in enumerate(devices):
            x = torch.full((3,), i + 1.0, device=device, requires_grad=True)
            (x * x).sum().backward()
            assert x.grad.device == device
            assert x.grad.tolist() == [2 * (i + 1)] * 3

        # a graph over all of them
        x = torch.ones(2, device="xla:3", requires_grad=True)
        y = ((x * 2).to("xla:1") * 3).to("xla:0") + torch.ones(2, device="xla:0")
        y.sum().backward()
        assert y.device.index == 0 and y.tolist() == [7, 7]
        assert x.grad.device.index == 3 and x.grad.tolist() == [6, 6]

        # copies, of views too, and into existing tensors
        base = torch.arange(6.0, device="xla:1").view(2, 3)
        moved = base.t()[1].to("xla:2")
        base.zero_()
        assert moved.device.index == 2 and moved.tolist() == [1, 4]
        target = torch.zeros(2, dtype=torch.int64, device="xla:3")
        target.copy_(moved)
        assert target.tolist() == [1, 4] and target.device.index == 3
        assert torch.zeros_like(moved, device="xla:3").device.index == 3
        assert moved.new_ones(2).device.index == 2
        assert repr(target) == "tensor([1, 4], device='xla:3')"

        def refused(call, *words):
            try:
                call()
            except RuntimeError as error:
                assert all(w in str(error) for w in words), str(error)
            else:
                raise AssertionError("not refused")

        a, b = torch.ones(2, device="xla:1"), torch.ones(2, device="xla:2")
        same = "Expected all tensors to be on the same device", "xla:1", "xla:2"
        refused(lambda: a + b, *same)
        refused(lambda: a.add_(b), *same)
        refused(lambda: torch.cat([a, b]), *same)
        refused(lambda: torch.where(a > 0, a, b), *same)
        refused(lambda: torch._foreach_add([a], [b]), *same)
        refused(lambda: torch.ones(1, device="xla:9"), "there is no device xla:9", "xla:3")
        assert a.tolist() == [1, 1]

        # the thread's current device
        torch_xla.device(2)
        assert torch.ones(1, device="xla").device.index == 2
        assert xm.xla_device().index == 2
        torch_xla.device(0)

        # random states are each device's own
        torch_xla.manual_seed(3)
        assert torch.equal(torch.rand(2, device="xla:1").cpu(), torch.rand(2, device="xla:2").cpu())
        xm.set_rng_state(9, "xla:1")
        assert xm.get_rng_state("xla:1") == 9 != xm.get_rng_state("xla:2")
        torch_xla.sync()
        xm.wait_device_ops()
        """,
        CPU_NUM_DEVICES="4",
    )


def test_four_devices_train_at_once_in_threads(run_python):
    """Each thread trains on its device; all get what the CPU gets."""
    run_python(
        """
        import threading, torch, torch_xla
        from torch import nn

        def train(device):
            with lock:  # torch's CPU generator is shared by the threads
                torch.manual_seed(0)
                model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
                data = torch.randn(16, 4).to(device)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            for _ in range(30):
                optimizer.zero_grad()
                loss = model(data).pow(2).mean()
                loss.backward()
                optimizer.step()
                if device != "cpu":
                    torch_xla.sync()
            return loss.item()

        def work(i):
            torch_xla.device(i)
            try:
                losses[i] = train(f"xla:{i}")
            except BaseException as error:
                losses[i] = error

        lock = threading.Lock()
        expected = train("cpu")
        losses = {}
        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        assert set(losses) == {0, 1, 2, 3}
        # 30 steps of float32 Adam in two orders of summation
        assert all(abs(l - expected) < 1e-5 for l in losses.values()), (expected, losses)
        """,
        CPU_NUM_DEVICES="4",
    )


def test_one_device_used_by_several_threads(run_python):
    """Operations of threads interleave in one trace; no value is lost or mixed up."""
    run_python(
        """
        import threading, torch, torch_xla

        def work(i):
            x = torch.full((8,), float(i), device="xla", requires_grad=True)
            for n in range(40):
                y = (x * n + i).sum()
                if n % 7 == i % 7:
                    torch_xla.sync()
                if y.item() != 8 * (i * n + i):
                    wrong.append((i, n))
            (x * x).sum().backward()
            if x.grad.tolist() != [2.0 * i] * 8:
                wrong.append(i)
            done.append(i)

        wrong, done = [], []
        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        assert not wrong and len(done) == 4, (wrong, done)
        """
    )


# -- the attachment to torch ----------------------------------------------------------------------

BACKWARD_FIRST = """
    import torch
    x = torch.ones(2, requires_grad=True)
    (x * 2).sum().backward()
    import torch_xla
    for finish in (lambda y: y.sum(), lambda y: y.cpu().sum()):
        y = torch.ones(2, device='xla', requires_grad=True)
        try:
            finish(y * 3).backward()
            assert y.grad.tolist() == [3, 3]
        except RuntimeError as error:
            print(error)
"""


def test_a_backward_on_the_cpu_may_come_first(run_interpreter):
    assert run_interpreter(BACKWARD_FIRST) == ""


def test_without_autoload_a_backward_that_came_first_is_explained(run_interpreter):
    output = run_interpreter(BACKWARD_FIRST, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert output.splitlines() == [torch_private.MSG_LATE_BACKWARD] * 2
    assert "Import torch_xla first" in output


def test_without_autoload_the_import_attaches_the_device(run_interpreter):
    run_interpreter(
        """
        import torch, torch_xla
        y = torch.ones(2, device='xla', requires_grad=True)
        (y * 3).sum().backward()
        assert y.grad.tolist() == [3, 3]
        """,
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )


def test_the_import_runs_no_collection_and_leaves_its_objects_old(run_interpreter):
    run_interpreter(
        """
        import gc, torch
        found = []
        gc.callbacks.append(lambda phase, info: found.append(info['generation']))
        import torch_xla, jax
        assert 2 not in found, found
        assert gc.isenabled() and gc.get_freeze_count() == 0
        young = {id(o) for generation in (0, 1) for o in gc.get_objects(generation)}
        assert id(jax.Array) not in young and id(torch_xla) not in young
        assert len(young) < 20_000, len(young)
        """
    )


def test_objects_that_somebody_froze_stay_frozen(run_interpreter):
    run_interpreter(
        """
        import gc, torch
        frozen = []
        gc.freeze()
        import torch_xla
        assert gc.is_tracked(frozen) and not any(o is frozen for o in gc.get_objects())
        """
    )


def test_torch_alone_finds_the_device_and_loads_nothing_slow(run_interpreter):
    run_interpreter(
        """
        import sys, torch
        assert "jax" not in sys.modules and "xla_core.dispatch" not in sys.modules
        x = torch.arange(3.0).to("xla")
        assert (x + 1).tolist() == [1, 2, 3]
        assert torch.zeros(2, device="xla").tolist() == [0, 0]
        assert "torch_xla" not in sys.modules
        """
    )


def test_an_import_changes_no_environment_and_no_configuration(run_interpreter):
    run_interpreter(
        """
        import logging, os, torch
        before = dict(os.environ)
        import jax
        configuration = dict(jax.config.values)
        import torch_xla
        torch.ones(2, device="xla").sum().item()
        assert dict(os.environ) == before
        assert dict(jax.config.values) == configuration
        assert not logging.getLogger().handlers
        """
    )


def test_a_start_does_not_wait_for_what_few_programs_need(run_interpreter):
    run_interpreter(
        """
        import sys, torch
        from torch_xla.experimental.mark_pattern_utils import StableHLOCompositeBuilder
        import torch_xla.core.xla_model, torch_xla.experimental.custom_kernel, torch_xla.stablehlo
        torch.ones(2, device="xla").sum().item()
        assert "torch._dynamo" not in sys.modules  # 0.7 s, and half as many objects again
        assert "jax.extend" not in sys.modules  # 0.15 s
        """
    )


def test_operators_and_errors_do_without_what_compiles_graphs(run_interpreter):
    run_interpreter(
        """
        import sys, torch
        x = torch.ones(3, 4).to("xla")
        assert torch.nn.functional.layer_norm(x, (4,)).sum().item() == 0
        assert (x.to(torch.int32) + x.to(torch.int64)).sum().item() == 24
        for refused in (lambda: x @ x, lambda: torch.bitwise_and(x, x), lambda: x[x]):
            try:
                refused()
            except (RuntimeError, IndexError):
                continue
            raise AssertionError("not refused")
        assert "torch._dynamo" not in sys.modules

        # whoever compiles afterwards meets the kernels as they always were
        import torch._dynamo
        y = torch._refs.bitwise_and(torch.tensor([3]), torch.tensor([5]))
        assert y.item() == 1
        compiled = torch.compile(lambda a: torch.nn.functional.layer_norm(a, (4,)) + 1, backend="openxla")
        assert compiled(x).sum().item() == 12
        """
    )


def test_a_fork_after_the_import_can_train(run_python):
    run_python(
        """
        import os, torch, torch_xla
        pid = os.fork()
        if pid == 0:
            x = torch.ones(2, device="xla", requires_grad=True)
            (x * 2).sum().backward()
            os._exit(0 if x.grad.tolist() == [2, 2] else 3)
        assert os.waitpid(pid, 0)[1] == 0
        """
    )


# -- a torch whose private layout is not the known one --------------------------------------------


@pytest.fixture
def unregistered(monkeypatch):
    """As before registration; nothing may reach the process's registry."""
    monkeypatch.setitem(device_guard._state, "registered", False)
    monkeypatch.setattr(device_guard, "_keep_alive", [])


def names_the_version(error):
    text = str(error)
    return (
        f"cannot attach itself to torch {torch.__version__}" in text
        and "torch 2.11 to 2.15" in text
    )


def test_a_header_without_the_methods(unregistered, monkeypatch):
    meta = 1  # never dereferenced: the header is looked at first
    monkeypatch.setattr(device_guard, "_METHODS", (*device_guard._METHODS, "noSuchMethod"))
    with pytest.raises(
        RuntimeError, match="the device guard interface lacks noSuchMethod"
    ) as caught:
        device_guard._build_guard(meta, device_guard._method_order())
    assert names_the_version(caught.value)


def test_a_missing_header(unregistered, monkeypatch):
    monkeypatch.setattr(device_guard, "_HEADER", "include/none.h")
    with pytest.raises(RuntimeError, match=r"its header include/none\.h cannot be read") as caught:
        device_guard._method_order()
    assert names_the_version(caught.value)


def test_methods_in_another_order(run_interpreter):
    """The Meta guard is asked through the table, and its answers do not fit: the process goes on."""
    output = run_interpreter(
        """
        import torch
        from xla_core.torch_bridge import device_guard
        order = device_guard._method_order()
        i, j = order.index("type"), order.index("deviceCount")
        order[i], order[j] = order[j], order[i]
        device_guard._method_order = lambda: order
        from xla_core.attach import autoload
        autoload.autoload()  # what import torch does: it must not raise
        try:
            import torch_xla
        except RuntimeError as error:
            print(error)
        x = torch.ones(2, requires_grad=True)
        (x * 2).sum().backward()
        assert x.grad.tolist() == [2, 2]
        """,
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )
    assert f"cannot attach itself to torch {torch.__version__}: its device guards answer" in output


@pytest.mark.parametrize("what", ["_REGISTER", "_REGISTRY"])
def test_a_library_without_the_registry(unregistered, monkeypatch, what):
    monkeypatch.setattr(device_guard, what, "_ZN3c104noneE")
    with pytest.raises(RuntimeError, match="does not offer the device guard registry") as caught:
        device_guard.register()
    assert names_the_version(caught.value)


def test_another_package_with_the_device(unregistered):
    with pytest.raises(
        RuntimeError, match=r"already registered the xla device.*pip uninstall torch_xla"
    ):
        device_guard.register()
