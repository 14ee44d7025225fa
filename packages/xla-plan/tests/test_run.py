"""``xla-plan run`` as somebody who types it sees it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

STEPS = Path(__file__).with_name("small_steps.py")
PODS = Path(__file__).resolve().parents[3] / "examples" / "pods"
WIDTH, ROWS, LAYERS = 512, 256, 2
WEIGHTS = LAYERS * (WIDTH * WIDTH + WIDTH)
MLP_ON_FOUR = ("run", f"{STEPS}:mlp", "--topology", "v5e:2x2", "--mesh", "fsdp=4")


@pytest.fixture(scope="module")
def cache(folder_of_run):
    return folder_of_run / "plan" / "cache"


@pytest.fixture(scope="module")
def mlp(typed_command, cache, folder_of_run, once):
    """A plan of two meshes, with the page."""
    page = folder_of_run / "plan.html"
    done = once("mlp", lambda: typed_command(
        "run", f"{STEPS}:mlp", "--topology", "v5e:2x2", "--mesh", "fsdp=4", "--mesh", "fsdp=2,rest=2",
        "--set", f"width={WIDTH}", "--cache", cache, "--html", page,
    ))  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done, page


@pytest.mark.parametrize(("number", "parts"), [(0, 4), (1, 2)])
def test_memory_is_that_of_the_parts_on_one_chip(mlp, number, parts):
    plan = mlp[0].plans[number]
    memory = plan["memory"]
    assert memory["parameters"] == 4 * WEIGHTS / parts
    assert memory["optimizer state"] == memory["parameters"]
    # at most those of all parameters at once, and no more than there is besides
    assert memory["gradients"] == min(memory["parameters"], memory["temporaries"])
    shown = sum(v for k, v in memory.items() if k not in ("total", "temporaries"))
    assert shown == memory["total"] and plan["fits"]
    assert plan["figures"]["parts"]["count"] == WEIGHTS


def test_work_is_the_products_of_the_step(mlp):
    for plan, parts in zip(mlp[0].plans, (4, 2), strict=True):
        # forward and both gradients, but not that of the input
        products = 2 * ROWS * WIDTH * WIDTH * (3 * LAYERS - 1)
        assert plan["figures"]["recorded_flops"] == products
        assert plan["figures"]["model_flops"] == 2 * ROWS * WIDTH * WIDTH * 3 * LAYERS
        # the compiler may use chips beside each other for parts of one product
        assert products / 4 <= plan["figures"]["work"]["flops"] <= products / parts
        found = plan["estimate"]
        assert 0 < found["low"] <= found["seconds"] <= found["high"]
        assert 0 < found["mfu_low"] <= found["mfu"] <= found["mfu_high"] < 1


def test_collectives_are_named_with_their_lines(mlp):
    rows = {row["kind"]: row for row in mlp[0].plans[0]["figures"]["collectives"]}
    assert sum(row["bytes"] for row in rows.values()) >= 4 * WIDTH * WIDTH
    lines = [line for row in rows.values() for line in row["lines"]]
    # Linear is PyTorch's: the line is the one that called it
    assert lines and all(line.startswith("small_steps.py:") for line in lines)


def test_tables_and_page(mlp):
    done, page = mlp
    for text in (
        "HBM of one chip",
        "one step on one chip",
        "between chips",
        "fsdp=2,rest=2",
        "MFU",
    ):
        assert text in done.stdout
    html = page.read_text()
    assert "HBM of one chip, GiB" in html and "Seconds of one step" in html
    # plots are drawn without a script: with a library for them the page had 4.8 MB
    assert html.count("<svg") == 2 and "<script" not in html and len(html) < 50_000


def test_programs_are_kept_with_a_manifest(mlp, command, cache):
    rows = json.loads((cache / "xla-plan.json").read_text())
    assert [(r["topology"], r["mesh"]) for r in rows] == [
        ("v5e:2x2", "fsdp=4"),
        ("v5e:2x2", "fsdp=2,rest=2"),
    ]
    assert all(r["versions"]["libtpu"] and r["step"].endswith("small_steps.py:mlp") for r in rows)
    again = command(
        *MLP_ON_FOUR,
        "--set",
        f"width={WIDTH}",
        "--cache",
        cache,
    )
    first = mlp[0].plans[0]
    assert again.plans[0]["figures"]["from_cache"] and not first["figures"]["from_cache"]
    for name in ("program", "memory", "work", "collectives", "model_flops"):
        assert again.plans[0]["figures"][name] == first["figures"][name], name


def test_a_step_that_does_not_fit_is_refused_with_what_to_change(command):
    done = command(
        *MLP_ON_FOUR,
        "--set",
        "width=65536",
        "--set",
        "rows=64",
    )
    assert done.returncode == 1
    (plan,) = done.plans
    assert not plan["fits"] and "change:" in done.stdout
    assert plan["memory"]["total"] > plan["limit"]


@pytest.mark.parametrize(
    ("function", "mesh", "message"),
    [
        ("nothing", "fsdp=4", "returned Mesh; a step function"),
        ("broken", "fsdp=4", "RuntimeError: no such layer (small_steps.py:{line}, in broken)"),
        ("idle", "fsdp=4", "recorded nothing. A step function returns"),
        ("mlp", "fsdp=3", "is for 3 devices, but v5e:2x2 has 4"),
        ("missing", "fsdp=4", "has no function 'missing'"),
    ],
)
def test_what_is_wrong_is_said(command, function, mesh, message):
    done = command("run", f"{STEPS}:{function}", "--topology", "v5e:2x2", "--mesh", mesh)
    assert done.returncode == 1
    source = STEPS.read_text().splitlines()
    (raised,) = (n for n, code in enumerate(source, 1) if "no such layer" in code)
    assert message.format(line=raised) in done.plans[0]["error"]
    assert done.plans[0]["figures"]["traceback"].startswith("Traceback")


def test_what_is_wrong_on_the_command_line(typed_command):
    done = typed_command("run", f"{STEPS}:mlp", "--topology", "v5e:2x2", "--mesh", "four")
    assert done.returncode == 2 and "fsdp=16 or data=2" in done.stderr
    done = typed_command("run", f"{STEPS}:mlp", "--topology", "v5e:2x2")
    assert done.returncode == 1 and "--mesh fsdp=16" in done.stderr


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("nowhere.py:mlp",), "the file nowhere.py does not exist"),
        (("nowhere.py",), "the file nowhere.py does not exist"),
        (("mlp",), "'mlp' names no step"),
        ((f"{STEPS}:mlp", "--set", "width"), "--set width: write a keyword argument"),
        ((f"{STEPS}:mlp", "--topology", "v9:2x2"), "no figures for 'v9:2x2'"),
        ((f"{STEPS}:mlp", "--html", "nowhere/plan.html"), "does not exist"),
    ],
)
def test_what_nothing_was_compiled_for(typed_command, given, message):
    """Refused at once: no process is started, and no minutes of compiling are lost at the end."""
    done = typed_command("run", "--topology", "v5e:2x2", "--mesh", "fsdp=4", *given)
    assert done.returncode == 2 and message in done.stderr
    assert "compiling" not in done.stderr and "Traceback" not in done.stderr


SCRIPT = """
import sys
import torch, torch_xla
from torch import nn

