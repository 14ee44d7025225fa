"""Random programs with one or two varying dimensions give what PyTorch gives, whatever is in the padding."""

from __future__ import annotations

import pytest
from torch.testing._internal.common_methods_invocations import op_db

from xla_core.support import caches
from xla_core.testing.lengths import operations, operators, programs
from xla_core.varying.padded import Frame

# Programs of random operations take the variance of one number, and the like; what they give is compared.
pytestmark = pytest.mark.filterwarnings("ignore")

NORMAL, SWEEP = 40, 2000


@pytest.fixture(autouse=True)
def few_limits(monkeypatch):
    monkeypatch.setenv("XLA_VARYING_LIMITS", programs.LIMITS)


def check(seeds):
    served = 0
    for seed in seeds:
        program = programs.make_program(seed)
        found = programs.outcome(program)
        caches.clear_all()
        served += found.served
        if found.difference is not None:
            pytest.fail(f"{programs.smaller(program)}\n{found.difference}")
    return served


@pytest.mark.parametrize("first", range(0, NORMAL, 10))
def test_random_programs_are_served_exactly(first, varying):
    with programs.only_served():
        assert check(range(first, first + 10)) > 15


def test_steps_that_are_compiled_for_themselves_are_exact_too(varying):
    assert check(range(10_000, 10_005)) > 5


@pytest.mark.sweep
@pytest.mark.parametrize("first", range(NORMAL, SWEEP, 40))
def test_many_random_programs_are_served_exactly(first, varying):
    with programs.only_served():
        check(range(first, first + 40))


def test_a_seed_is_a_program():
    assert programs.make_program(7) == programs.make_program(7)
    assert programs.make_program(7) != programs.make_program(8)


def test_the_programs_cover_what_they_are_for():
    made = [programs.make_program(seed) for seed in range(400)]
    used = {line.name for program in made for line in program.lines}
    assert not {*operations.UNARY, *operations.BINARY} - used
    assert any(program.backward for program in made)
    two = [p for p in made if len(p.assignments()[0]) == 2]
    assert 60 < len(two) < 240


def test_reading_the_padding_is_found_and_made_small(varying, monkeypatch):
    monkeypatch.setattr(Frame, "masked", lambda self, value, axes, fill: value)
    with programs.only_served():
        failing = next(p for p in map(programs.make_program, range(40)) if differs(p))
        small = programs.smaller(failing)
        assert differs(small)
    assert len(small.lines) <= len(failing.lines)
    assert len(small.results) == 1


def differs(program):
    caches.clear_all()
    return programs.outcome(program).difference is not None


def test_samples_that_need_no_program_are_not_kept_out(varying):
    # most of the database's samples of dropout drop nothing, or are those of evaluation
    (dropout,) = (op for op in op_db if op.name == "nn.functional.dropout")
    with programs.only_served():
        verdict = operators.verdict(dropout, backward=True)
    assert (verdict.how, verdict.why) == ("served", "")
    assert verdict.served == verdict.tried > 0
