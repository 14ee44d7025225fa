"""One identity for all caches of programs: what changes a program makes another one in each of them."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

import torch_xla
import torch_xla.runtime as xr
from torch_xla.core.dynamo_bridge import extract_compiled_graph
from xla_core.compilation import disk_cache
from xla_core.compilation.disk_cache import PersistentCache
from xla_core.compilation.program_identity import ProgramIdentity
from xla_core.contract.device_protocol import Placement
from xla_core.execution import op_by_op, runtime
from xla_core.support import counters


class Product(nn.Module):
    def forward(self, x):
        return x @ x


@pytest.fixture
def in_memory():
    """The program of a recorded step."""
    x = torch.ones(3, 3).to("xla")
    return lambda: (x @ x).tolist()


@pytest.fixture
def op_by_op_cache(monkeypatch):
    """The program of one operator."""
    monkeypatch.setenv("GET_TENSORS_OPBYOP", "1")
    x = torch.ones(3, 3).to("xla")
    op_by_op._programs.clear()
    return lambda: (x @ x).tolist()


@pytest.fixture
def dynamo():
    """The program of a graph of torch.compile."""
    x = torch.ones(4, 4).to("xla")  # of no other step, whose program would be found
    graph = extract_compiled_graph(fx.symbolic_trace(Product()), [x])
    return lambda: graph(x).tolist()


@pytest.fixture
def on_disk(tmp_path, monkeypatch):
    """A stored program: what the process knows is forgotten before each run."""
    monkeypatch.setattr(disk_cache._InUse, "cache", PersistentCache(tmp_path / "cache"))
    x = torch.ones(3, 3).to("xla")

    def run():
        torch_xla.sync()
        xr.clear_computation_cache()
        return (x @ x).tolist()

    return run


def precise():
    torch_xla._XLAC._xla_set_mat_mul_precision("highest")


def with_option():
    torch_xla.set_custom_compile_options({"xla_cpu_enable_fast_min_max": True})


@pytest.fixture(autouse=True)
def defaults():
    yield
    torch_xla._XLAC._xla_set_mat_mul_precision("default")
    torch_xla.set_custom_compile_options({})


def compiled():
    return counters.all_counters().get("UncachedCompile", 0)


@pytest.mark.parametrize("change", [precise, with_option])
@pytest.mark.parametrize("cache", ["in_memory", "op_by_op_cache", "dynamo", "on_disk"])
def test_a_setting_makes_another_program_in_every_cache(cache, change, request, defaults):
    run = request.getfixturevalue(cache)
    wanted = run()
    before = compiled()
    assert run() == wanted and compiled() == before, "the program is not kept at all"
    change()
    assert run() == wanted and compiled() == before + 1
    assert run() == wanted and compiled() == before + 1
    torch_xla._XLAC._xla_set_mat_mul_precision("default")
    torch_xla.set_custom_compile_options({})
    assert run() == wanted and compiled() == before + 1, "the first program was not found again"


def test_each_entry_tells_programs_apart_and_has_a_name_on_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_cache._InUse, "cache", PersistentCache(tmp_path / "cache"))
    client = runtime.client()
    identity = ProgramIdentity(b"a", client, b"b", b"c")
    others = [identity._replace(**{n: b"x"}) for n in ("what", "settings", "layouts")]
    keys = [one.cache_key("p", Placement((0,))) for one in (identity, *others)]
    keys.append(identity.cache_key("p", Placement((1,))))
    assert len({key.encoded for key in keys}) == 5
    assert {"program", "settings", "layouts", "lowering", "rules", "placement"} <= dict(
        keys[0].entries
    ).keys()
    assert len({one.digest() for one in (identity, *others)}) == 4


def test_a_graph_is_compiled_for_each_device(run_python):
    code = """
    import torch, torch_xla
    from torch_xla.core.dynamo_bridge import extract_compiled_graph

    class Doubled(torch.nn.Module):
        def forward(self, x):
            return x * 2

    first, second = (torch.arange(3.0).to(f"xla:{i}") for i in range(2))
    graph = extract_compiled_graph(torch.fx.symbolic_trace(Doubled()), [first])
    results = [graph(x) for x in (first, second)]
    print(*(r.device for r in results), *((r + x).tolist() for r, x in zip(results, (first, second))))
    """
    wanted = "xla:0 xla:1 [0.0, 3.0, 6.0] [0.0, 3.0, 6.0]"
    assert run_python(code, CPU_NUM_DEVICES="2").strip() == wanted
