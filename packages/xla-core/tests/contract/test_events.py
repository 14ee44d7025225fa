"""The core's events: subscribed to by kind, heard in order, no longer after the end."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import torch_xla
from xla_core.contract import events


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Happened(events.Event):
    number: int


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class HappenedTwice(Happened):
    pass


@pytest.fixture
def heard():
    """What was heard, and a function that subscribes for the time of the test."""
    told, undo = [], []

    def listen(kind, name):
        undo.append(events.subscribe(kind, lambda event: told.append((name, event.number))))
        return undo[-1]

    yield told, listen
    for end in undo:
        end()


def test_a_listener_hears_its_kind_and_what_derives_from_it(heard):
    told, listen = heard
    listen(HappenedTwice, "twice")
    listen(Happened, "once")
    events.emit(Happened(number=1))
    events.emit(HappenedTwice(number=2))
    events.emit(events.Waited(nanoseconds=3))
    assert told == [("once", 1), ("twice", 2), ("once", 2)]


def test_who_has_ended_hears_nothing_more(heard):
    told, listen = heard
    assert not events.listening(Happened)
    end = listen(Happened, "first")
    listen(Happened, "second")
    assert events.listening(Happened)
    assert events.listening(HappenedTwice)
    end()
    end()
    events.emit(Happened(number=1))
    assert told == [("second", 1)]


def test_a_listener_may_subscribe_another(heard):
    told, listen = heard

    def more(event):
        listen(Happened, "late")

    end = events.subscribe(Happened, more)
    events.emit(Happened(number=1))
    end()
    events.emit(Happened(number=2))
    assert told == [("late", 2)]


def test_all_events_of_a_step_in_their_order():
    x = torch.ones(3, 17).to("xla")
    torch_xla.sync()
    seen = []
    end = events.subscribe(events.Event, lambda event: seen.append(type(event)))
    try:
        y = x * 3 + 17
        torch_xla.sync()
        y.cpu()
    finally:
        end()
    made = [kind for kind in seen if kind is not events.ProgramLoaded]
    assert [k for k in made if k is not events.TransferToDevice] == [
        events.ProgramMissing,
        events.ProgramCompiled,
        events.RunRequested,
        events.ProgramExecuted,
        events.Flushed,
        events.StepMarked,
        events.TransferFromDevice,
    ]
