"""Random programs on ``xla`` equal the CPU: views, in-place writes, gradients, syncs, lifetimes.

A failure prints the smallest program found that still fails. Its seed makes it again:
``print(make_program(seed))``.
"""

from __future__ import annotations

import gc

import pytest
import torch

import torch_xla
from xla_core.recording import xla_tensor as tensor_module
from xla_core.testing.program_parts.machine import Machine
from xla_core.testing.random_programs import difference, make_program, shrink

NORMAL = 300
SWEEP = 5000


def run(program):
    """How ``xla`` differs from the CPU on a program, None if it does not."""
    try:
        return difference(program, torch.device("xla:0"), torch_xla.sync)
    except Exception as error:  # an error outside the program's own calls: a failure too
        return f"{type(error).__name__}: {error}"


def check(seeds):
    for seed in seeds:
        if run(make_program(seed)) is not None:
            small = shrink(make_program(seed), lambda program: run(program) is not None)
            pytest.fail(f"{small}\n{run(small)}")
    torch_xla.sync()


@pytest.mark.parametrize("first", range(0, NORMAL, 10))
def test_random_programs_equal_the_cpu(first):
    check(range(first, first + 10))


@pytest.mark.sweep
@pytest.mark.parametrize("first", range(10_000, 10_000 + SWEEP, 50))
def test_many_random_programs_equal_the_cpu(first):
    check(range(first, first + 50))


def test_cycles_and_closures_without_the_garbage_collector():
    gc.disable()
    try:
        check(seed for seed in range(5000, 5120) if _keeps_values_alive(make_program(seed)))
    finally:
        gc.enable()


def _keeps_values_alive(program):
    kept = {i.target for i in program.body} & {"garbage", "capture"}
    return bool(kept) and program.iterations > 1


def test_on_the_second_device(run_python):
    out = run_python(
        """
        import torch, torch_xla
        from xla_core.execution import runtime
        from xla_core.testing.random_programs import difference, make_program

        device = torch.device("xla:1")
        for seed in range(400, 412):
            print(difference(make_program(seed), device, lambda: runtime.sync(device)))
        """,
        CPU_NUM_DEVICES="2",
    )
    assert out.split() == ["None"] * 12


def test_a_seed_is_a_program():
    assert str(make_program(7)) == str(make_program(7))
    assert str(make_program(7)) != str(make_program(8))


def test_the_programs_cover_what_they_are_for():
    used, raised, observed = set(), 0, 0
    for seed in range(120):
        program = make_program(seed)
        used |= {i.target for i in (*program.setup, *program.body)}
        machine = Machine(torch.device("cpu"), lambda: None)
        machine.run(program)
        raised += sum(type(entry).__name__ == "Raised" for entry in machine.log)
        observed += sum(type(entry).__name__ == "Observation" for entry in machine.log)
    wanted = {
        "select", "__getitem__", "narrow", "view", "reshaped", "permute", "transpose", "unsqueeze",
        "squeeze", "expand", "diagonal", "unfold", "split", "chunk", "unbind", "detach", "data",
        "add_", "mul_", "copy_", "fill_", "zero_", "index_put_", "masked_fill_", "clamp_",
        "__setitem__", "copy_host", "addcmul_", "torch.add", "torch.neg", "cast", "set_data", "leaf",
        "set_", "swap", "resize_", "transpose_", "detach_", "run_backward", "gradients", "descend",
        "sync", "observe", "text", "read_item", "drop", "rebind", "garbage", "capture",
    }  # fmt: skip
    assert not wanted - used
    # refusals are part of PyTorch's semantics, but must not be most of what is compared
    assert 10 < raised < observed / 5


def test_a_wrong_operator_is_found_and_made_small(monkeypatch):
    def unchanged(args, kwargs):
        return tensor_module.handler_of(torch.ops.aten.clone.default)(args, kwargs)

    monkeypatch.setitem(tensor_module.handlers, id(torch.ops.aten.neg.default), unchanged)
    failing = next(p for p in map(make_program, range(300)) if run(p) is not None)
    small = shrink(failing, lambda program: run(program) is not None)
    assert any("neg" in i.target for i in small.body)
    assert len(small.body) <= 3 <= len(failing.body)
    assert small.iterations == 1
