"""Tracebacks without internal frames, only where somebody asks for that."""

from __future__ import annotations

import traceback

import pytest
import torch
from torch import nn

from xla_debug import tracebacks


class Wrong(nn.Module):
    def forward(self, x):
        return x @ x


def run():
    return Wrong()(torch.ones(2, 3).to("xla"))


def names(error):
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def test_a_block_leaves_the_lines_of_the_user():
    with pytest.raises(RuntimeError) as whole:
        run()
    assert "__torch_dispatch__" in names(whole.value)
    with pytest.raises(RuntimeError) as caught, tracebacks.short():
        run()
    own = names(caught.value)[-2:]
    assert own == ["run", "forward"]
    files = {frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)}
    assert files == {__file__}
    assert str(caught.value) == str(whole.value)


def test_a_decorated_function_and_what_caused_the_error():
    @tracebacks.short()
    def outer():
        try:
            run()
        except RuntimeError as error:
            raise ValueError("no step") from error

    with pytest.raises(ValueError, match="no step") as caught:
        outer()
    assert names(caught.value.__cause__)[-1] == "forward"
    assert "__torch_dispatch__" not in names(caught.value.__cause__)


def test_the_switch_shows_all(monkeypatch):
    monkeypatch.setenv("XLA_FULL_TRACEBACK", "1")
    with pytest.raises(RuntimeError) as caught, tracebacks.short():
        run()
    assert "__torch_dispatch__" in names(caught.value)


def test_an_error_without_a_line_of_the_user_stays_whole():
    error = RuntimeError("never raised")
    assert tracebacks.shorten(error) is error
    assert error.__traceback__ is None
