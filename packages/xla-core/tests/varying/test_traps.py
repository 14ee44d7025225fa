"""What looks like a length that varies and is not: such steps are compiled for themselves, and are right."""

from __future__ import annotations

import logging

import pytest
import torch

import torch_xla
from xla_core.compilation import program_table
from xla_core.varying import families

LENGTHS = (5, 9, 7, 12, 6, 11)


def rows(length):
    return (torch.arange(4.0 * length).reshape(length, 4).sin(),)


def test_a_size_that_is_a_value_is_the_true_one(run_lengths):
    assert run_lengths(lambda x: x.sum() / x.shape[0] + x.shape[0] * 2, rows, LENGTHS) == 4


def test_a_size_in_a_number_that_is_no_size(run_lengths):
    # the power is a constant of the program, and no whole multiple of the length
    served = run_lengths(lambda x: x.abs() ** (1 / x.shape[0]), rows, LENGTHS)
    assert served == 0


def test_a_branch_on_the_length(run_lengths):
    def step(x):
        return x.cos() * 2 if x.shape[0] > 8 else x.sin()

    assert run_lengths(step, rows, LENGTHS) == 2  # three steps each way, the first two compiled


def test_a_branch_that_only_changes_a_number(run_lengths):
    # how much is taken is a second length then, whatever it follows from
    run_lengths(lambda x: x[: 3 if x.shape[0] > 8 else 2] * 2, rows, LENGTHS)
    assert not families.kept_out()


def test_lengths_that_are_equal_by_chance(run_lengths):
    sizes = {5: 5, 9: 9, 7: 4, 12: 12, 6: 3, 11: 8}

    def two(length):
        return torch.ones(length, 1), torch.ones(1, sizes[length]).cumsum(1)

    served = run_lengths(lambda x, y: (x * y).sum(0) + y.mean(), two, LENGTHS)
    assert served == 4


def test_a_length_that_is_equal_to_a_fixed_size(run_lengths):
    # at length 4 the operand is a square matrix, and at length 3 cross() could mean another dimension
    lengths = (5, 9, 4, 3, 6, 4)
    run_lengths(lambda x: x @ x.t() @ x, rows, lengths)
    run_lengths(lambda x: torch.linalg.cross(x[:, :3], x[:, 1:]), rows, lengths)


def test_lengths_of_nothing_and_one_have_their_own_programs(run_lengths):
    assert run_lengths(lambda x: x * 2 + x.sum(0), rows, (5, 9, 0, 1, 7, 2)) == 2


def test_a_length_beyond_the_bound_gets_another_program(run_lengths, counted):
    before = counted(families.PROGRAMS)
    assert run_lengths(lambda x: x.softmax(0).tan(), rows, (5, 9, 7, 200, 180)) == 3
    assert counted(families.PROGRAMS) - before == 2


def test_the_user_says_up_to_which_lengths(run_lengths, counted, monkeypatch):
    monkeypatch.setenv("XLA_VARYING_LIMITS", "100, 10")
    before = counted(families.PROGRAMS)
    assert run_lengths(lambda x: x.softmax(0).cosh(), rows, (5, 9, 7, 8, 200, 80, 101)) == 3
    assert counted(families.PROGRAMS) - before == 2


def test_a_rule_that_computes_otherwise_above_a_size(run_lengths, counted):
    def step(x):
        return torch.cdist(x, x[:7])

    def many(length):
        return (torch.randn(length, 4, dtype=torch.float64),)

    # above 25 rows PyTorch records a product of matrices, another step
    before = counted(families.PROGRAMS)
    assert run_lengths(step, many, (20, 22, 23, 25, 24, 30, 40, 35, 33)) == 5, families.kept_out()
    assert counted(families.PROGRAMS) - before == 3


def test_a_table_that_ends_before_the_bound(run_lengths):
    table = torch.randn(13, 4)

    def step(x, table):
        return x + table[: x.shape[0]]

    assert run_lengths(step, lambda n: (*rows(n), table), LENGTHS) == 4


def test_a_table_that_ends_one_before_the_bound(run_lengths, counted):
    table = torch.randn(15, 4)

    def step(x, table):
        return torch.cat([x, x[:1]]) + table[: x.shape[0] + 1] * 3

    before = counted(families.PROGRAMS)
    # for 13 a program for up to 14, neither 16 nor 15
    assert run_lengths(step, lambda n: (*rows(n), table), (5, 9, 7, 13, 6, 11)) == 4
    assert counted(families.PROGRAMS) - before == 2


def test_a_comparison_with_the_length_says_which_lengths_share_a_program(run_lengths, counted):
    def step(x):
        # the bounds are 8 and 32: the buffer has no more than 30 places, and an index below 4 counts from the end
        buffer = torch.zeros(30, 4, device=x.device)
        buffer[: x.shape[0]] = x
        return buffer.cumsum(0)[x.shape[0] - 4] + x.sum(0)

    before = counted(families.PROGRAMS)
    assert run_lengths(step, rows, (5, 9, 7, 29, 25, 6)) == 4, families.kept_out()
    # from 4 to 8, and from 4 to 30
    assert counted(families.PROGRAMS) - before == 2


