"""``PJRT_DEVICE=CUDA`` through jax's CUDA plugin, as far as no GPU is needed: see test_cuda_on_gpu.py."""

from __future__ import annotations

import sys

import pytest

from xla_core.pjrt import cuda
from xla_core.plugins import discovery


def test_plugin_is_installed_with_the_core_and_is_found_by_name():
    assert "CUDA" in discovery.installed_devices()
    assert discovery.load_factory("CUDA") is cuda.create_client


@pytest.mark.skipif(
    cuda.plugin_library({}) is not None, reason="jax's CUDA plugin is installed: nothing is missing"
)
def test_without_the_runtime_it_says_what_to_install():
    assert not cuda.create_client.is_available({})
    with pytest.raises(discovery.PluginError) as caught:
        discovery.start_client("CUDA", discovery.new_manager(), {})
    text = str(caught.value)
    assert text.startswith("PJRT_DEVICE=CUDA: xla-core ")
    assert "jax's CUDA plugin is not installed" in text and 'pip install "jax[cuda12]==' in text


def test_the_library_is_that_of_an_installed_plugin(tmp_path, monkeypatch):
    """The newer CUDA is chosen; nothing is imported for it."""
    for name in ("xla_cuda12", "xla_cuda13"):
        folder = tmp_path / "jax_plugins" / name
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("raise AssertionError('imported')")
        (folder / "xla_cuda_plugin.so").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [n for n in sys.modules if n.split(".")[0] == "jax_plugins"]:
        monkeypatch.delitem(sys.modules, name)
    found = cuda.plugin_library({})
    assert found == tmp_path / "jax_plugins" / "xla_cuda13" / "xla_cuda_plugin.so"
