"""What code names counts if it is on a line that a call has run, also where the code computes the names."""

from __future__ import annotations

import operator
import sys
import types

import pytest
import torch

from torch_xla.experimental.capture import CaptureError, capture
from xla_core.support import counters


def recorded(function):
    """``function``, captured and replayed."""
    step = capture(function)
    for _ in range(4):
        step(torch.ones(2, device="xla"))
    assert step.recordings == 1
    return step


def replays():
    return counters.all_counters().get("CapturedStepReplayed", 0)


def refuses(step, match):
    with pytest.raises(CaptureError, match=match):
        step(torch.ones(2, device="xla"))


class Model:
    def __init__(self):
        self.alpha = 2.0
        self.beta = 3.0
        self.layer0 = 5.0
        self.first_scale = 7.0
        self.names = ["alpha", "beta"]
        self.weights = {"alpha": 1.0, "beta": 2.0}
        self.unused = 0


ALPHA = operator.attrgetter("alpha")


def with_names_in_the_code(m, x):
    for name in ("alpha", "beta"):
        x = x * getattr(m, name)
    return x


def with_names_of_an_attribute(m, x):
    for name in m.names:
        x = x * getattr(m, name)
    return x


def with_names_as_keys(m, x):
    return x * sum(m.__dict__[name] for name in m.names)


def with_names_that_are_keys(m, x):
    return x * sum(weight * getattr(m, name) for name, weight in m.weights.items())


def with_a_getter(m, x):
    return x * ALPHA(m)


def with_names_that_begin(m, x):
    return x * sum(value for name, value in vars(m).items() if name.startswith("al"))


def with_a_number(m, x):
    for number in range(1):
        x = x * getattr(m, f"layer{number}")
    return x


def with_a_number_later(m, x):
    name = "layer%d" % 0  # noqa: UP031 - old code builds names so
    return x * getattr(m, name)


def with_a_sum(m, x):
    name = "layer" + str(0)
    return x * getattr(m, name)


def with_an_end(m, x):
    for which in ["first"]:
        x = x * getattr(m, f"{which}_scale")
    return x


def in_a_comprehension(m, x):
    return x * sum([getattr(m, f"layer{number}") for number in range(1)])


LOOK_UPS = [
    (with_names_in_the_code, "beta"), (with_names_of_an_attribute, "beta"), (with_names_as_keys, "beta"),
    (with_names_that_are_keys, "beta"),
    (with_a_getter, "alpha"), (with_names_that_begin, "alpha"), (with_a_number, "layer0"),
    (with_a_number_later, "layer0"), (with_a_sum, "layer0"), (with_an_end, "first_scale"),
    (in_a_comprehension, "layer0"),
]  # fmt: skip


@pytest.mark.parametrize(("function", "name"), LOOK_UPS)
def test_a_number_that_is_looked_up_by_a_computed_name(function, name):
    model = Model()
    step = recorded(lambda x: function(model, x))
    model.unused = 1
    x = torch.ones(2, device="xla")
    assert step(x).tolist() == function(model, x).tolist()
    setattr(model, name, 11.0)
    refuses(step, f"{name} was .* and is now 11.0")


class Trainer:
    def __init__(self):
        self.scale = 2.0
        self.reports = False
        self.count = 0
        self.total = 0

    def step(self, x):
        if self.reports:
            self.count += 1
        elif self.reports is None:
            self.total = self.count
        return x * self.scale


def test_what_a_branch_names_that_was_not_taken_may_change():
    trainer = Trainer()
    step = recorded(trainer.step)
    before = replays()
    trainer.count, trainer.total = 5, 7
    assert step(torch.ones(2, device="xla")).tolist() == [2.0, 2.0]
    assert replays() == before + 1
    trainer.reports = True
    refuses(step, "reports was False .* and is now True")


