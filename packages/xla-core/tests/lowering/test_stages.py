"""Steps that run as several programs: the same results, donations and cache hits as one program."""

from __future__ import annotations

import json

import pytest

TRAINING = """
    import dataclasses
    from xla_core.support import counters
    from xla_core.compilation import program_table
    from xla_pjrt_cpu.client import CpuClient

    CpuClient.outlining = dataclasses.replace(CpuClient.outlining, most_stages=MOST_STAGES)
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(16) for _ in range(LAYERS)], nn.Linear(16, 3)).to("xla")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    data, target = torch.randn(8, 16).to("xla"), torch.randint(3, (8,)).to("xla")
    torch_xla.manual_seed(7)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()
        schedule.step()
        torch_xla.sync()
        losses.append(loss.item())
    step = max(program_table.all_programs(), key=lambda p: p.operations)
    executable = step.executable
    print(json.dumps({
        "losses": losses,
        "kind": type(executable).__name__,
        "hlo": executable.optimized_hlo().count("HloModule "),
        "runs": len(getattr(executable, "_runs", [0])),
        "aliases": sorted(step.aliases),
        "memory": executable.memory_analysis(),
        "flops": executable.cost_analysis()["flops"],
        "programs": len(program_table.all_programs()),
        "compiled": counters.all_counters().get("UncachedCompile", 0),
        "microkernels": executable.optimized_hlo().count("ynn_fusion"),
        "grad": model[0].up.weight.grad.sum().item(),
    }))
"""


@pytest.fixture
def trained(run_python, blocks):
    """Train in a process of its own, and what it printed."""

    def run(layers: int = 6, most_stages: int | None = None, **environment: str) -> dict:
        script = TRAINING.replace("LAYERS", str(layers)).replace("MOST_STAGES", str(most_stages))
        # what is compared does not depend on how well the programs are compiled
        environment.setdefault("XLA_COMPILE_EFFORT", "fast")
        printed = run_python(blocks + script, **environment)
        return json.loads(printed.splitlines()[-1])

    return run


def test_training_in_stages_is_training_in_one_program(trained):
    staged, whole = trained(XLA_STEP_STAGES="1"), trained(XLA_STEP_STAGES="0")
    assert (staged["kind"], whole["kind"]) == ("StagedExecutable", "CpuExecutable")
    # float32: another program is fused in another way
    assert staged["losses"] == pytest.approx(whole["losses"], rel=1e-5)
    assert staged["grad"] == pytest.approx(whole["grad"], rel=1e-4)
    for same in ("aliases", "programs", "compiled"):
        assert staged[same] == whole[same]
    for same in ("arguments", "aliased"):
        assert staged["memory"][same] == whole["memory"][same]
    # XLA counts the table of the results' addresses, too
    assert (
        whole["memory"]["outputs"] - 4096
        < staged["memory"]["outputs"]
        <= whole["memory"]["outputs"]
    )
    # what is set up once and runs many times in a step is worth setting up
    assert staged["microkernels"] > 0
    assert whole["microkernels"] == 0
    # XLA counts a function once, wherever it is called
    assert staged["flops"] > 0.99 * whole["flops"]


def test_depth_adds_runs_and_no_programs(trained):
    # in fewer than eight layers the forward passes are not worth a program of their own
    shallow, deep = (trained(layers, XLA_STEP_STAGES="1") for layers in (8, 16))
    assert 3 <= deep["hlo"] <= shallow["hlo"]
    assert deep["flops"] > 1.8 * shallow["flops"]  # the head is the same


# Of eight layers seven are alike in the backward pass: three at a time, one is left over, which is
# another program; all seven at once, none is.
@pytest.mark.parametrize(("most", "leftovers"), [(10, 1), (6, 0)])
def test_few_stages_stand_for_several_calls_each(trained, most, leftovers):
    each = trained(8, XLA_STEP_STAGES="1")
    few = trained(8, most, XLA_STEP_STAGES="1")
    assert few["runs"] < each["runs"] / 2
    assert few["hlo"] == each["hlo"] + leftovers
    # float32: a stage of several blocks is fused in another way
    assert few["losses"] == pytest.approx(each["losses"], rel=1e-5)
    assert few["aliases"] == each["aliases"]
    assert few["memory"]["aliased"] == each["memory"]["aliased"]


def test_small_steps_are_one_program_unless_asked(trained):
    assert trained()["kind"] == "CpuExecutable"


def test_a_second_process_finds_the_stages_in_the_cache(trained, tmp_path):
    cache = {"XLA_STEP_STAGES": "1", "XLA_PERSISTENT_CACHE_PATH": str(tmp_path / "cache")}
    for prefetch in ("0", "1"):
        found = [trained(**cache, XLA_CACHE_PREFETCH=prefetch) for _ in range(2)]
        assert found[0]["losses"] == found[1]["losses"]
        assert found[1]["compiled"] == 0
        assert found[0]["aliases"] == found[1]["aliases"]
    one = trained(XLA_STEP_STAGES="0", XLA_PERSISTENT_CACHE_PATH=str(tmp_path / "cache"))
    assert one["compiled"] > 0  # another way to run is another program


RECURRENT = """
    import json, torch, torch_xla
    from torch import nn
    from xla_core.compilation import program_table

    torch.manual_seed(0)
    cell = nn.GRUCell(4, 8).to("xla")
    optimizer = torch.optim.SGD(cell.parameters(), lr=0.1)
    series = torch.randn(12, 3, 4).to("xla")
    found = []
    for _ in range(3):
        state = torch.zeros(3, 8, device="xla")
        kept = []
        for moment in series.unbind(0):
            state = cell(moment, state)
            kept.append(state)
        loss = torch.stack(kept).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        # a slice and constants as results, one with the shape of what the step computes
        first, ones, like = series[0], torch.ones(2, device="xla"), torch.ones_like(kept[5])
        torch_xla.sync()
        made = (loss, kept[3], first, ones, like)
        found.append([value.sum().item() for value in made])
    step = max(program_table.all_programs(), key=lambda p: p.operations)
    print(json.dumps([type(step.executable).__name__, found]))
"""


def test_slices_of_inputs_constants_and_values_in_between(run_python):
    def run(stages: str) -> tuple[str, list]:
        kind, found = json.loads(run_python(RECURRENT, XLA_STEP_STAGES=stages).splitlines()[-1])
        return kind, [value for values in found for value in values]

    (staged, values), (_, expected) = run("1"), run("0")
    assert staged == "StagedExecutable"
    assert values == pytest.approx(expected, rel=1e-5)  # float32: other fusions


def test_damaged_stages_in_the_cache_are_a_miss(trained, tmp_path):
    cache = {"XLA_STEP_STAGES": "1", "XLA_PERSISTENT_CACHE_PATH": str(tmp_path)}
    first = trained(**cache)
    damaged = 0
    for path in tmp_path.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            place = content.find(b"XLASTG01")
            if place >= 0:
                path.write_bytes(content[: place + 20] + b"#" * 8 + content[place + 28 :])
                damaged += 1
    assert damaged
    again = trained(**cache)
    assert again["losses"] == first["losses"]
    assert again["compiled"] >= damaged
