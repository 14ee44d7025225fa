"""Finding repeats in synthetic sequences: planted, nearly equal, overlapping, long."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xla_core.lowering.repeats.items import Call, CostModel
from xla_core.lowering.repeats.search import find_repeats
from xla_core.testing.operation_sequences import Sequence, halved_layers, layers, planted

EAGER = CostModel(min_weight=2.0, min_saving=1.0, per_call=0.0)


def run(items, env):
    """What items compute, as nested tuples: equal if and only if all keys and operands are."""
    for item in items:
        if isinstance(item, Call):
            function = item.function
            inner = dict(zip(function.parameters, (env[v] for v in item.operands), strict=True))
            run(function.body, inner)
            env.update(zip(item.results, (inner[v] for v in function.results), strict=True))
        else:
            operands = tuple(env[v] for v in item.operands)
            for position, value in enumerate(item.results):
                env[value] = hash((item.key, position, operands))


def check(sequence, wanted, model=None):
    """The plan for a sequence, after a check that it computes the wanted values as before."""
    plan = find_repeats(sequence.nodes, wanted, model or CostModel())
    made = {value for node in sequence.nodes for value in node.results}
    inputs = {v: v for node in sequence.nodes for v in node.operands if v not in made}
    before, after = dict(inputs), dict(inputs)
    run(sequence.nodes, before)
    run(plan.items, after)
    assert [after[v] for v in wanted] == [before[v] for v in wanted]
    return plan


def test_equal_layers_become_one_function():
    sequence, x = layers(12)
    plan = check(sequence, [x])
    (function,) = plan.functions
    assert len(function.body) == 14
    assert len(plan.items) == 12
    assert function.calls == 12
    assert len(function.parameters) == 2
    assert len(function.results) == 1


def test_nothing_repeats():
    sequence = Sequence()
    x = 0
    for key in range(300):
        x = sequence.add(key, x)
    plan = check(sequence, [x])
    assert plan.items == sequence.nodes
    assert plan.functions == []


def test_short_and_rare_repeats_are_left_alone():
    sequence = Sequence()
    for _ in range(50):  # a run of two, often
        sequence.add(object(), sequence.add("b", sequence.add("a", 0)))
    assert find_repeats(sequence.nodes, [sequence.values - 1]).functions == []
    sequence = Sequence()
    x = sequence.block(sequence.add("other", sequence.block(0, 1)), 2)  # a long one, twice
    assert find_repeats(sequence.nodes, [x]).functions == []
    assert len(find_repeats(sequence.nodes, [x], CostModel(min_saving=5.0)).functions) == 1


def test_backward_in_reverse_order_reads_values_of_each_forward():
    sequence, saved = Sequence(40), []
    x = 0
    for layer in range(10):
        kept = x = sequence.block(x, 1 + layer)
        saved.append(kept)
    gradient = sequence.add("loss", x)
    results = []
    for layer in reversed(range(10)):
        gradient = sequence.block(gradient, saved[layer], "zyxwvutsrqpo")
        results.append(sequence.add("weight", gradient, saved[layer]))
    plan = check(sequence, results)
    assert sorted(f.calls for f in plan.functions) == [10, 10]
    assert len(plan.items) == 21


def test_values_needed_later_are_results():
    sequence, middles, x = halved_layers(8)
    late = sequence.add("sum", *middles)
    plan = check(sequence, [late, x])
    (function,) = plan.functions
    assert len(function.results) == 2


def test_a_value_needed_of_one_occurrence_only_is_a_result_of_all():
    sequence = Sequence(16)
    x = 0
    for layer in range(8):
        x = sequence.block(x, 1 + layer, "abcdefg")
        middle = x if layer == 3 else 0
        if middle:
            third = middle
        x = sequence.block(x, 1 + layer, "hijklmn")
    plan = check(sequence, [x, third])
    (function,) = plan.functions
    assert function.calls == 8
    assert len(function.results) == 2


@pytest.mark.parametrize("odd", [0, 5, 11])
def test_one_other_constant_is_no_occurrence(odd):
    sequence = Sequence(16)
    x = 0
    for layer in range(12):
        keys = list("abcdefghijklmnopqrstuvwx")
        if layer == odd:
            keys[20] = ("u", 2.0)  # another constant or another shape: another key
        x = sequence.block(x, 1 + layer, keys)
    plan = check(sequence, [x])
    ((function, calls),) = ((f, f.calls) for f in plan.functions if len(f.body) > 12)
    assert calls == 11
    assert ("u", 2.0) in [item.key for item in plan.items]
    assert all(item.key != ("u", 2.0) for item in function.body)


def test_one_other_edge_is_no_occurrence():
    sequence = Sequence(16)
    x = 0
    for layer in range(12):
        x = first = sequence.block(x, 1 + layer, "abcdefgh")
        x = second = sequence.block(x, 1 + layer, "ijklmnop")
        x = sequence.add("add", x, first if layer != 7 else second)
    plan = check(sequence, [x])
    assert max(f.calls for f in plan.functions if len(f.body) == 17) in (10, 11)


def test_the_same_outer_value_twice_or_two_values():
    sequence = Sequence(16)
    x = 0
    for layer in range(8):
        x = sequence.block(x, 1 + layer)
        x = sequence.add("both", x, 1 + layer, 1 + layer if layer % 2 else 9)
    plan = check(sequence, [x])
    (function,) = plan.functions
    assert function.calls == 8
    assert len(function.parameters) == 3


def test_repeats_within_repeats():
    sequence = Sequence(16)
    x = 0
    for micro in range(6):
        for layer in range(8):
            x = sequence.block(x, 1 + layer)
        x = sequence.block(x, 10, [f"head {i}" for i in range(30)])
        x = sequence.add(f"step {micro}", x)
    plan = check(sequence, [x])
    assert len(plan.functions) == 2
    inner, outer = sorted(plan.functions, key=lambda f: -f.calls)
    assert sum(isinstance(item, Call) and item.function is inner for item in outer.body) == 8


def test_overlapping_repeats():
    # "abab...": every position begins a repeat that overlaps the next one's
    sequence = Sequence()
    x = 0
    for _ in range(500):
        x = sequence.add("b", sequence.add("a", x))
    plan = check(sequence, [x])
    (function,) = plan.functions
    assert len(function.body) == 12
    assert len(plan.items) < 100


def test_operators_with_several_results():
    sequence = Sequence(16)
    x, firsts = 0, []
    for layer in range(8):
        mean, variance, _unused = sequence.add_several("norm", x, 1 + layer, results=3)
        x = sequence.block(variance, mean)
        firsts.append(mean)
    plan = check(sequence, [x, *firsts])
    (function,) = plan.functions
    assert function.calls == 8
    assert len(function.results) == 2


def test_equal_input_gives_equal_plans():
    def shape(items):
        return [(i.function.index, i.operands) if isinstance(i, Call) else i.key for i in items]

    first, x = layers(20)
    second, _ = layers(20)
    assert shape(check(first, [x]).items) == shape(check(second, [x]).items)


@settings(max_examples=300, deadline=None)
@given(st.randoms(use_true_random=False))
def test_random_sequences_compute_the_same(source):
    plan = check(*planted(source), EAGER)
    for function in plan.functions:
        assert function.calls > 1


LONG = 100_000


def long_layers():
    return [key for _ in range(LONG // 100) for key in range(100)]


def long_random():
    source = random.Random(0)
    return [source.randrange(50) for _ in range(LONG)]


def long_mixture():
    source = random.Random(1)
    blocks = [[source.randrange(60) for _ in range(source.randrange(20, 400))] for _ in range(40)]
    keys: list[int] = []
    while len(keys) < LONG:
        keys += source.choice(blocks)
    return keys


def long_nested():
    layer = list(range(100))
    return [k for _ in range(LONG // 5000) for k in layer * 24 + [200] + layer[::-1] * 24 + [300]]


@pytest.mark.parametrize(
    ("keys", "left"),
    [
        (long_layers(), 1_200),
        (long_random(), LONG),
        (long_mixture(), 1_000),
        (long_nested(), 100),
        ([0] * LONG, 9_000),
        (list(range(LONG)), LONG),
    ],
    ids=["layers", "random", "mixture", "nested", "one operator", "all different"],
)
def test_work_is_linear(keys, left):
    sequence = Sequence()
    x = 0
    for key in keys:
        x = sequence.add(key, x)
    plan = find_repeats(sequence.nodes, [x])
    # Positions looked at, over all rounds; counted rather than timed, as machines are shared.
    assert plan.work < 20 * len(keys)
    assert len(plan.items) <= left