device = torch_xla.device()
model = nn.Linear(512, int(sys.argv[1])).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for _ in range(4):
    optimizer.zero_grad()
    loss = model(torch.randn(64, 512).to(device)).square().mean()
    loss.backward()
    optimizer.step()
    torch_xla.sync()
print(loss.item())
sys.exit(3)
"""


def test_a_script_is_planned_as_it_is(command, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    done = command("run", path, "--topology", "v5e:2x2", "--html", tmp_path / "p.html", "--", "256")
    assert done.returncode == 0, done.stderr
    (plan,) = done.plans
    # the step that repeats: forward, and the weight's gradient
    assert plan["figures"]["work"]["flops"] == 2 * 2 * 64 * 512 * 256
    # memory by kind and MFU are known from what the optimizer updates and what the step recorded
    memory, weights = plan["memory"], 512 * 256 + 256
    assert (memory["parameters"], memory["optimizer state"]) == (4 * weights, 4 * weights)
    assert 0 < memory["gradients"] <= 4 * weights
    assert plan["figures"]["parts"]["count"] == weights
    # what the data needs no gradient for is not recorded: two products, of which one is the forward pass
    assert plan["figures"]["recorded_flops"] == 2 * 2 * 64 * 512 * 256
    assert plan["figures"]["model_flops"] == 3 * 2 * 64 * 512 * 256
    assert plan["fits"] and 0 < plan["estimate"]["mfu"] < 1


@pytest.fixture(scope="module")
def llama(command, once):
    """The smallest of the steps in examples/pods, layer by layer and as a loop."""
    done = once("llama", lambda: command(
        "run", f"{PODS / 'llama.py'}:training_step", "--topology", "v5e:2x2", "--mesh", "fsdp=2,tensor=2",
        "--set", "size=tiny", "--set", "length=256", "--set", "loop=False|True",
    ))  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.plans


@pytest.mark.long
def test_layers_in_a_loop_are_the_same_work(llama):
    one_by_one, loop = (plan["figures"] for plan in llama)
    assert loop["operations"] < one_by_one["operations"] / 5
    assert loop["work"]["unknown_loops"] == 0
    for name in ("flops", "kernel_flops"):
        assert loop["work"][name] == one_by_one["work"][name] > 0
    assert loop["parts"] == one_by_one["parts"]
    assert loop["model_flops"] == one_by_one["model_flops"]


def test_the_models_own_flops_are_those_that_are_recorded(llama):
    figures = llama[0]["figures"]
    # what the backward pass computes again is recorded, and no model FLOP
    assert figures["model_flops"] < figures["recorded_flops"] < 4 / 3 * figures["model_flops"]


def test_lines_inside_a_loop_are_named(llama):
    lines = {line for row in llama[1]["figures"]["collectives"] for line in row["lines"]}
    source = (PODS / "llama.py").read_text().splitlines()
    code = {source[int(line.partition(":")[2]) - 1].strip() for line in lines}
    assert "return F.linear(x, self.weight.to(x.dtype))" in code


def test_two_slices_send_over_the_slow_network(command):
    done = command(
        "run", f"{STEPS}:mlp", "--topology", "v5e:2x2*2", "--mesh", "fsdp=8", "--set", f"width={WIDTH}",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (plan,) = done.plans
    # at least each chip's part of the gradients goes to the other slice
    assert plan["figures"]["sent"]["dcn"] >= 4 * WEIGHTS / 8
    assert plan["estimate"]["dcn"] > 0
