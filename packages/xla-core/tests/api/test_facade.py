"""Names of torch_xla that scripts and libraries import besides the main modules."""

from __future__ import annotations

import os
import re
import threading

import numpy as np
import pytest
import torch

import torch_xla
import torch_xla.core.xla_env_vars as xenv
import torch_xla.utils.utils as xu
from torch_xla import _XLAC
from torch_xla._internal import jax_workarounds
from torch_xla.experimental import callback
from torch_xla.utils import dlpack


def test_fake_data():
    loader = xu.SampleGenerator(data=(torch.zeros(2), torch.ones(2)), sample_count=3)
    assert len(loader) == 3
    for _ in range(2):  # epochs
        assert [int(b.sum()) for _, b in loader] == [2, 2, 2]
    pairs = xu.FnDataGenerator(lambda t: t.sum(), 4, torch.ones, dims=[2], count=2)
    assert [(tuple(x.shape), y.item()) for x, y in pairs] == [((4, 2), 8.0)] * 2
    assert len(list(pairs)) == len(pairs) == 2
    with pytest.raises(NotImplementedError, match="DataWrapper has to define get_tensors"):
        xu.DataWrapper().get_tensors()


def test_containers_are_searched_and_rewritten():
    data = {"a": [1, (2, "x")], "b": 3}
    found = []
    xu.for_each_instance(data, lambda v: isinstance(v, int), found.append)
    assert found == [1, 2, 3]
    changed = xu.for_each_instance_rewrite(data, lambda v: isinstance(v, int), lambda v: -v)
    assert changed == {"a": [-1, (-2, "x")], "b": -3} and data["b"] == 3
    assert xu.as_list(1) == [1] and xu.as_list((1, 2)) == (1, 2)


def test_the_environment_is_read_as_a_type(monkeypatch):
    monkeypatch.setenv("AN_OWN_NUMBER", "12")
    assert xu.getenv_as("AN_OWN_NUMBER", int) == 12
    assert xu.getenv_as("AN_OWN_NAME", int, 7) == 7
    for text, value in (("1", True), ("0", False), ("false", False)):
        monkeypatch.setenv("AN_OWN_FLAG", text)
        assert xu.getenv_as("AN_OWN_FLAG", bool) is value
        assert xu.check_env_flag("AN_OWN_FLAG") is value
    assert xu.check_env_flag("AN_OWN_NAME", "yes") and not xu.check_env_flag("AN_OWN_NAME")
    assert xenv.PJRT_DEVICE == "PJRT_DEVICE"


def test_times_are_told(capsys):
    lines = []
    assert xu.timed(lambda: 5, "took ", lines.append) == 5
    assert re.fullmatch(r"took \d+\.\d{3}ms", lines[0])
    with xu.TimedScope("scope "):
        xu.eprint("inside")
    assert capsys.readouterr().err.startswith("inside\nscope ")


def test_folders_ports_threads_and_lazy_properties():
    with xu.TmpFolder() as folder:
        assert os.path.isdir(folder)  # noqa: PTH112 - the text is what the folder's users get
    assert not os.path.exists(folder)  # noqa: PTH110
    ports = xu.get_free_tcp_ports(3)
    assert len(set(ports)) == 3
    assert xu.parallel_work(2, lambda a, b: a * b, [1, 2, 3], [4, 5, 6]) == [4, 10, 18]

    class Counted:
        made = 0

        def _make(self):
            self.made += 1
            return self.made

        value = xu.LazyProperty(_make)

    counted = Counted()
    assert counted.value == counted.value == 1
    assert isinstance(Counted.value, xu.LazyProperty)


def test_dlpack_carries_values_both_ways():
    t = torch.arange(6.0, device="xla").reshape(2, 3) * 2
    capsule = dlpack.to_dlpack(t)
    host = torch.utils.dlpack.from_dlpack(capsule)
    host.zero_()  # a copy: the device's value stays
    assert t.tolist() == [[0, 2, 4], [6, 8, 10]]
    for source in (
        np.ones(3, np.float32),
        torch.ones(3),
        torch.utils.dlpack.to_dlpack(torch.ones(3)),
    ):
        back = dlpack.from_dlpack(source)
        assert back.device.type == "xla" and back.tolist() == [1, 1, 1]
    with pytest.raises(TypeError, match=r"takes a tensor on an xla device, got cpu"):
        dlpack.to_dlpack(torch.ones(2))


def test_a_callback_runs_when_the_value_is_there():
    t = torch.ones(4, device="xla") * 3
    told, given = threading.Event(), []
    callback.on_ready_callback(t, lambda tensor: (given.append(tensor), told.set()))
    assert told.wait(30) and given[0] is t
    assert callback.on_ready_event(torch.empty(2, device="xla")).wait(30)
    assert t.tolist() == [3.0] * 4
    with pytest.raises(TypeError, match="on cpu"):
        callback.on_ready_event(torch.ones(1))


def test_jax_is_handed_out_after_the_client_runs(monkeypatch):
    name = "SKIP_MEGASCALE_PJRT_CLIENT"
    monkeypatch.delenv(name, raising=False)
    jax = jax_workarounds.maybe_get_jax()
    assert jax.__name__ == "jax" and _XLAC._xla_runtime_is_initialized()

    @jax_workarounds.requires_jax
    def seen():
        return os.environ.get(name)

    assert seen() == "true" and name not in os.environ
    monkeypatch.setenv(name, "1")
    with jax_workarounds.jax_env_context():
        assert os.environ[name] == "true"
    assert os.environ[name] == "1"
    first, second = jax_workarounds.jax_env_context(), jax_workarounds.jax_env_context()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)  # as when two threads use jax at once
    assert os.environ[name] == "true"
    second.__exit__(None, None, None)
    assert os.environ[name] == "1"


def test_names_of_the_c_module():
    t = torch.ones(3, device="xla") + 1
    done = torch.ones(3).to("xla")
    assert _XLAC._check_tensor_need_materialization([t, done, torch.ones(1)]) == [
        True,
        False,
        False,
    ]
    _XLAC._xla_sync_multi([t], [], wait=True)
    assert _XLAC._check_tensor_need_materialization([t]) == [False]
    u = t + 1
    _XLAC._xla_step_marker("xla:0", [], wait=True)
    assert _XLAC._check_tensor_need_materialization([u]) == [False]
    assert _XLAC._xla_get_devices() == torch_xla.real_devices() == ["CPU:0"]
    assert _XLAC._xla_get_default_device() == "xla:0"
    assert (
        _XLAC._xla_real_devices() == torch_xla.real_devices() == _XLAC._xla_real_devices(["xla:0"])
    )
    assert _XLAC._xla_computation_cache_is_initialized()
    assert _XLAC._xla_device_kind("xla:0")
    assert _XLAC._xla_get_tensor_id(t) == _XLAC._xla_get_tensor_id(t.detach())
    with pytest.raises(RuntimeError, match=r"not an XLA tensor: torch\.FloatTensor"):
        _XLAC._xla_get_tensor_id(torch.ones(1))
    with pytest.raises(RuntimeError, match=r"not an XLA tensor: torch\.FloatTensor"):
        _XLAC._xla_sync_multi([torch.ones(1)])
