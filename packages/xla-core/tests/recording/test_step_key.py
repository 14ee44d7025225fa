"""What an operation's operands are is read back from its key alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import torch_xla
from xla_core.execution import runtime
from xla_core.recording import step_key
from xla_core.recording.entry import operations_of
from xla_core.recording.step_key import Lift, Ref


@pytest.fixture
def recorded():
    """Call a function on two float32 tensors of shape (2, 3), and get the entries that it recorded."""

    def run(function):
        x, y = (torch.full((2, 3), value).to("xla") for value in (1.5, 2.5))
        torch_xla.sync()
        kept = function(x, y)
        entries = operations_of(runtime.trace_of(None).cur.path())
        torch_xla.sync()
        del kept
        return entries

    return run


def shown(a):
    """An operand as plain values: shapes of values, positions of lifted numbers, constants by type."""
    if isinstance(a, Ref):
        return ("value", a.vid, a.meta.shape)
    if isinstance(a, Lift):
        example = a.example if isinstance(a.example, (int, float)) else str(a.example)
        return ("lifted", a.is_float, a.position, example)
    if isinstance(a, list):
        return list(map(shown, a))
    return (type(a), repr(a)) if isinstance(a, (bool, int, float, complex, str)) else a


X, Y = ("value", 0, (2, 3)), ("value", 1, (2, 3))


@pytest.mark.parametrize(
    ("function", "args", "kwargs"),
    [
        (lambda x, y: x + y, [X, Y], {}),
        (lambda x, y: torch.add(x, y, alpha=0.3), [X, Y], {"alpha": ("lifted", True, 0, 0.5)}),
        (lambda x, y: x * 7, [X, ("lifted", False, 0, 2)], {}),
        (lambda x, y: x * torch.tensor(2.5), [X, ("lifted", True, 0, "float32[]")], {}),
        (lambda x, y: x * -0.0, [X, (float, "-0.0")], {}),
        (lambda x, y: x.sum([0], keepdim=True), [X, [(int, "0")], (bool, "True")], {}),
        (
            lambda x, y: x.sum(dtype=torch.float64),
            [X],
            {"dtype": torch.float64},
        ),
        (
            lambda x, y: torch.div(x, y, rounding_mode="floor"),
            [X, Y],
            {"rounding_mode": (str, "'floor'")},
        ),
        (lambda x, y: torch.cat([x, y, x], 1), [[X, Y, X], (int, "1")], {}),
        (
            lambda x, y: torch._foreach_add([x, y], [0.5, 0.5]),
            [[X, Y], [("lifted", True, 0, 0.5)] * 2],
            {},
        ),
        (
            lambda x, y: torch._foreach_mul([x, y], [0.5, 0.25]),
            [[X, Y], [("lifted", True, 0, 0.5), ("lifted", True, 1, 0.5)]],
            {},
        ),
        (lambda x, y: x.view(3, 2), [X, [(int, "3"), (int, "2")]], {}),
    ],
)
def test_operands_are_those_that_were_given(recorded, function, args, kwargs):
    entry = recorded(function)[-1]
    assert [shown(a) for a in entry.args] == args
    assert {name: shown(a) for name, a in entry.kwargs.items()} == kwargs


def test_steps_that_part_know_their_own_values(recorded):
    def step(wide):
        def run(x, y):
            made = torch.cat([x, y], 1 if wide else 0)
            return made.sin().cos()

        return run

    shapes = [
        [e.args[0].meta.shape for e in recorded(step(wide))[1:]] for wide in (True, False, True)
    ]
    assert shapes == [[(2, 6)] * 2, [(4, 3)] * 2, [(2, 6)] * 2]


def test_numbers_of_other_types_keep_them():
    words = [word for value in (np.float64(0.5), 2 + 1j) for word in step_key.spelled(value)]
    key = (0, *words, float, "nan", "name", bool, False)
    args, kwargs = step_key.read(key, step_key.Values(None, 0), 0, 0)
    assert list(map(type, args)) == [np.float64, complex, float]
    assert args[:2] == (0.5, 2 + 1j) and math.isnan(args[2])
    assert kwargs == {"name": False}
