"""Finding loops in synthetic sequences: forward and backward passes, values kept, values that cut loops short."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xla_core.lowering.loops.items import Build, Carried, Element, Invariant, Lifts, Loop, Take
from xla_core.lowering.loops.search import find_loops
from xla_core.lowering.repeats.items import CostModel
from xla_core.testing.operation_sequences import (
    Sequence,
    halved_layers,
    layers,
    planted,
    rows_of_layers,
)

EAGER = CostModel(min_weight=2.0, min_saving=1.0)


def read(source, index, carried, env, stacks):
    if isinstance(source, Invariant):
        return env[source.value]
    if isinstance(source, Lifts):
        return env[source.numbers[index]]
    if isinstance(source, Element):
        return stacks[source.stack][source.first + source.step * index]
    return carried[source]


def compute(nodes, env):
    for node in nodes:
        operands = tuple(env[v] for v in node.operands)
        for position, value in enumerate(node.results):
            env[value] = hash((node.key, position, operands))


def run_loop(loop, env, stacks):
    sources = loop.sources.values()
    carried = {s: env[s.first] for s in sources if isinstance(s, Carried)}
    stacks |= {stack: [] for _, stack in loop.kept}
    for index in range(loop.trips):
        inner = {v: read(s, index, carried, env, stacks) for v, s in loop.sources.items()}
        compute(loop.body, inner)
        for value, stack in loop.kept:
            stacks[stack].append(inner[value])
        carried = {s: inner[s.result] for s in carried}
    env.update((outside, inner[value]) for value, outside in loop.last.items())


def run(steps, env):
    """What steps compute, as nested hashes: equal if and only if all keys and operands are."""
    stacks = {}
    for step in steps:
        if isinstance(step, Loop):
            run_loop(step, env, stacks)
        elif isinstance(step, Build):
            stacks[step.stack] = [env[v] for v in step.stack.elements]
        elif isinstance(step, Take):
            env[step.value] = stacks[step.stack][step.index]
        else:
            compute([step], env)


def check(sequence, wanted, model=None, trips=2, inner=()):
    """The loops of a sequence, and its other steps, after a check that it computes the wanted values as before."""
    model = model or CostModel()
    steps = find_loops(sequence.nodes, wanted, trips, model, lambda draft: True, inner)
    computed = {value for node in sequence.nodes for value in node.results}
    inputs = {v: v for node in sequence.nodes for v in node.operands if v not in computed}
    before, after = dict(inputs), dict(inputs)
    compute(sequence.nodes, before)
    run(steps or sequence.nodes, after)
    assert [after[v] for v in wanted] == [before[v] for v in wanted]
    loops = [step for step in steps if isinstance(step, Loop)]
    assert bool(loops) == bool(steps)
    return loops, [step for step in steps if not isinstance(step, Loop)]


def training(count, saved_of):
    """Layers, a loss, and layers in reverse that read ``saved_of`` each layer; the parameters' gradients."""
    sequence, saved = Sequence(100), []
    x = 0
    for layer in range(count):
        begin = x
        x = sequence.block(x, 1 + layer)
        saved.append(saved_of(begin, x))
    gradient = sequence.add("loss", x)
    gradients = []
    for layer in reversed(range(count)):
        gradient = sequence.block(gradient, saved[layer], "zyxwvutsrqpo")
        gradients.append(sequence.add("weight", gradient, 1 + layer))
    return sequence, gradients


def test_equal_layers_are_one_loop():
    sequence, x = layers(12)
    (loop,), others = check(sequence, [x])
    assert (loop.trips, len(loop.body)) == (12, 14)
    assert sorted(type(s).__name__ for s in loop.sources.values()) == ["Carried", "Element"]
    assert loop.kept == []  # only the last layer's result is wanted
    assert [type(step) for step in others] == [Build]


@pytest.mark.parametrize(
    "saved_of", [lambda begin, end: begin, lambda begin, end: end], ids=["inputs", "results"]
)
def test_backward_reads_what_forward_kept_in_reverse(saved_of):
    sequence, gradients = training(10, saved_of)
    (forward, backward), others = check(sequence, gradients)
    assert (forward.trips, backward.trips) == (10, 10)
    ((_, kept),) = forward.kept
    builds = [step.stack for step in others if isinstance(step, Build)]
    reads = {s.stack: s.step for s in backward.sources.values() if isinstance(s, Element)}
    # parameters are stacked once, for both; what is saved comes from the first loop's stack
    assert reads.pop(builds[0]) == -1
    assert (builds[1:], reads) == ([], {kept: -1})
    assert sum(isinstance(step, Take) for step in others) == len(gradients)


def test_what_an_iteration_begins_with_is_kept_once():
    sequence, gradients = training(10, lambda begin, end: begin)
    (forward, _), _ = check(sequence, gradients)
    ((value, stack),) = forward.kept
    assert isinstance(forward.sources[value], Carried)
    assert stack.elements[0] == 0  # the first layer's input, which no iteration computes


def test_middle_values_and_the_last_one_alone():
    sequence, middles, x = halved_layers(8)
    (loop,), others = check(sequence, [*middles[2:4], x])
    assert sum(isinstance(step, Take) for step in others) == 2
    (loop,), others = check(sequence, [middles[-1], x])
    assert (len(loop.kept), len(loop.last)) == (0, 2)
    assert not any(isinstance(step, Take) for step in others)


