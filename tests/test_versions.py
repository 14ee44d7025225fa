"""The versions that the packages allow, stated once each, and the environments that try them."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from xla_core.jax_bridge import jax_versions
from xla_core.torch_bridge import device_guard

ROOT = Path(__file__).resolve().parents[1]


def dotted(version):
    return ".".join(map(str, version))


def requirements(name):
    """What all packages of the repository ask for under this name."""
    for path in ROOT.glob("packages/*/pyproject.toml"):
        for text in tomllib.loads(path.read_text())["project"].get("dependencies", ()):
            wanted = Requirement(text)
            if wanted.name == name:
                yield path.parent.name, wanted


@pytest.mark.parametrize("name", ["jax", "jaxlib"])
def test_every_package_allows_the_range_that_is_checked_at_import(name):
    found = dict(requirements(name))
    assert "xla-core" in found
    for package, wanted in found.items():
        lowest, unknown = dotted(jax_versions.OLDEST), dotted(jax_versions.FIRST_UNKNOWN)
        assert {str(s) for s in wanted.specifier} == {f">={lowest}", f"<{unknown}"}, package


def test_every_package_allows_the_torch_versions_that_the_guard_names():
    oldest, newest = re.findall(r"\d+\.\d+", device_guard.MSG_UNKNOWN_LAYOUT)
    major, minor = newest.split(".")
    for package, wanted in requirements("torch"):
        unknown = f"{major}.{int(minor) + 1}"
        assert {str(s) for s in wanted.specifier} == {f">={oldest}", f"<{unknown}"}, package


@pytest.fixture
def toxfile(monkeypatch):
    """The module toxfile.py; only tox's own environment has what it imports from tox."""
    pytest.importorskip("tox", reason="toxfile.py imports tox, which its environments do not have")
    monkeypatch.syspath_prepend(str(ROOT))
    yield __import__("toxfile")
    sys.modules.pop("toxfile", None)


def matrix():
    """Factors of each environment of the matrix, as toxfile.py lists them."""
    (listed,) = re.findall(r"^MATRIX = \((.*?)^\)", (ROOT / "toxfile.py").read_text(), re.M | re.S)
    return [re.findall(r"([a-z]+)(\d)(\d+)", name) for name in re.findall(r'"(.*)"', listed)]


def test_the_matrix_has_the_oldest_and_the_newest_that_the_packages_allow():
    tried = {
        kind: {Version(f"{int(major)}.{int(minor)}") for row in matrix() for k, major, minor in row
               if k == kind}
        for kind in ("py", "torch", "jax")
    }  # fmt: skip
    oldest, newest = re.findall(r"\d+\.\d+", device_guard.MSG_UNKNOWN_LAYOUT)
    assert (min(tried["torch"]), max(tried["torch"])) == (Version(oldest), Version(newest))
    assert min(tried["jax"]) == Version(dotted(jax_versions.OLDEST[:2]))
    major, minor = jax_versions.FIRST_UNKNOWN
    assert max(tried["jax"]) == Version(f"{major}.{minor - 1}")
    assert tried["py"] == {Version("3.11"), Version("3.12"), Version("3.13")}


def test_factors_replace_the_pins_of_torch_and_jax_alone(toxfile):
    changed = toxfile.factor_constraints("py312-torch215-jax011").splitlines()
    assert {"torch==2.15.*", "jax==0.11.*", "jaxlib==0.11.*"} <= set(changed)
    assert not [line for line in changed if line.startswith(("torch==2.13", "jax==0.10", "numpy"))]
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    assert next(line for line in pins if line.startswith("pytest==")) in changed
    assert toxfile.factor_constraints("py312") == (ROOT / "constraints.txt").read_text()


def test_what_all_environments_share_is_no_more_than_each_package_requires(toxfile):
    """The shared folder has what xla-core requires: an environment of another package would see too much."""
    folders = toxfile.package_folders()
    assert len(folders) > 5
    for name in folders:
        wanted = toxfile.install_names(name, folders)
        assert "xla-core" in [text.partition("[")[0] for text in wanted], name
        assert wanted[-1].partition("[")[0] == name
