"""Finding, choosing and starting device plugins; extensions; the errors users see."""

from __future__ import annotations

import logging
import os
import sys
import textwrap
import types

import pytest

from xla_core.contract.device_protocol import (
    Capabilities,
    Outlining,
    Topology,
    capabilities_of,
)
from xla_core.plugins import discovery
from xla_core.plugins.null_device import NullClient

GOOD = """
    from xla_core.plugins.null_device import NullClient
    def create_client(topology, options):
        client = NullClient(topology, num_devices=2)
        client.device_type = "GLOBEX"
        return client
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install a distribution of one module, with real metadata, for the length of a test."""
    monkeypatch.syspath_prepend(str(tmp_path))
    modules = []

    def make(name, module, source, version="2.5", **groups):
        modules.append(module)
        (tmp_path / f"{module}.py").write_text(textwrap.dedent(source))
        info = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        lines = []
        for group, points in groups.items():
            lines.append(f"[xla_core.{group}]")
            lines += [f"{key} = {value}" for key, value in points.items()]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")

    yield make
    for module in modules:
        sys.modules.pop(module, None)


@pytest.fixture
def manager():
    return discovery.new_manager()


def globex(install, source, name="globex-xla", module="globex_xla", device="globex"):
    install(name, module, source, devices={device: f"{module}:create_client"})


def test_third_party_device_starts(install, manager):
    globex(install, GOOD)
    assert "GLOBEX" in discovery.installed_devices()
    client = discovery.start_client("GLOBEX", manager, {})
    assert client.device_type == "GLOBEX"
    assert len(client.local_devices()) == 2


def test_only_the_chosen_plugin_is_imported(install, manager):
    globex(install, GOOD)
    globex(install, "raise SystemError('must not be imported')", "other", "other_xla", "other")
    assert {"GLOBEX", "OTHER"} <= set(discovery.installed_devices())
    discovery.start_client("globex", manager, {})
    assert "other_xla" not in sys.modules


@pytest.mark.parametrize(
    ("device", "parts"),
    [
        ("WEIRD", ["PJRT_DEVICE=WEIRD", "entry point 'weird'", "'xla_core.devices'", "NULL"]),
        ("weird", ["PJRT_DEVICE=WEIRD"]),
    ],
)
def test_unknown_device(manager, device, parts):
    with pytest.raises(discovery.PluginError) as caught:
        discovery.start_client(device, manager, {})
    assert all(part in str(caught.value) for part in parts)


def test_known_device_without_its_package_names_the_package(monkeypatch):
    monkeypatch.setattr(discovery, "_entry_points", lambda group: [])
    with pytest.raises(RuntimeError, match=r"pip install xla-pjrt-tpu.*Installed devices: none"):
        discovery.load_factory("tpu")
    with pytest.raises(RuntimeError, match="pip install xla-pjrt-cpu"):
        discovery.load_factory("CPU")
    with pytest.raises(RuntimeError, match=r"PJRT_DEVICE=CUDA: .*pip install xla-pjrt-cuda"):
        discovery.load_factory("CUDA")


def test_plugin_that_raises_on_import(install):
    globex(install, "import a_library_that_is_missing")
    with pytest.raises(discovery.PluginError) as caught:
        discovery.load_factory("globex")
    for part in ("PJRT_DEVICE=GLOBEX", "globex-xla 2.5", "ModuleNotFoundError", "reinstall"):
        assert part in str(caught.value)
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


@pytest.mark.parametrize(
    "source",
    [
        "def create_client(topology, options):\n    raise AssertionError('started')\n"
        "create_client.interface_version = 7\n",
        "import types\ndef create_client(topology, options):\n"
        "    return types.SimpleNamespace(interface_version=7)\n",
    ],
    ids=["on the factory", "on the client"],
)
def test_other_interface_version(install, manager, source):
    globex(install, source)
    with pytest.raises(
        discovery.PluginError, match=r"globex-xla 2\.5 .* version 7 .* takes versions 1 to 2"
    ):
        discovery.start_client("globex", manager, {})


def test_clients_of_the_first_version_say_by_attributes_what_they_can():
    def rehearse(executable):
        return True

    outlining = Outlining(wanted=True, min_operations=5)
    old = types.SimpleNamespace(
        interface_version=1, shapes_only=True, outlining=outlining, rehearse=rehearse
    )
    assert capabilities_of(old) == Capabilities(True, outlining, rehearse)
    assert capabilities_of(types.SimpleNamespace(interface_version=1)) == Capabilities()
    new = types.SimpleNamespace(interface_version=2, capabilities=Capabilities(shapes_only=True))
    assert capabilities_of(new).shapes_only


def test_every_supported_interface_version_is_taken(install, manager):
    source = "import types\ndef create_client(topology, options):\n"
    source += "    return types.SimpleNamespace(interface_version=1)\n"
    globex(install, source)
    assert discovery.start_client("globex", manager, {}).interface_version == 1


def test_two_plugins_of_one_name(install):
    globex(install, GOOD)
    globex(install, GOOD, "globex-fork", "globex_fork")
    with pytest.raises(discovery.PluginError) as caught:
        discovery.load_factory("globex")
    assert "globex-xla 2.5" in str(caught.value) and "globex-fork 2.5" in str(caught.value)
    assert "Uninstall one" in str(caught.value)


