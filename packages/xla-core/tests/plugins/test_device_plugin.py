"""torch_xla's kind of device plugin, and devices registered in code."""

from __future__ import annotations

import sys

import pytest

from torch_xla._internal import tpu
from torch_xla.experimental.plugins import (
    DevicePlugin,
    default,
    register_installed_plugins,
    register_plugin,
    using_dynamic_plugins,
)
from xla_core.contract.device_protocol import Topology
from xla_core.pjrt.library import LibraryPlugin
from xla_core.plugins import discovery, torch_xla_plugins
from xla_core.plugins.null_device import NullClient


class Missing(DevicePlugin):
    def library_path(self):
        return "/nowhere/libmissing.so"

    def client_create_options(self):
        return {"speed": 3}


@pytest.fixture(autouse=True)
def forget(monkeypatch):
    monkeypatch.setattr(discovery, "_registered", {})
    monkeypatch.setattr(torch_xla_plugins, "_plugins", {})
    monkeypatch.setenv("PJRT_DEVICE", "INITECH")


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A distribution with an entry point in torch_xla's group."""
    (tmp_path / "initech_plugin.py").write_text(
        "from torch_xla.experimental.plugins import DevicePlugin\n"
        "class InitechPlugin(DevicePlugin):\n"
        "    def library_path(self):\n"
        "        return '/nowhere/libinitech.so'\n"
    )
    info = tmp_path / "initech-3.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: initech\nVersion: 3.0\n")
    entry = "[torch_xla.plugins]\ninitech = initech_plugin:InitechPlugin\n"
    (info / "entry_points.txt").write_text(entry)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("initech_plugin", None)


def test_registered_plugin_is_found_and_its_library_is_looked_for():
    register_plugin("initech", Missing())
    assert "INITECH" in discovery.installed_devices()
    assert isinstance(discovery.load_factory("INITECH"), LibraryPlugin)
    assert isinstance(default(), Missing)
    with pytest.raises(
        discovery.PluginError,
        match=r"the registered Missing could not start .*no PJRT library at .*library_path\(\)",
    ):
        discovery.start_client("INITECH", discovery.new_manager(), {})


def test_installed_plugin_is_found_by_its_entry_point(installed):
    assert "INITECH" in discovery.installed_devices()
    with pytest.raises(discovery.PluginError, match=r"initech 3\.0 .*could not start"):
        discovery.start_client("initech", discovery.new_manager(), {})
    register_installed_plugins()
    assert default().library_path() == "/nowhere/libinitech.so"


def test_installed_plugins_can_be_left_out(installed, monkeypatch):
    monkeypatch.setenv("XLA_REGISTER_INSTALLED_PLUGINS", "0")
    assert "INITECH" not in discovery.installed_devices()
    with pytest.raises(discovery.PluginError, match="no installed package offers this device"):
        discovery.load_factory("initech")


def test_defaults_of_a_plugin():
    plugin = DevicePlugin()
    assert plugin.client_create_options() == {}
    assert (plugin.host_index(), plugin.physical_chip_count()) == (0, 1)
    assert plugin.requires_xla_coordinator() is False
    plugin.configure_single_process()
    with pytest.raises(NotImplementedError, match="override configure_multiprocess"):
        plugin.configure_multiprocess(1, 2)
    with pytest.raises(NotImplementedError, match=r"must define library_path\(\)"):
        plugin.library_path()
    assert using_dynamic_plugins() is True


def test_default_says_what_is_registered(monkeypatch):
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    with pytest.raises(RuntimeError, match=r"CPU is not described by a DevicePlugin"):
        default()


def test_a_factory_in_code_comes_first():
    discovery.register_factory(
        "null", lambda topology, options: NullClient(num_devices=5), "a test"
    )
    client = discovery.start_client("NULL", discovery.new_manager(), {})
    assert len(client.local_devices()) == 5


def test_create_options_reach_the_library():
    factory = torch_xla_plugins.factory("initech", Missing())
    assert factory._create_options({}) == {"speed": 3}
    with pytest.raises(RuntimeError, match="INITECH: there is no PJRT library"):
        factory(Topology(), {})


def test_names_of_the_tpu_facade_are_known():
    with pytest.raises(AttributeError, match="no attribute 'frobnicate'"):
        _ = tpu.frobnicate