def test_values_in_another_order_are_stacked_again():
    sequence, saved = Sequence(100), []
    x = 0
    for layer in range(8):
        x = sequence.block(x, 1 + layer)
        saved.append(x)
    y = sequence.add("between", x)
    for layer in (3, 1, 4, 0, 5, 2, 7, 6):
        y = sequence.block(y, saved[layer], "zyxwvutsrqpo")
    loops, others = check(sequence, [y])
    assert len(loops) == 2
    assert sum(isinstance(step, Build) for step in others) == 2
    assert sum(isinstance(step, Take) for step in others) == 7  # the last one is the loop's result


def test_every_second_value_of_a_loop():
    sequence, saved = Sequence(100), []
    x = 0
    for layer in range(12):
        x = sequence.block(x, 1 + layer)
        saved.append(sequence.add("saved", x))
    y = sequence.add("between", x)
    for layer in range(0, 12, 2):
        y = sequence.block(y, saved[layer], "zyxwvutsrqpo")
    (_, second), others = check(sequence, [y])
    assert [s.step for s in second.sources.values() if isinstance(s, Element)] == [2]
    assert sum(isinstance(step, Build) for step in others) == 1


def test_a_value_of_two_iterations_before_is_not_carried():
    sequence = Sequence(16)
    x, before = 0, [0, 0, 0]
    for layer in range(8):
        before = [x, *before[:2]]
        x = sequence.block(sequence.add("both", x, before[-1]), 1 + layer)
    assert check(sequence, [x]) == ([], [])


def test_a_value_of_the_iteration_before_is_carried_past_this_one():
    sequence = Sequence(16)
    before = x = 0
    for layer in range(8):
        before, x = x, sequence.block(sequence.add("both", x, before), 1 + layer)
    (loop,), _ = check(sequence, [x])
    assert loop.trips == 7  # it begins after "both", which reads what both iterations give


def test_several_values_are_carried():
    sequence = Sequence(40)
    h, c = 0, 1
    for step in range(12):
        gates = sequence.block(h, 2 + step, "abcdefgh")
        c = sequence.block(c, gates, "ijklmn")
        h = sequence.add("out", c, gates)
    (loop,), _ = check(sequence, [h, c])
    assert sum(isinstance(s, Carried) for s in loop.sources.values()) == 2
    assert len(loop.last) == 2


def test_lifted_numbers_differ_or_not():
    sequence = Sequence(16)
    x = 0
    for layer in range(8):
        x = sequence.block(sequence.add("scale", x, -1, -2 - layer), 1 + layer)
    (loop,), _ = check(sequence, [x])
    sources = {v: s for v, s in loop.sources.items() if v < 0}
    assert sources[-1] == Invariant(-1)
    assert [s.numbers for s in sources.values() if isinstance(s, Lifts)] == [
        tuple(range(-2, -10, -1))
    ]


def test_first_and_last_layers_that_differ_stay_outside():
    sequence = Sequence(16)
    x = 0
    for layer in range(10):
        keys = "abcdefghijklmn" if 0 < layer < 9 else "abcdefghijklm" + str(layer)
        x = sequence.block(x, 1 + layer, keys)
    (loop,), others = check(sequence, [x])
    assert loop.trips >= 8
    assert {step.key for step in others if hasattr(step, "key")} >= {"0", "9"}


def test_too_few_iterations_or_too_short():
    sequence, x = layers(12)
    assert check(sequence, [x], trips=13) == ([], [])
    short = Sequence(16)
    x = 0
    for layer in range(8):
        x = short.block(x, 1 + layer, "abc")
    assert check(short, [x]) == ([], [])


def test_a_value_that_must_not_cross_moves_or_ends_the_loop():
    sequence = Sequence(40)
    x, begun, inner = 0, [], []
    for layer in range(8):
        x = sequence.add("begin", x)
        begun.append(x)
        inner.append(x)
        for key in "abcdefgh":
            x = sequence.add(key, x, 1 + layer)
            inner.append(x)
        x = sequence.block(sequence.add("end", x), 1 + layer)
    (loop,), _ = check(sequence, [x], inner=inner)
    carried = [s for s in loop.sources.values() if isinstance(s, Carried)]
    assert not any(s.result in inner or s.first in inner for s in carried)
    # a region that spans all layers is in no loop
    assert check(sequence, [x], inner=[v for n in sequence.nodes for v in n.results]) == ([], [])
    # one that leaves its layer, neither
    late = sequence.add("late", *begun)
    assert check(sequence, [x, late], inner=inner) == ([], [])


def test_a_loop_that_does_not_pay_leaves_the_others():
    sequence, gradients = training(10, lambda begin, end: begin)
    for gradient in gradients:
        gradients[gradients.index(gradient)] = sequence.block(gradient, 99, "0123456789ABC")
    every, _ = check(sequence, gradients)
    model = CostModel()
    steps = find_loops(
        sequence.nodes, gradients, 2, model, lambda d: d.body[0].key not in "0123456789ABC"
    )
    assert len(every) == 3
    assert sum(isinstance(step, Loop) for step in steps) == 2


@pytest.mark.parametrize("example", [planted, rows_of_layers])
@settings(max_examples=300, deadline=None)
@given(st.randoms(use_true_random=False))
def test_random_sequences_compute_the_same(example, source):
    check(*example(source), EAGER)


@pytest.mark.parametrize("period", [14, 100])
def test_long_sequences(period):
    sequence = Sequence(4)
    x = 0
    for position in range(40_000):
        x = sequence.add(position % period, x, position % 3)
    loops, others = check(sequence, [x])
    assert sum(loop.trips * len(loop.body) for loop in loops) >= 39_000 or not others
