"""AWS Neuron's environment and the plugins of vendors that name a library by a package."""

from __future__ import annotations

import os

import pytest

from torch_xla._internal import neuron, neuron_utils, xpu
from torch_xla.experimental.plugins import DevicePlugin


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch):
    for name in [n for n in os.environ if n.startswith("NEURON")]:
        monkeypatch.delenv(name)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "XPU_LIBRARY_PATH"):
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    yield monkeypatch
    for name in set(os.environ) - set(before):
        del os.environ[name]


def test_ranges_of_cores():
    assert neuron_utils.convert_range("0-3,8") == [0, 1, 2, 3, 8]
    assert neuron_utils.convert_range("5") == [5]
    with pytest.raises(ValueError, match="core numbers"):
        neuron_utils.convert_range("two")


def test_each_process_gets_its_core(nothing_set):
    assert neuron.get_visible_cores_list() is None
    assert neuron.num_local_processes() == 1
    nothing_set.setenv("NEURON_RT_VISIBLE_CORES", "4-7")
    assert neuron.num_local_processes() == 4
    with pytest.raises(ValueError, match="finds 4 visible cores"):
        neuron.remap_visible_cores(0, 2)
    neuron.initialize_env(2, 4)
    assert neuron.get_visible_cores_list() == [6]
    assert os.environ["NEURON_RT_ROOT_COMM_ID"] == "localhost:62182"


def test_the_job_that_torchrun_names(nothing_set):
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "fe80::1"}.items():
        nothing_set.setenv(name, value)
    neuron.configure_pjrt_environment()
    assert os.environ["NEURON_PJRT_PROCESS_INDEX"] == "3"
    assert os.environ["NEURON_PJRT_PROCESSES_NUM_DEVICES"] == "1,1,1,1"
    assert os.environ["NEURON_RT_ROOT_COMM_ID"] == "[fe80::1]:62182"
    assert neuron.get_master_worker_ip() == "fe80::1"


@pytest.mark.parametrize(
    ("plugin", "variable", "package"),
    [
        (neuron.NeuronPlugin, "NEURON_LIBRARY_PATH", "libneuronxla"),
        (xpu.XpuPlugin, "XPU_LIBRARY_PATH", "intel-extension-for-openxla"),
    ],
)
def test_libraries(plugin, variable, package, nothing_set):
    assert isinstance(plugin(), DevicePlugin)
    with pytest.raises(RuntimeError, match=package):
        plugin().library_path()
    nothing_set.setenv(variable, "/opt/pjrt.so")
    assert plugin().library_path() == "/opt/pjrt.so"
