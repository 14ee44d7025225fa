"""A PJRT library whose StableHLO is too old or too new: the error names both versions."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from jaxlib.mlir.dialects import stablehlo

import torch_xla
from xla_core.contract.device_protocol import Placement, Topology
from xla_core.execution import runtime
from xla_core.jax_bridge import pjrt_c_api
from xla_core.pjrt.client import PjrtClient
from xla_core.pjrt.library import LibraryPlugin

OLDEST, NEWEST = stablehlo.get_minimum_version(), stablehlo.get_current_version()


def library_of(**versions):
    return SimpleNamespace(local_devices=list, devices=list, **versions)


@pytest.mark.parametrize(
    ("versions", "texts"),
    [
        ({"stablehlo_current_version": [0, 5, 0]}, ["up to 0.5.0", "a newer library"]),
        (
            {"stablehlo_minimum_version": [99, 1, 0], "stablehlo_current_version": [99, 7, 2]},
            ["99.1.0 to 99.7.2", "a newer jaxlib"],
        ),
    ],
    ids=["too old", "too new"],
)
def test_a_library_that_cannot_fit_does_not_start(monkeypatch, tmp_path, versions, texts):
    (tmp_path / "libacme.so").touch()
    plugin = LibraryPlugin("ACME", path=tmp_path / "libacme.so")
    monkeypatch.setattr(pjrt_c_api, "load_library", lambda *_: None)
    monkeypatch.setattr(pjrt_c_api, "make_client", lambda *_: library_of(**versions))
    with pytest.raises(RuntimeError) as raised:
        plugin(Topology(), {})
    for text in [*texts, f"StableHLO {OLDEST} to {NEWEST}", "ACME", pjrt_c_api.JAXLIB_VERSION]:
        assert text in str(raised.value)


def test_a_library_that_fits_or_tells_nothing_starts():
    assert pjrt_c_api.stablehlo_misfit(library_of()) is None
    same = [int(n) for n in NEWEST.split(".")]
    assert pjrt_c_api.stablehlo_misfit(library_of(stablehlo_current_version=same)) is None
    assert pjrt_c_api.stablehlo_misfit(library_of(stablehlo_current_version=[99, 0, 0])) is None


class Refusing:
    """A client that refuses programs with these words."""

    def __init__(self, client, words, **versions):
        self._of, self._words = client, words
        vars(self).update(versions)

    def __getattr__(self, name):
        return getattr(self._of, name)

    def compile_and_load(self, *_):
        raise RuntimeError(self._words)


class Acme(PjrtClient):
    device_type = platform = "cpu"


@pytest.mark.parametrize(
    ("versions", "theirs"),
    [
        ({"stablehlo_current_version": (1, 2, 0)}, "StableHLO up to 1.2.0"),
        ({}, "StableHLO of a version that it does not tell"),
    ],
)
def test_a_program_that_is_refused_for_its_version(versions, theirs):
    torch_xla.device()
    own = runtime.client()
    words = f"failed to deserialize portable artifact using StableHLO_v{NEWEST}"
    client = Acme(Refusing(own._client, words, **versions))
    other = Acme(Refusing(own._client, "out of registers", **versions))
    program = SimpleNamespace(
        placement=Placement((0,)),
        stablehlo=b"",
        num_replicas=1,
        num_partitions=1,
        options={},
        inputs=(),
        name="step",
    )
    with pytest.raises(RuntimeError) as raised:
        client.compile(program)
    for text in (theirs, f"StableHLO {OLDEST} to {NEWEST}", "a newer library", words):
        assert text in str(raised.value)
    with pytest.raises(RuntimeError, match=r"^out of registers$"):
        other.compile(program)
