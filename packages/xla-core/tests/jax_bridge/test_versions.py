"""What is said where jax or jaxlib is of a version that is not known."""

from __future__ import annotations

import jax
import jaxlib
import pytest

from xla_core.jax_bridge import jax_versions


@pytest.mark.parametrize("version", ["0.10.2", "0.10.2.dev3", "0.11.0", "0.12.0.1", "0.12.9"])
def test_versions_that_are_known(version, monkeypatch):
    monkeypatch.setattr(jax.version, "__version__", version)
    monkeypatch.setattr(jaxlib.version, "__version__", version)
    jax_versions.check()


@pytest.mark.parametrize("version", ["0.4.38", "0.10.1", "0.13.0", "0.13", "1.0"])
@pytest.mark.parametrize("library", [jax, jaxlib], ids=["jax", "jaxlib"])
def test_an_unknown_version_is_named_with_what_to_install(library, version, monkeypatch):
    monkeypatch.setattr(library.version, "__version__", version)
    name = library.__name__
    with pytest.raises(ImportError) as caught:
        jax_versions.check()
    text = str(caught.value)
    assert f"cannot use {name} {version}: it knows {name} 0.10.2 up to, not including, 0.13" in text
    assert 'pip install "jax>=0.10.2,<0.13" "jaxlib>=0.10.2,<0.13"' in text


def test_an_unknown_version_ends_the_import(run_interpreter):
    run_interpreter("""
        import jax.version
        jax.version.__version__ = "0.13.0"
        try:
            import torch_xla
        except ImportError as error:
            assert "cannot use jax 0.13.0" in str(error), error
        else:
            raise AssertionError("torch_xla was imported")
    """)
