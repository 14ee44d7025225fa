"""What a step reads that is no attribute and no item: a replay is refused once it has changed."""

from __future__ import annotations

import array
import collections
import contextvars
import importlib
import os
import sys
import types
import weakref

import pytest
import torch

from torch_xla.experimental.capture import CaptureError, capture

OPTIONS = types.SimpleNamespace(scale=2.0)
VARIABLE: contextvars.ContextVar[float] = contextvars.ContextVar("VARIABLE")
CHAIN = collections.ChainMap({"scale": 2.0})
USERS = collections.UserDict(scale=2.0)
SET = {2.0}
BYTES = bytearray([2])
VIEW = memoryview(BYTES)
TABLE = memoryview(BYTES).cast("B", (1, 1))
ARRAY = array.array("d", [2.0])


class Meta(type):
    scale = 2.0


class WithMeta(metaclass=Meta):
    pass


class Hashable:
    scale = 2.0


OBJECT = Hashable()
OBJECTS = {OBJECT}
REFERENCE = weakref.ref(OBJECT)


def keyword(*, table=None, scale=2.0):
    return scale


def imported():
    import package_of_a_user.settings

    return package_of_a_user.settings.scale


def imported_by_a_nested_function():
    def read():
        import package_of_a_user.settings

        return package_of_a_user.settings.scale

    return read()


def imported_by_name():
    from package_of_a_user.settings import scale

    return scale


def imported_by_another_module():
    import package_of_a_user

    return package_of_a_user.relative()


READS = {
    "a context variable": (lambda: VARIABLE.get(), VARIABLE.set),
    "the environment": (
        lambda: float(os.environ["SCALE_OF_A_USER"]),
        lambda value: os.environ.__setitem__("SCALE_OF_A_USER", str(value)),
    ),
    "getenv": (
        lambda: float(os.getenv("SCALE_OF_A_USER", "1")),
        lambda value: os.environ.__setitem__("SCALE_OF_A_USER", str(value)),
    ),
    "a class of a class": (lambda: WithMeta.scale, lambda value: setattr(Meta, "scale", value)),
    "a chain of mappings": (lambda: CHAIN["scale"], lambda value: CHAIN.update(scale=value)),
    "a dictionary in Python": (lambda: USERS["scale"], lambda value: USERS.update(scale=value)),
    "a set": (lambda: sum(SET), lambda value: (SET.clear(), SET.add(value))),
    "an object in a set": (
        lambda: next(iter(OBJECTS)).scale, lambda value: setattr(OBJECT, "scale", value),
    ),
    "bytes": (lambda: float(BYTES[0]), lambda value: BYTES.__setitem__(0, int(value))),
    "a view of bytes": (lambda: float(VIEW[0]), lambda value: BYTES.__setitem__(0, int(value))),
    "a view of two dimensions": (
        lambda: float(TABLE[0, 0]), lambda value: BYTES.__setitem__(0, int(value)),
    ),
    "an array": (lambda: ARRAY[0], lambda value: ARRAY.__setitem__(0, value)),
    "a weak reference": (lambda: REFERENCE().scale, lambda value: setattr(OBJECT, "scale", value)),
    "a keyword's default": (
        lambda: keyword(), lambda value: keyword.__kwdefaults__.update(scale=value),
    ),
    "an import": (imported, lambda value: setattr(settings(), "scale", value)),
    "a nested import": (
        imported_by_a_nested_function, lambda value: setattr(settings(), "scale", value),
    ),
    "an import by name": (imported_by_name, lambda value: setattr(settings(), "scale", value)),
    "a relative import": (
        imported_by_another_module, lambda value: setattr(settings(), "scale", value),
    ),
}  # fmt: skip


def settings():
    return sys.modules["package_of_a_user.settings"]


@pytest.fixture(autouse=True)
def package(monkeypatch, tmp_path):
    """A package of the user's, some of whose modules are imported where functions run."""
    folder = tmp_path / "package_of_a_user"
    folder.mkdir()
    text = "def relative():\n    from . import settings\n    return settings.scale\n"
    (folder / "__init__.py").write_text(text)
    (folder / "settings.py").write_text("scale = 2.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("SCALE_OF_A_USER", "2.0")
    importlib.import_module("package_of_a_user.settings")
    yield
    for name in ("package_of_a_user.settings", "package_of_a_user"):
        del sys.modules[name]


@pytest.mark.parametrize("kind", READS)
def test_what_has_changed_is_noticed(kind):
    read, change = READS[kind]
    change(2.0)
    step = capture(lambda x: x * read())
    for _ in range(4):
        result = step(torch.ones(2, device="xla"))
    assert step.recordings == 1
    assert result.tolist() == [2.0, 2.0]
    try:
        change(3.0)
        with pytest.raises(CaptureError, match=r"was .* and is now|is no longer"):
            step(torch.ones(2, device="xla"))
        step.reset()
        assert step(torch.ones(2, device="xla")).tolist() == [3.0, 3.0]
    finally:
        change(2.0)


def test_a_step_that_adds_to_a_set():
    seen = set()

    def step(x):
        seen.add(len(seen))
        return x * 2

    step = capture(step)
    step(torch.ones(2, device="xla"))
    with pytest.raises(CaptureError, match="seen from 1 items to 2 items"):
        step(torch.ones(2, device="xla"))


def test_a_set_of_objects_may_be_used():
    kinds = {torch.float32, torch.bfloat16}
    step = capture(lambda x: x * 2 if x.dtype in kinds else x)
    for _ in range(4):
        step(torch.ones(2, device="xla"))
    assert step.recordings == 1
    kinds.remove(torch.bfloat16)
    kinds.add(torch.float16)
    with pytest.raises(CaptureError, match=r"kinds was .* and is now"):
        step(torch.ones(2, device="xla"))
