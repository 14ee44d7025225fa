"""Values that are given away, programs that are made ahead, and what fixed shapes allow."""

from __future__ import annotations

import contextlib

import pytest
import torch

import torch_xla
from torch_xla import _XLAC
from torch_xla.utils.buffer_donor_context import alias_with_buffer_donor_config
from xla_core.recording import step_values


def on_device(*sizes):
    made = torch.rand(sizes, device="xla")
    torch_xla.sync()
    return made


def test_a_value_that_is_given_away_is_reused_and_then_gone(compile_count):
    x = on_device(4, 5)
    assert not _XLAC._get_buffer_donation(x)
    before = compile_count()
    expected = None
    for _ in range(3):
        expected = x.cpu() * 2 + 1
        assert _XLAC._set_buffer_donation(x, True)
        assert _XLAC._get_buffer_donation(x)
        place = _XLAC._unsafe_buffer_pointer(x)
        with alias_with_buffer_donor_config() as former:
            assert former is False
            y = x * 2 + 1
            torch_xla.sync()
        assert _XLAC._unsafe_buffer_pointer(y) == place
        with pytest.raises(RuntimeError, match="value was donated"):
            x.cpu()
        torch.testing.assert_close(y.cpu(), expected)
        assert not _XLAC._get_buffer_donation(y)
        x = y
        del y
    assert compile_count() == before + 1


@pytest.mark.parametrize("reason", ["taken back", "another shape"])
def test_a_value_stays_where_nobody_may_or_can_take_it(reason):
    x = on_device(3)
    expected = x.cpu()
    assert _XLAC._set_buffer_donation(x, True)
    if reason == "taken back":
        assert _XLAC._set_buffer_donation(x, False)
    with alias_with_buffer_donor_config():
        y = x.sum() if reason == "another shape" else x + 1
        torch_xla.sync()
    assert y is not None
    torch.testing.assert_close(x.cpu(), expected)


@pytest.mark.parametrize("setting", [None, False, True])
@pytest.mark.parametrize("reading", [False, True])
def test_marks_count_where_steps_end_and_where_they_are_cut_at_the_users_wish(setting, reading):
    x = on_device(7)
    expected = x.cpu() + 1
    _XLAC._set_buffer_donation(x, True)
    y = x + 1
    with contextlib.nullcontext() if setting is None else alias_with_buffer_donor_config(setting):
        y.cpu() if reading else torch_xla.sync()
    assert _XLAC._is_placecholder(x) == (not reading or bool(setting))
    torch.testing.assert_close(y.cpu(), expected)
    assert not _XLAC._is_placecholder(y)


def test_a_step_that_is_cut_because_it_is_long_keeps_its_values(monkeypatch):
    x = on_device(5)
    expected = x.cpu()
    _XLAC._set_buffer_donation(x, True)
    monkeypatch.setattr(step_values, "MAX_PENDING", 3)
    y = x
    for _ in range(8):
        y = y + x + torch.zeros(5).to("xla")  # an upload looks at the length of the step
    torch_xla.sync()
    torch.testing.assert_close(y.cpu(), expected * 9)


def test_a_program_without_donation_is_not_taken_for_one_with():
    x = on_device(3)
    y = x + 2
    torch_xla.sync()
    _XLAC._set_buffer_donation(x, True)
    place = _XLAC._unsafe_buffer_pointer(x)
    with alias_with_buffer_donor_config():
        y = x + 2
        torch_xla.sync()
    assert _XLAC._unsafe_buffer_pointer(y) == place


def test_what_is_pending_cannot_be_marked_and_views_have_no_address():
    x = on_device(3)
    assert _XLAC._set_buffer_donation(x + 1, True) is False
    assert not _XLAC._get_buffer_donation(x + 1)
    with pytest.raises(RuntimeError, match="a view has no memory of its own"):
        _XLAC._unsafe_buffer_pointer(x[1:])
    assert _XLAC._unsafe_buffer_pointer(torch.empty(2, device="xla")) > 0
    with pytest.raises(RuntimeError, match="not an XLA tensor"):
        _XLAC._set_buffer_donation(torch.ones(2), True)


def test_a_program_made_ahead_is_found_by_the_next_step(compile_count):
    x = on_device(3)
    before = compile_count()
    y = (x * 3).cos()
    _XLAC._xla_warm_up_cache([y], [])
    assert compile_count() == before + 1
    assert _XLAC._check_tensor_need_materialization([y]) == [True]
    torch_xla.sync()
    assert compile_count() == before + 1
    torch.testing.assert_close(y.cpu(), (x.cpu() * 3).cos())


def test_sizes_are_known_when_they_are_dynamic():
    x = on_device(3, 7)
    size = _XLAC._get_xla_tensor_dimension_size(x, 1)
    assert (size.item(), size.dtype, size.device) == (7, torch.int32, x.device)
    _XLAC._xla_mark_dynamic(x, 0)
    assert x.shape == (3, 7)
    with pytest.raises(IndexError, match="no dimension 2"):
        _XLAC._xla_mark_dynamic(x, 2)
