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
from xla_core import device_plugin, plugins
from xla_core.null_device import NullClient
from xla_core.pjrt.library import LibraryPlugin
from xla_core.protocol import Topology


class Missing(DevicePlugin):
    def library_path(self):
        return "/nowhere/libmissing.so"

    def client_create_options(self):
        return {"speed": 3}


@pytest.fixture(autouse=True)
def forget(monkeypatch):
    monkeypatch.setattr(plugins, "_registered", {})
    monkeypatch.setattr(device_plugin, "_plugins", {})
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
    assert "INITECH" in plugins.installed_devices()
    assert isinstance(plugins.load_factory("INITECH"), LibraryPlugin)
    assert isinstance(default(), Missing)
    with pytest.raises(
        plugins.PluginError,
        match=r"the registered Missing could not start .*no PJRT library at .*library_path\(\)",
    ):
        plugins.start_client("INITECH", plugins.new_manager(), {})


def test_installed_plugin_is_found_by_its_entry_point(installed):
    assert "INITECH" in plugins.installed_devices()
    with pytest.raises(plugins.PluginError, match=r"initech 3\.0 .*could not start"):
        plugins.start_client("initech", plugins.new_manager(), {})
    register_installed_plugins()
    assert default().library_path() == "/nowhere/libinitech.so"


def test_installed_plugins_can_be_left_out(installed, monkeypatch):
    monkeypatch.setenv("XLA_REGISTER_INSTALLED_PLUGINS", "0")
    assert "INITECH" not in plugins.installed_devices()
    with pytest.raises(plugins.PluginError, match="no installed package offers this device"):
        plugins.load_factory("initech")


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
    plugins.register_factory("null", lambda topology, options: NullClient(num_devices=5), "a test")
    client = plugins.start_client("NULL", plugins.new_manager(), {})
    assert len(client.local_devices()) == 5


def test_create_options_reach_the_library():
    factory = device_plugin.factory("initech", Missing())
    assert factory._create_options({}) == {"speed": 3}
    with pytest.raises(RuntimeError, match="INITECH: there is no PJRT library"):
        factory(Topology(), {})


def test_names_of_the_tpu_facade_are_known():
    with pytest.raises(AttributeError, match="no attribute 'frobnicate'"):
        _ = tpu.frobnicate
