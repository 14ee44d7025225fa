"""What users install: the wheels of all packages, one version, and what a bad plugin beside them says."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = (ROOT / "docs" / "plugins.md").read_text()
ERRORS = re.findall(r"^```text\n(.*?)\n```$", DOCUMENT, re.M | re.S)
FOLDERS = [*sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml")),
           ROOT / "examples" / "acme"]  # fmt: skip
NAMES = {
    tomllib.loads((folder / "pyproject.toml").read_text())["project"]["name"]: folder
    for folder in FOLDERS
}


@pytest.fixture(params=NAMES)
def distribution(request):
    """Each installed distribution and its folder here."""
    found = metadata.distribution(request.param)
    origin = json.loads(found.read_text("direct_url.json") or "{}")
    if not origin.get("url", "").endswith(".whl"):
        pytest.skip("not installed from a wheel: tox builds the wheels and installs them")
    return found, NAMES[request.param]


def test_the_wheel_has_every_module_and_nothing_else(distribution):
    found, folder = distribution
    source = folder / "src"
    modules = {path.relative_to(source).as_posix() for path in source.rglob("*.py")}
    others = [path for pattern in ("py.typed", "*.html") for path in source.rglob(pattern)]
    data = {path.relative_to(source).as_posix() for path in others}
    files = [f.as_posix() for f in found.files or ()]
    # commands lie outside of the packages' folder
    installed = {
        f
        for f in files
        if ".dist-info/" not in f and "__pycache__" not in f and not f.startswith("../")
    }
    assert installed == modules | data
    assert found.metadata["Requires-Python"] == ">=3.11"
    assert found.metadata["License-Expression"] == "Apache-2.0"
    assert found.metadata.get_all("License-File") == ["LICENSE"]


def test_versions_are_in_lock_step():
    """Packages of one release require exactly each other, with what they say of themselves."""
    for name, folder in NAMES.items():
        found = metadata.distribution(name)
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        assert found.version == project["version"]
        for path in (folder / "src").glob("*/*.py"):
            said = re.findall(
                r'^ *(?:__version__|VERSION|version)\b.*= "(\d.*)"$', path.read_text(), re.M
            )
            assert set(said) <= {found.version, metadata.version("torch-xla")}, path
        for text in found.requires or ():
            requirement = Requirement(text)
            sibling = NAMES.get(requirement.name)
            # a package's own extras name it again; its tests take the siblings beside it
            tests = requirement.marker is not None and "test" in str(requirement.marker)
            if sibling is not None and requirement.name != name and not tests:
                wanted = metadata.version(requirement.name)
                assert str(requirement.specifier) == f"=={wanted}", (name, text)


def test_the_set_up_of_contributors_names_packages_before_those_that_need_them():
    """pip 23.2 (of Python 3.11's venv) otherwise looks for the needed package on an index.

    It knows ``-e ./packages/xla-spmd[test]`` as ``xla-spmd`` only after it has resolved that requirement.
    """
    command = next(
        line
        for line in (ROOT / "CONTRIBUTING.md").read_text().splitlines()
        if "-m venv" in line and " -e " in line
    )
    set_up = [
        ((ROOT / folder).resolve(), set(filter(None, extras.split(","))))
        for folder, extras in re.findall(r"-e (\./[\w/-]+)(?:\[([\w,]+)\])?", command)
    ]
    assert {folder for folder, _ in set_up} == set(NAMES.values())
    names = {folder: name for name, folder in NAMES.items()}
    ready = {names[folder] for folder, extras in set_up if not extras}  # known from the start
    for folder, extras in set_up:
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        optional = project.get("optional-dependencies", {})
        # an extra that is not declared is no error: pip warns and goes on
        texts = [
            *project.get("dependencies", ()),
            *(t for e in extras for t in optional.get(e, ())),
        ]
        needed = {Requirement(text).name for text in texts} & NAMES.keys()
        ready.add(names[folder])
        assert needed <= ready, f"{names[folder]} needs {needed - ready}, named later"


def test_every_device_is_found_by_its_entry_point():
    points = metadata.entry_points(group="xla_core.devices")
    found = {point.name: point.dist.name for point in points}
    assert found == {
        "acme": "xla-pjrt-acme", "cpu": "xla-pjrt-cpu", "cuda": "xla-pjrt-cuda",
        "null": "xla-core", "tpu": "xla-pjrt-tpu",
    }  # fmt: skip


def installed_beside(folder, module, source, *, name=None, version=None):
    """Put a module, and if it has a name of its own its distribution, on a path."""
    folder.mkdir(exist_ok=True)
    (folder / f"{module}.py").write_text(source)
    if name is not None:
        info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(
            f"[xla_core.devices]\nacme = {module}:create_client\n"
        )
    return folder


def user_reads(folder):
    """The last line of what a script prints that uses ``PJRT_DEVICE=ACME``."""
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", "import torch, torch_xla; torch.ones(2, device='xla')"],
        env=os.environ | {"PJRT_DEVICE": "ACME", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1
    return done.stderr.strip().splitlines()[-1]


def test_the_bill_of_materials_names_every_wheel(tmp_path):
    for name in NAMES:
        installed = metadata.distribution(name)
        stem = f"{name.replace('-', '_')}-{installed.version}"
        with zipfile.ZipFile(tmp_path / f"{stem}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{stem}.dist-info/METADATA", installed.read_text("METADATA"))
    tool = [sys.executable, "-W", "error", ROOT / "tools" / "sbom.py", "--dist", tmp_path]
    subprocess.run(tool, check=True, timeout=300)
    bill = json.loads((tmp_path / "sbom.cdx.json").read_text())
    components = {each["name"]: each for each in bill["components"]}
    for name in NAMES:
        component = components.pop(name)
        installed = metadata.distribution(name)
        (wheel,) = tmp_path.glob(f"{name.replace('-', '_')}-*.whl")
        assert component["version"] == installed.version
        assert component["licenses"] == [{"license": {"id": "Apache-2.0"}}]
        assert [each["content"] for each in component["hashes"]] == [
            hashlib.sha256(wheel.read_bytes()).hexdigest()
        ]
        requires = [each["value"] for each in component.get("properties", ())]
        assert sorted(requires) == sorted(installed.requires or ())
    # what a plain installation brings from elsewhere, in versions that pip chooses
    assert {"torch", "jax", "jaxlib", "numpy", "pluggy"} <= components.keys()
    assert "pytest" not in components
    assert not any("version" in component for component in components.values())
    edges = {each["ref"]: each.get("dependsOn", []) for each in bill["dependencies"]}
    assert "xla-core" in edges["xla-pjrt-cpu"]
    assert "jax" in edges["xla-core"]


GOOD = "def create_client(topology, options):\n    raise AssertionError('not to be started')\n"
PREFIX = "xla_core.plugins.discovery.PluginError: "


def test_a_second_plugin_of_one_name(tmp_path):
    fork = installed_beside(
        tmp_path / "fork", "acme_fork", GOOD, name="acme-fork", version="3.0"
    )  # fmt: skip
    read = user_reads(fork).removeprefix(PREFIX)
    # which of the two is named first is the order of the path
    both = re.fullmatch(r"(.*?: )(.*) and (.*)( both offer.*)", read)
    assert both is not None, read
    start, one, other, end = both.groups()
    assert {read, f"{start}{other} and {one}{end}"} & set(ERRORS)


def test_a_plugin_that_raises_on_load(tmp_path):
    broken = installed_beside(tmp_path, "xla_pjrt_acme", "import acme_driver\n")
    assert user_reads(broken).removeprefix(PREFIX) in ERRORS


def test_a_plugin_of_another_interface(tmp_path):
    source = GOOD + "create_client.interface_version = 7\n"
    older = installed_beside(tmp_path, "xla_pjrt_acme", source)
    assert user_reads(older).removeprefix(PREFIX) in ERRORS


KERNELS = """
import torch
from xla_core.contract.hookspecs import hookimpl

_library = torch.library.Library("acme_kernels", "DEF")
_library.define("twice(Tensor self) -> Tensor")
torch.library.register_fake("acme_kernels::twice", torch.empty_like, lib=_library)


@hookimpl
def xla_core_register_operators(registry):
    registry.rule(torch.ops.acme_kernels.twice.default)(lambda a: a + a)


@hookimpl
def xla_core_cache_key_entries():
    return {"acme-kernels": b"2.1"}
"""
USES_KERNELS = """
import os
import torch, torch_xla
from xla_core.extension_api import programs

x = torch.arange(3.0).to("xla")
print(torch.ops.acme_kernels.twice(x).tolist(), programs.fallback_counts())
(entry,) = programs.cache_entries(os.environ["XLA_PERSISTENT_CACHE_PATH"])
print(entry.key["extension:acme-kernels"])
"""


def test_operators_and_cache_keys_of_a_third_party(tmp_path):
    """An installed extension gives an operator of its own a rule, and its version to the cache's keys."""
    folder = tmp_path / "site"
    installed_beside(folder, "acme_kernels", KERNELS, name="acme-kernels", version="2.1")
    (folder / "acme_kernels-2.1.dist-info" / "entry_points.txt").write_text(
        "[xla_core.extensions]\nkernels = acme_kernels\n"
    )
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", USES_KERNELS],
        env=os.environ | {
            "PJRT_DEVICE": "ACME", "PYTHONPATH": path,
            "XLA_PERSISTENT_CACHE_PATH": str(tmp_path / "cache"),
        },
        capture_output=True,
        text=True,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[0.0, 2.0, 4.0] {}", "b'2.1'"]