def test_plugin_that_cannot_start(install, manager):
    globex(install, "def create_client(topology, options):\n    raise OSError('no chip on slot 3')")
    with pytest.raises(
        discovery.PluginError, match=r"globex-xla 2\.5 .*OSError: no chip on slot 3"
    ):
        discovery.start_client("globex", manager, {})


# --- which device ---


def test_named_device_wins_in_any_case(caplog):
    assert discovery.chosen_device({"PJRT_DEVICE": "null"}) == "NULL"
    assert discovery.chosen_device({"PJRT_DEVICE": "TPU"}) == "TPU"
    assert not caplog.records


@pytest.mark.parametrize("value", ["", "  "])
def test_default_is_the_cpu_with_a_warning(caplog, value):
    with caplog.at_level(logging.WARNING):
        assert discovery.chosen_device({"PJRT_DEVICE": value}) == "CPU"
    assert [r.getMessage() for r in caplog.records] == ["Defaulting to PJRT_DEVICE=CPU"]


def test_no_device_is_chosen_where_that_is_forbidden(run_python):
    with pytest.raises(discovery.NoDeviceChosenError, match=r"set PJRT_DEVICE to one of .*CPU"):
        discovery.chosen_device({"PJRT_SELECT_DEFAULT_DEVICE": "0"})
    options = {"PJRT_SELECT_DEFAULT_DEVICE": "0", "PJRT_DEVICE": "cpu"}
    assert discovery.chosen_device(options) == "CPU"
    told = run_python(
        """
        import torch, torch_xla, torch_xla.runtime as xr
        print(xr.device_type())
        try:
            torch.ones(1, device="xla")
        except RuntimeError as error:
            print("PJRT_DEVICE" in str(error))
        """,
        PJRT_DEVICE="",
        PJRT_SELECT_DEFAULT_DEVICE="0",
    )
    assert told.split() == ["None", "True"]


@pytest.mark.parametrize("chips", [True, False])
def test_default_is_a_tpu_that_is_there(install, monkeypatch, chips):
    found = discovery._entry_points
    probe = f"create_client.is_available = lambda options: {chips}\n"
    globex(install, textwrap.dedent(GOOD) + probe, "some-tpu", "some_tpu", "tpu")
    # leave out a TPU plugin that is installed for real
    monkeypatch.setattr(
        discovery,
        "_entry_points",
        lambda group: [p for p in found(group) if p.value.startswith("some_tpu")],
    )
    assert discovery.chosen_device({}) == ("TPU" if chips else "CPU")


def test_choosing_leaves_the_environment_alone(monkeypatch):
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    before = dict(os.environ)
    discovery.chosen_device()
    assert dict(os.environ) == before


# --- extensions ---


def test_extension_gives_the_topology_and_sees_the_client(install):
    install(
        "globex-dist",
        "globex_dist",
        """
        from xla_core.contract.hookspecs import hookimpl
        from xla_core.contract.device_protocol import Topology
        started = []
        @hookimpl
        def xla_core_topology(device_type, options):
            if device_type == "NULL":
                return Topology(process_index=1, process_count=3)
        @hookimpl
        def xla_core_client_started(client):
            started.append(client)
        @hookimpl
        def xla_core_cache_key_entries():
            return {"globex-dist": b"2.5"}
        """,
        extensions={"dist": "globex_dist"},
    )
    manager = discovery.load_extensions()
    client = discovery.start_client("NULL", manager, {})
    assert [d.process_index for d in client.devices()] == [0, 1, 2]
    assert [d.id for d in client.local_devices()] == [1]
    assert sys.modules["globex_dist"].started == [client]
    assert {"globex-dist": b"2.5"} in manager.hook.xla_core_cache_key_entries()


def test_without_extension_a_process_is_alone(manager):
    client = discovery.start_client("NULL", manager, {})
    assert isinstance(client, NullClient)
    assert len(client.devices()) == len(client.local_devices()) == 1


def test_misspelt_hook_is_named_with_its_package_and_the_likely_one(install):
    install(
        "globex-dist",
        "globex_dist",
        """
        from xla_core.contract.hookspecs import hookimpl
        @hookimpl
        def xla_core_topolgy(device_type, options):
            return None
        """,
        extensions={"dist": "globex_dist"},
    )
    with pytest.raises(RuntimeError) as caught:
        discovery.load_extensions()
    for part in ("globex-dist 2.5", "'xla_core_topolgy'", "did you mean 'xla_core_topology'"):
        assert part in str(caught.value)


def test_hook_with_a_wrong_argument(manager):
    class Extension:
        @discovery.hookspecs.hookimpl
        def xla_core_topology(self, device_kind):
            return Topology()

    with pytest.raises(
        discovery.PluginError, match=r"globex 1 has a hook that does not fit.*device_kind"
    ):
        discovery.register(manager, Extension(), "globex 1")


def test_extension_that_raises_on_import(install):
    install("globex-dist", "globex_dist", "1 / 0", extensions={"dist": "globex_dist"})
    with pytest.raises(discovery.PluginError, match=r"globex-dist 2\.5 .*ZeroDivisionError"):
        discovery.load_extensions()


def test_partitioning_takes_the_first_answer(manager):
    class Silent:
        @discovery.hookspecs.hookimpl
        def xla_core_partition_program(self, program):
            return None

    class Speaking:
        @discovery.hookspecs.hookimpl
        def xla_core_partition_program(self, program):
            return program * 2

    discovery.register(manager, Speaking(), "speaking")
    discovery.register(manager, Silent(), "silent")
    assert manager.hook.xla_core_partition_program(program=21) == 42
