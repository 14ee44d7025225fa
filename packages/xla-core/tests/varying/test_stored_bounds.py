"""Programs for a bound are in the persistent cache, and another process finds them, whatever lengths it has."""

from __future__ import annotations

import json

import pytest

from xla_core.jax_bridge import symbolic_sizes

STEPS = """
    import json, sys
    import torch, torch_xla
    from xla_core.support import counters

    def step(x):
        return x.softmax(0).cumsum(0) + x.shape[0]

    for length in {lengths}:
        rows = torch.arange(4.0 * length).reshape(length, 4).sin()
        y = step(rows.to("xla"))
        torch_xla.sync()
        torch.testing.assert_close(y.cpu(), step(rows))
    names = ("UncachedCompile", "PersistentCacheHit", "VaryingShapesPrograms", "VaryingShapesServed")
    print(json.dumps([counters.all_counters().get(name, 0) for name in names]))
    """


@pytest.fixture
def run(run_python, tmp_path):
    """A function that runs a step once per length in another process: what was compiled, found, made and served."""

    def run(lengths, **environment):
        environment = {"XLA_PERSISTENT_CACHE_PATH": str(tmp_path / "cache"), **environment}
        out = run_python(STEPS.format(lengths=lengths), XLA_VARYING_SHAPES="1", **environment)
        return json.loads(out)

    return run


def test_another_process_compiles_nothing(run):
    assert run((5, 9, 7, 40)) == [4, 0, 2, 2]
    assert run((5, 9, 7, 40)) == [0, 4, 2, 2]


def test_other_lengths_find_the_program_for_the_bound(run):
    assert run((5, 9, 7)) == [3, 0, 1, 1]
    assert run((6, 10, 8, 7)) == [2, 1, 1, 2]
    assert run((5, 9, 7), XLA_PERSISTENT_CACHE_READ_ONLY="1") == [0, 3, 1, 1]


def test_what_cannot_be_read_is_compiled(run, tmp_path):
    assert run((5, 9, 7)) == [3, 0, 1, 1]
    for file in (tmp_path / "cache").glob("*.xlaexe"):
        content = file.read_bytes()
        file.write_bytes(content[: len(content) // 2])
    assert run((5, 9, 7)) == [3, 0, 1, 1]


def test_what_is_stored_of_lengths_is_read_back():
    first, second = symbolic_sizes.symbols(("L0", "L1"), ("L0 >= 2", "L1 >= 2"))
    for size in (first - 7, 2 * first - second, first * second - 3, first // 2 - first % 3):
        again = symbolic_sizes.parsed(str(size))
        for lengths in ({"L0": 5, "L1": 9}, {"L0": 7, "L1": 2}):
            wanted = symbolic_sizes.evaluate(size, lengths)
            assert symbolic_sizes.evaluate(again, lengths) == wanted
    with pytest.raises(ValueError):
        symbolic_sizes.parsed("L0 +")
