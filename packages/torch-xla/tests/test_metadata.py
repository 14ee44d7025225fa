"""What libraries ask of the distribution ``torch_xla`` before they import anything."""

from __future__ import annotations

import importlib.metadata
import importlib.util

from packaging.version import Version

import torch_xla


def test_the_version_is_that_of_the_api():
    # transformers and diffusers: importlib.metadata.version("torch_xla"); Lightning asks for 2.5
    version = importlib.metadata.version("torch_xla")
    assert version == torch_xla.__version__
    assert Version(version) >= Version("2.9.0")


def test_it_has_no_modules_of_its_own():
    files = importlib.metadata.files("torch_xla") or []
    assert not [f for f in files if f.suffix == ".py" and "editable" not in f.name]
    assert "xla_core" not in importlib.util.find_spec("torch_xla").origin


def test_it_depends_on_the_whole_set():
    required = importlib.metadata.requires("torch_xla") or []
    plain = {line.split("==")[0] for line in required if "extra" not in line}
    assert plain == {"xla-core", "xla-pjrt-cpu", "xla-dist", "xla-spmd", "xla-debug"}
    for device in ("tpu", "cuda"):
        assert any(line.startswith(f"xla-pjrt-{device}==") and device in line for line in required)
