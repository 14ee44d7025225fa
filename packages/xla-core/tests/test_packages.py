"""Names of the façade that need another package: found there, or an error that says which."""

import pytest

from torch_xla._packages import lazy_names, package_module


def test_a_missing_package_is_named():
    with pytest.raises(
        ImportError, match=r"xm.frob needs the package xla-frob, .*pip install xla-frob"
    ):
        package_module("xla_frob.inner", "xm.frob")


def test_an_error_inside_the_package_is_its_own(tmp_path, monkeypatch):
    (tmp_path / "xla_broken.py").write_text("import not_there_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="not_there_at_all"):
        package_module("xla_broken", "xm.broken")


def test_names_come_from_their_home():
    getter = lazy_names("some.module", {"sqrt": "math"})
    assert getter("sqrt")(4.0) == 2.0
    with pytest.raises(AttributeError, match=r"'some.module' has no attribute 'cbrt'"):
        getter("cbrt")
