"""What was loaded ahead is run once before its first use, and nobody notices but the counter."""

from __future__ import annotations

import json

import pytest

PREPARED = """
    import threading
    from xla_core.support import counters

    def rehearsed():
        (thread,) = [t for t in threading.enumerate() if t.name == "xla-prefetch"] or [None]
        if thread is not None:
            thread.join()
        return counters.all_counters().get("PersistentCacheRehearsal", 0)

    def report(rehearsals, values):
        found = counters.all_counters()
        names = ("PersistentCachePrefetch", "UncachedCompile")
        metric = counters.all_metrics().get("ExecuteTime")
        runs = metric.total if metric else 0
        print(json.dumps([rehearsals, *(found.get(n, 0) for n in names), runs, values]))
"""

TRAINING = """
    torch.manual_seed(0)
    torch_xla.device()
    rehearsals = rehearsed()
    model = nn.Sequential(*[Block(8) for _ in range(6)]).to("xla")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(3, 8).to("xla")
    torch_xla.manual_seed(7)  # for the dropout
    values = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        torch_xla.sync()
        values.append(loss.item())
    report(rehearsals, values)
"""

LOOPING = """
    from torch_xla.experimental.fori_loop import while_loop
    torch_xla.device()
    rehearsals = rehearsed()
    x = torch.full((3,), 5.0).to("xla")
    values = (x * 2).tolist()
    # on zeros this would never end
    (found,) = while_loop(lambda v: v.sum() < 100, lambda v: (v * 2,), (x,))
    report(rehearsals, values + found.tolist())
"""


@pytest.fixture
def run(run_python, blocks, tmp_path):
    """Runs a script; (rehearsals, programs loaded ahead, compilations, executions, values)."""

    def run(script: str, **environment: str) -> list:
        environment.setdefault("XLA_PERSISTENT_CACHE_PATH", str(tmp_path / "cache"))
        return json.loads(run_python(blocks + PREPARED + script, **environment).splitlines()[-1])

    return run


@pytest.mark.parametrize("stages", ["0", "1"])
def test_a_rehearsed_training_is_the_same(run, stages):
    rehearsals, ahead, compiled, executions, values = run(TRAINING, XLA_STEP_STAGES=stages)
    assert (rehearsals, ahead) == (0, 0)
    again = run(TRAINING, XLA_STEP_STAGES=stages)
    assert again[1:] == [compiled, 0, executions, values]
    # one each; of a step in stages, each program of these once
    assert again[0] == compiled if stages == "0" else again[0] > compiled


FAILING = """
    from xla_pjrt_cpu import CpuClient

    def fails(self, executable):
        raise RuntimeError("a rehearsal that fails")

    CpuClient.rehearse = fails
"""


def test_loops_are_not_rehearsed_errors_are_swallowed_and_one_flag_ends_it_all(run):
    first = run(LOOPING)
    assert first[-1] == [10.0] * 3 + [40.0] * 3
    assert run(LOOPING) == [1, 2, 0, *first[3:]]
    assert run(FAILING + LOOPING) == [0, 2, 0, *first[3:]]
    assert run(LOOPING, XLA_CACHE_PREFETCH="0") == [0, 0, 0, *first[3:]]


TAKEN = """
    from xla_pjrt_cpu import CpuClient

    taken, original = threading.Event(), CpuClient.rehearse

    def later(self, executable):
        taken.wait()
        return original(self, executable)

    CpuClient.rehearse = later
    torch_xla.device()
    x = torch.full((3,), 5.0).to("xla")
    values = (x**2).tolist()
    values += (x**3).tolist()
    taken.set()
    report(rehearsed(), values)
"""


def test_what_was_taken_is_not_rehearsed_any_more(run):
    first = run(TAKEN)
    # the first waits in the middle of its rehearsal
    assert run(TAKEN) == [1, 2, 0, *first[3:]]


EXITING = """
    from xla_pjrt_cpu import CpuClient

    entered = threading.Event()

    def rehearse(self, executable):
        entered.set()
        threading.main_thread().join()
        print("a rehearsal ended after the script")
        return True

    if WAITS:
        CpuClient.rehearse = rehearse
    torch_xla.device()
    if WAITS:
        entered.wait()
    else:
        x = torch.full((3,), 5.0).to("xla")
        print((x**2).tolist(), (x**3).tolist())
"""


def test_only_the_rehearsal_under_way_delays_the_exit(run_python, blocks, tmp_path):
    cache = str(tmp_path / "cache")
    for waits in (False, True):
        script = blocks + PREPARED + EXITING.replace("WAITS", str(waits))
        printed = run_python(script, XLA_PERSISTENT_CACHE_PATH=cache)
    assert printed.splitlines() == ["a rehearsal ended after the script"]
