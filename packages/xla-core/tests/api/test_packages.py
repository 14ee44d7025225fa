"""Names of the façade that are imported when first used: found, or an error that says what is missing."""

import inspect
import subprocess
import sys
import types

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


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module with a name of the standard library's and one of a package that is not installed."""
    made = types.ModuleType("some_module")
    monkeypatch.setitem(sys.modules, "some_module", made)
    homes = {"sqrt": "math", "frob": "xla_frob.inner"}
    made.__getattr__, made.__dir__ = lazy_names(  # type: ignore[method-assign]
        "some_module", homes, aliases={"text": "string"}
    )
    return made


def test_names_come_from_their_home(module):
    assert module.sqrt(4.0) == 2.0 and module.text is sys.modules["string"]
    with pytest.raises(AttributeError, match=r"'some_module' has no attribute 'cbrt'"):
        module.cbrt  # noqa: B018
    assert {"sqrt", "text"} <= set(dir(module))


def test_a_name_of_a_missing_package_is_an_import_error_where_it_is_written(module):
    words = "some_module.frob needs the package xla-frob"
    with pytest.raises(ImportError, match=words):
        module.frob(1)
    with pytest.raises(ImportError, match=words):
        from some_module import frob  # noqa: F401


def test_looking_for_a_name_of_a_missing_package_finds_none(module):
    assert not hasattr(module, "frob") and getattr(module, "frob", 7) == 7
    with pytest.raises(AttributeError, match=r"some_module.frob needs the package xla-frob"):
        getattr(module, "frob")  # noqa: B009 - what is not written out is the test
    assert "frob" not in dir(module)
    assert "sqrt" in dict(inspect.getmembers(module))


def run(script: str) -> str:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


SUBMODULES = (
    "amp", "core.xla_env_vars", "core.xla_model", "debug.metrics", "distributed.fsdp",
    "distributed.parallel_loader", "distributed.spmd", "distributed.xla_multiprocessing",
    "experimental.scan", "stablehlo", "utils.serialization", "_internal.tpu", "_dynamo.dynamo_bridge",
)  # fmt: skip


def test_submodules_are_attributes_after_a_plain_import_and_not_imported_by_it():
    script = f"""
import sys, torch_xla
import operator
early = [n for n in ("amp", "core.xla_model", "distributed.spmd", "stablehlo") if f"torch_xla.{{n}}" in sys.modules]
for name in {SUBMODULES}:
    assert operator.attrgetter(name)(torch_xla).__name__ == f"torch_xla.{{name}}", name
    assert name.split(".")[0] in dir(torch_xla), name
aliases = [getattr(torch_xla, n).__name__ for n in ("xenv", "xm", "xmp", "xr", "xu")]
import lazy_tensor_core
print(early, aliases, lazy_tensor_core.core.lazy_model.__name__)
"""
    aliases = "core.xla_env_vars core.xla_model distributed.xla_multiprocessing runtime utils.utils"
    expected = [f"torch_xla.{name}" for name in aliases.split()]
    assert run(script) == f"[] {expected} lazy_tensor_core.core.lazy_model"


def test_every_module_can_be_looked_through():
    script = """
import inspect, types, torch_xla, lazy_tensor_core
seen = set()
def walk(module):
    seen.add(module.__name__)
    for _, found in inspect.getmembers(module):
        if inspect.ismodule(found) and found.__name__ not in seen:
            if found.__name__.startswith(("torch_xla.", "lazy_tensor_core.")):
                walk(found)
walk(torch_xla), walk(lazy_tensor_core)
print(len(seen) > 60)
"""
    assert run(script) == "True"