def test_a_truth_value_that_fills_a_tensor_is_no_other_step(run_lengths, counted):
    def step(x):
        last = torch.full((3,), x.shape[0] > 8, dtype=torch.bool, device=x.device)
        return last | torch.zeros_like(last), x.cumsum(0)

    before = counted(families.PROGRAMS)
    assert run_lengths(step, rows, (5, 9, 7, 12, 6, 11)) == 4
    assert counted(families.PROGRAMS) - before == 2


def test_two_lengths_that_follow_each_other_may_be_a_cache_that_grows(run_lengths, counted):
    before = counted(families.PROGRAMS)
    # the second is served already; the third shows that they do not grow
    assert run_lengths(lambda x: x.cumsum(0) - 1, rows, (300, 301, 40, 20)) == 3
    assert counted(families.PROGRAMS) - before == 2


def test_a_length_that_is_written_in_place_and_read_later(run_lengths):
    def step(x):
        y = x.clone()
        y[1:-1].mul_(3.0)
        y[:, 1] = x[:, 0]
        return y.sum(0) + y[-1]

    assert run_lengths(step, rows, LENGTHS) == 4, families.kept_out()


def test_results_that_vary_go_into_the_next_step(varying, counted):
    before, programs = counted(families.SERVED), counted(families.PROGRAMS)
    total = torch.zeros(0, 4, device="xla")
    for length in range(1, 41):
        total = torch.cat([total, torch.full((1, 4), float(length), device="xla")])
        torch_xla.sync()
    assert torch.equal(total.cpu()[:, 0], torch.arange(1.0, 41.0))
    # sizes of 0 and 1 are compiled, and two more; a length that grows one by one gets room
    assert counted(families.SERVED) - before >= 35
    assert counted(families.PROGRAMS) - programs == 1


def test_nothing_happens_to_steps_that_do_not_vary(varying, monkeypatch):
    x = torch.randn(6, 4, device="xla")
    for _ in range(2):
        y = x * 5 - 1
        torch_xla.sync()
    looked = []
    monkeypatch.setattr(families, "serve", lambda *_: looked.append(1))
    y = x * 5 - 1
    torch_xla.sync()
    assert not looked
    assert y.shape == (6, 4)


def test_it_is_off_unless_asked_for(run_lengths, monkeypatch):
    monkeypatch.delenv("XLA_VARYING_SHAPES")
    assert run_lengths(lambda x: x.exp(), rows, LENGTHS) == 0


def test_what_keeps_a_step_out_is_named(run_lengths, caplog, counted):
    caplog.set_level(logging.INFO, "xla_core.varying.families")
    before = counted(families.KEPT_OUT)
    assert run_lengths(lambda x: x.reshape(2, -1, 2).sum(1), rows, LENGTHS) == 0
    assert counted(families.KEPT_OUT) == before + 1
    (reason,) = families.kept_out()
    assert reason.startswith("aten.view.default at ") and "test_traps.py" in reason
    assert reason in caplog.text


@pytest.mark.parametrize("p", [0.5, 0.1])
def test_random_numbers_are_those_of_the_length_itself(varying, monkeypatch, p, counted):
    def steps():
        torch_xla.manual_seed(3)
        for length in LENGTHS:
            x = torch.ones(length, 4, device="xla")
            dropped = torch.nn.functional.dropout(x, p)
            y = dropped.sum(0), dropped, torch.rand(2, length, device="xla"), torch.randn_like(x)
            torch_xla.sync()
            yield [t.cpu() for t in y]

    before = counted(families.SERVED)
    served = list(steps())
    assert counted(families.SERVED) - before == 4, families.kept_out()
    monkeypatch.setenv("XLA_VARYING_SHAPES", "0")
    program_table.clear()  # those for the bound, so that each length gets its own
    for one, other in zip(served, steps(), strict=True):
        for a, b in zip(one[1:], other[1:], strict=True):
            assert torch.equal(a, b)


def test_other_steps_do_not_wait_while_a_program_is_compiled(run_python):
    # one device's program is not compiled before another device's, of another family, is there
    out = run_python(
        """
        import threading
        import torch, torch_xla
        from xla_core.execution import runtime
        from xla_core.varying import bound_program, families

        begun, done = threading.Event(), threading.Event()
        build = bound_program.build

        def slowly(step, *rest):
            if step.trace is waiting:
                begun.set()
                print(done.wait(100))
            return build(step, *rest)

        bound_program.build = slowly
        waiting = runtime.trace_of(torch.device("xla:0"))

        def run(device):
            for length in (5, 9, 7):
                x = torch.ones(length, 4, device=device).cumsum(0)
                runtime.sync(torch.device(device))
            print(float(x.sum()))

        thread = threading.Thread(target=run, args=("xla:0",))
        thread.start()
        begun.wait(100)
        run("xla:1")
        done.set()
        thread.join()
        """,
        CPU_NUM_DEVICES="2",
        XLA_VARYING_SHAPES="1",
    )
    assert out.split() == ["112.0", "True", "112.0"]
