"""What a machine lacks for a GPU is named, with the next step; nothing here needs a GPU or the plugin."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest

from xla_core.contract.device_protocol import Topology
from xla_core.pjrt.gpu_runtime import JAXLIB_VERSION
from xla_pjrt_cuda import create_client, installation


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """``installed(cuda, version)``: an installation of jax's plugin, which fails when it is imported."""
    others = [folder for folder in sys.path if not (Path(folder) / "jax_plugins").is_dir()]
    monkeypatch.setattr(sys, "path", [str(tmp_path), *others])
    former = _forget_plugins()
    real = importlib.metadata.version
    versions: dict[str, str] = {}

    def version(package):
        if package.startswith("jax-cuda"):
            if package not in versions:
                raise importlib.metadata.PackageNotFoundError(package)
            return versions[package]
        return real(package)

    monkeypatch.setattr(importlib.metadata, "version", version)

    def install(cuda=13, release=JAXLIB_VERSION, packages=("pjrt", "plugin")):
        folder = tmp_path / "jax_plugins" / f"xla_cuda{cuda}"
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("raise AssertionError('imported')")
        (folder / "xla_cuda_plugin.so").touch()
        versions.update({f"jax-cuda{cuda}-{part}": release for part in packages})
        return folder / "xla_cuda_plugin.so"

    yield install
    _forget_plugins()
    sys.modules.update(former)


def _forget_plugins():
    found = [name for name in sys.modules if name.split(".")[0] == "jax_plugins"]
    return {name: sys.modules.pop(name) for name in found}


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """``driver(version)``: NVIDIA's driver as it shows itself; none until it is called."""
    node, text = tmp_path / "nvidiactl", tmp_path / "version"
    monkeypatch.setattr(installation, "_NODES", (node,))
    monkeypatch.setattr(installation, "_DRIVER_VERSION", text)

    def load(version):
        node.touch()
        text.write_text(
            f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {version}  Release Build\n"
            "GCC version:  gcc version 12.2.0\n"
        )

    return load


def start():
    return create_client(Topology(), {})


def test_without_the_plugin_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(installation, "find_plugin", lambda: None)
    assert not create_client.is_available({})
    with pytest.raises(RuntimeError, match=r"not installed\. Run: pip install .*\[cuda13\].*580"):
        start()


def test_the_library_is_that_of_the_newer_cuda_and_nothing_is_imported(installed):
    installed(12)
    newer = installed(13)
    found = installation.find_plugin()
    assert (found.cuda, found.library) == (13, newer)
    assert (found.module, found.kernels) == ("xla_cuda13", "jax_cuda13_plugin")


def test_a_plugin_of_another_version_than_jaxlib(installed):
    installed(12, "0.9.1")
    wanted = rf"jax-cuda12-pjrt is 0\.9\.1, but jaxlib is {JAXLIB_VERSION}.*jax\[cuda12\]=={JAXLIB_VERSION}"
    with pytest.raises(RuntimeError, match=wanted):
        start()


def test_a_plugin_without_its_kernels(installed):
    installed(13, packages=("pjrt",))
    with pytest.raises(RuntimeError, match=r"jax-cuda13-plugin, which contains kernels .* is not"):
        start()


def test_no_driver(installed, driver):
    installed(13)
    with pytest.raises(
        RuntimeError, match=r"driver is not installed: there is no .*nvidiactl.*XLA_AOT_TOPOL"
    ):
        start()
    assert not create_client.is_available({})
    assert create_client.is_available({"XLA_AOT_TOPOLOGY": "h100:1"})


@pytest.mark.parametrize(
    ("cuda", "version", "said"),
    [
        (
            13,
            "570.86.15",
            r"driver is 570\.86\.15, and CUDA 13 needs 580 .*xla-pjrt-cuda\[cuda12\]",
        ),
        (12, "470.1", r"driver is 470\.1, and CUDA 12 needs 525 or newer\. Update the driver$"),
    ],
)
def test_a_driver_that_is_too_old(installed, driver, cuda, version, said):
    installed(cuda)
    driver(version)
    assert create_client.is_available({})
    with pytest.raises(RuntimeError, match=said):
        start()


def test_a_driver_that_is_new_enough(driver):
    driver("580.65.06")
    installation.check_driver(13)
    installation.check_driver(12)
    assert installation.driver_version() == "580.65.06"


def test_libraries_that_are_missing_are_named(installed, driver, monkeypatch):
    """Where the driver is there, and NVIDIA's libraries are not: what jax only writes to the log."""
    library = installed(13)
    driver("580.65.06")
    library.with_name("__init__.py").write_text(
        "cuda_versions = object()\n"
        "def _load_nvidia_libraries(): pass\n"
        "def _import_extensions(): pass\n"
        "def _check_cuda_versions(raise_on_first_error):\n"
        "    raise RuntimeError('Unable to load cuDNN. Is it installed?')\n"
    )
    monkeypatch.setattr("xla_pjrt_cuda.client.gpu_runtime.library_loaded", lambda name: False)
    with pytest.raises(
        RuntimeError, match=r"libraries do not fit .*cuDNN.*pip install 'jax\[cuda13\]=="
    ):
        start()


def test_gpus_of_a_process_and_of_those_that_a_launcher_starts(monkeypatch):
    monkeypatch.setattr(Path, "glob", lambda *_: [Path(f"/dev/nvidia{n}") for n in (10, 0, 2)])
    assert installation.visible_gpus({}) == ["0", "2", "10"]
    named = {"CUDA_VISIBLE_DEVICES": "1, GPU-8f"}
    assert create_client.launch_environments(named) == [
        {"CUDA_VISIBLE_DEVICES": "1"},
        {"CUDA_VISIBLE_DEVICES": "GPU-8f"},
    ]
    assert create_client.launch_environments({"CUDA_VISIBLE_DEVICES": ""}) == [{}]
