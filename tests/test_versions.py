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


@pytest.fixture
def version_matrix(monkeypatch):
    """The module tools/version_matrix.py."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    yield __import__("version_matrix")
    sys.modules.pop("version_matrix", None)


PRINTED = """
matrix-py313: commands[0]> python /x/examples/train_digits.py
epoch 8: train loss 0.0100, held-out accuracy 99.17%, 1.00 s of training
matrix-py313: commands[1]> python -m pytest -n 2 /x/packages/xla-core/tests
Fatal Python error: Segmentation fault
matrix-py313: exit -11 (9.99 seconds) /x> python -m pytest -n 2 /x/packages/xla-core/tests pid=1
matrix-py313: commands[2]> python -m pytest -n 2 /x/packages/xla-dist/tests
=================== 1 failed, 2 passed in 3.00s ===================
"""


def test_a_package_whose_tests_end_without_totals_does_not_get_the_next_ones(version_matrix):
    run = version_matrix.results_of("py313", PRINTED, ("3.13.0", "2.15.0", "0.12.0"))
    assert run.main_job == "99.17%"
    assert run.tests == ("xla-core: error: did not end", "xla-dist: 1 failed, 2 passed")


def test_the_matrix_leaves_the_rest_of_the_page_and_arguments_as_they_are(
    version_matrix, monkeypatch, tmp_path
):
    page = tmp_path / "versions.md"
    page.write_text("before\n\n## What was run\n\nold\n\n## After\n\nkept\n")
    monkeypatch.setattr(version_matrix, "DOCUMENT", page)
    calls = []

    def run(name, arguments):
        calls.append((name, arguments))
        return version_matrix.Run(
            name, ("3.13.0", "2.15.0", "0.12.0"), "99 %", ("xla-core: 1 passed",)
        )

    monkeypatch.setattr(version_matrix, "run", run)
    assert version_matrix.main(["--", "-k", "a or b"]) == 0
    assert calls == [(name, ["-k", "a or b"]) for name in version_matrix.combinations()]
    text = page.read_text()
    assert text.startswith("before\n\n## What was run\n\nBy `tox -e matrix` on ")
    assert text.endswith("| xla-core: 1 passed |\n\n## After\n\nkept\n")
    assert "old" not in text