def test_a_branch_that_is_taken_later_is_looked_at():
    """Its side effect came with the last recorded call, and would be missing from replays."""
    trainer = Trainer()
    step = capture(trainer.step)
    for reports in (False, False, True):
        trainer.reports = reports
        step(torch.ones(2, device="xla"))
    assert step.recordings == 0
    refuses(step, "changes .*count from 1 to 2")


@pytest.mark.parametrize("reports", [False, True])
def test_a_line_of_a_nested_function(reports):
    options = types.SimpleNamespace(reports=reports, scale=2.0, offset=1.0)

    def step(x):
        def scaled():
            if options.reports:
                return x * options.scale
            return x + options.offset

        return scaled()

    step = recorded(step)
    options.offset += reports
    options.scale += not reports
    step(torch.ones(2, device="xla"))
    options.offset, options.scale = 4.0, 4.0
    refuses(step, "scale was 2.0" if reports else "offset was 1.0")


def test_items_of_an_attributes_dictionary_are_watched():
    """Code may go through its own attributes as a dictionary's items, if the object is that dictionary."""

    class Options(dict):
        def __init__(self, **items):
            super().__init__(**items)
            self.__dict__ = self

    options = Options(scale=2.0, offset=1.0)
    step = recorded(lambda x: x * sum(options.values()))
    options["offset"] = 5.0
    refuses(step, "offset.* was 1.0 .* and is now 5.0")


def test_of_attributes_that_objects_share_only_those_that_code_names_are_watched():
    """As the states of accelerate, whose list of data loaders is another one in each epoch."""

    class State:
        _everything = {"scale": 2.0, "loaders": [1]}

        def __init__(self):
            self.__dict__ = self._everything

    state = State()
    step = recorded(lambda x: x * (state.scale + State().scale) / 2)
    State._everything["loaders"] = [2]
    assert step(torch.ones(2, device="xla")).tolist() == [2.0, 2.0]
    State._everything["scale"] = 3.0
    refuses(step, "scale.* was 2.0 .* and is now 3.0")


SETTINGS = types.SimpleNamespace(scale=2.0)


class Scaler:
    def __init__(self, times=1):
        self.scale = SETTINGS.scale * times


def test_what_reads_a_number_when_it_is_made():
    step = recorded(lambda x: x * Scaler().scale)
    try:
        SETTINGS.scale = 3.0
        refuses(step, "scale was 2.0 .* and is now 3.0")
    finally:
        SETTINGS.scale = 2.0


def debugger(_frame, _event, _argument):
    return None


@pytest.fixture
def traced():
    """What traces this thread, and is put back."""
    before = sys.gettrace()
    yield before
    sys.settrace(before)


def test_beside_a_debugger_all_lines_count(traced):
    trainer = Trainer()
    sys.settrace(debugger)
    step = recorded(trainer.step)
    assert sys.gettrace() is debugger
    assert sys.getprofile() is None
    sys.settrace(traced)
    trainer.count = 5
    refuses(step, "count was 0 .* and is now 5")


def test_beside_a_debugger_and_a_profiler_all_code_counts(traced):
    trainer = Trainer()

    def report():
        return trainer.total

    sys.settrace(debugger)
    sys.setprofile(debugger)
    try:
        step = recorded(lambda x: trainer.step(x) if trainer.scale else report())
        assert sys.gettrace() is debugger
        assert sys.getprofile() is debugger
    finally:
        sys.setprofile(None)
    sys.settrace(traced)
    trainer.total = 5
    refuses(step, "total was 0 .* and is now 5")


def test_a_debugger_that_begins_inside_the_step_goes_on(traced):
    trainer = Trainer()

    def step(x):
        sys.settrace(debugger)
        return trainer.step(x)

    step = recorded(step)
    assert sys.gettrace() is debugger
    sys.settrace(traced)
    trainer.scale = 5.0
    refuses(step, "scale was 2.0 .* and is now 5.0")


def test_nothing_traces_after_the_step(traced):
    recorded(Trainer().step)
    assert sys.gettrace() is traced
    assert sys.getprofile() is None
