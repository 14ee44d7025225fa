"""docs/plugins.md: each error it shows is raised, word for word; its code is what the packages have."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

from xla_core.contract.device_protocol import INTERFACE_VERSION, OLDEST_INTERFACE_VERSION
from xla_core.extension_api import plugins

DOCUMENT = (Path(__file__).resolve().parents[1] / "docs" / "plugins.md").read_text()
ERRORS = re.findall(r"^```text\n(.*?)\n```$", DOCUMENT, re.M | re.S)

GOOD = "def create_client(topology, options):\n    raise AssertionError('not to be started')\n"
LIBRARY = """
from xla_core.pjrt.library import LibraryPlugin
create_client = LibraryPlugin(
    "ACME", path="/opt/acme/libacme.so", path_variable="ACME_LIBRARY_PATH", plugin="xla-pjrt-acme"
)
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """An environment whose only other devices are CPU and NULL."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "xla_pjrt_acme", raising=False)  # the example's own
    before = set(sys.modules)
    points = [
        metadata.EntryPoint(name, "xla_core.plugins.null_device:create_client", "xla_core.devices")
        for name in ("cpu", "null")
    ]

    def install(name, version, module, source):
        (tmp_path / f"{module}.py").write_text(source)
        info = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        entry = f"[xla_core.devices]\nacme = {module}:create_client\n"
        (info / "entry_points.txt").write_text(entry)
        (point,) = metadata.PathDistribution(info).entry_points
        points.append(point)

    monkeypatch.setattr(metadata, "entry_points", lambda: metadata.EntryPoints(points))
    yield install
    for added in set(sys.modules) - before:
        if added.startswith(("acme", "xla_pjrt_acme")):
            del sys.modules[added]


def message():
    with pytest.raises(plugins.PluginError) as caught:
        plugins.start_client("acme", plugins.new_manager(), {})
    return str(caught.value)


def acme(install, source):
    install("xla-pjrt-acme", "1.0.0", "xla_pjrt_acme", source)


def test_the_document_shows_five_errors():
    assert len(ERRORS) == len(set(ERRORS)) == 5


def test_nobody_offers_the_device(installed):
    assert message() in ERRORS


def test_two_plugins_of_one_name(installed):
    acme(installed, GOOD)
    installed("acme-fork", "3.0", "acme_fork", GOOD)
    assert message() in ERRORS


def test_plugin_that_raises_on_load(installed):
    acme(installed, "import acme_driver\n")
    assert message() in ERRORS


def test_interface_version_mismatch(installed):
    assert (OLDEST_INTERFACE_VERSION, INTERFACE_VERSION) == (1, 2)
    acme(installed, GOOD + "create_client.interface_version = 7\n")
    assert message() in ERRORS


def test_missing_library(installed):
    acme(installed, LIBRARY)
    assert message() in ERRORS


def test_the_documents_operator_computes_what_it_says(tmp_path):
    (source,) = (
        b for b in re.findall(r"^```python\n(.*?)^```$", DOCUMENT, re.M | re.S) if "swish" in b
    )
    path = tmp_path / "acme_operators.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("acme_operators", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.xla_core_register_operators()
    x = torch.linspace(-3, 3, 7)
    on_device = torch.ops.acme.swish(x.to("xla"), 2.0)
    torch.testing.assert_close(on_device.cpu(), x * torch.sigmoid(2.0 * x))


def test_the_documents_code_is_python_and_its_names_exist():
    blocks = re.findall(r"^```python\n(.*?)^```$", DOCUMENT, re.M | re.S)
    assert len(blocks) == 5
    for block in blocks:
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module.startswith(
                ("xla_core", "torch_xla")
            ):
                module = __import__(node.module, fromlist=[a.name for a in node.names])
                assert all(hasattr(module, alias.name) for alias in node.names), node.module
