"""Results of varying size stay padded on the device: the next such program takes them, others get them cut."""

from __future__ import annotations

import copy
import gc
import io
import weakref

import numpy as np
import pytest
import torch

import torch_xla
from xla_core.execution import runtime
from xla_core.varying import families
from xla_core.varying.padded_buffer import CUT_ON_HOST, PADDED_ON_HOST, PaddedBuffer, any_padded

LENGTHS = (5, 9, 7, 12, 6, 11)


@pytest.fixture
def host_copies(turned_on, counted):
    """A function that says how many values were padded on the host, and how many cut there, since its last call."""
    last = [0, 0]

    def copies():
        now = [counted(PADDED_ON_HOST), counted(CUT_ON_HOST)]
        since = tuple(new - old for new, old in zip(now, last, strict=True))
        last[:] = now
        return since

    copies()
    return copies


def rows(length):
    return torch.arange(4.0 * length).reshape(length, 4).sin()


@pytest.fixture
def padded(turned_on):
    """A tensor on the device that is in a padded buffer, and its value."""
    for length in LENGTHS[:3]:
        wanted = rows(length)
        x = wanted.to("xla").exp()
        torch_xla.sync()
    assert type(x._s.buffer) is PaddedBuffer
    return x, wanted.exp()


def test_a_cache_that_grows_is_not_copied_by_way_of_the_host(host_copies, counted):
    programs = counted(families.PROGRAMS)
    total = torch.zeros(2, 4, device="xla")
    for length in range(3, 60):
        total = torch.cat([total, torch.full((1, 4), float(length), device="xla")])
        torch_xla.sync()
    assert counted(families.PROGRAMS) - programs == 1
    assert host_copies() == (1, 0)  # what a program for its own length had given
    assert total._s.buffer.array.shape == (256, 4)
    assert torch.equal(total.cpu()[2:, 0], torch.arange(3.0, 60.0))
    assert host_copies() == (0, 0)


def test_another_step_takes_what_one_gives(host_copies):
    for length in LENGTHS:
        y = rows(length).to("xla").cosh()
        torch_xla.sync()
        z = y.sinh().sum(1)
        torch_xla.sync()
        torch.testing.assert_close(z.cpu(), rows(length).cosh().sinh().sum(1))
        served = host_copies()
    assert served == (1, 0)  # the uploaded one


def test_a_value_is_updated_where_it_is(turned_on, host_copies):
    kept = []
    for length in LENGTHS:
        x = rows(length).to("xla").exp()
        torch_xla.sync()
        former = x._s.buffer
        kept.append((former, former.array) if type(former) is PaddedBuffer else None)
        del former
        x.mul_(3.0)
        torch_xla.sync()
        torch.testing.assert_close(x.cpu(), rows(length).exp() * 3)
    # the test itself holds the former value: a copy was donated
    former, array = kept[-1]
    assert not array.is_deleted()
    np.testing.assert_allclose(former.on_host(), rows(11).exp(), rtol=1e-6)
    held = rows(10).to("xla").exp()
    torch_xla.sync()
    array = held._s.buffer.array
    host_copies()
    held.mul_(3.0)
    torch_xla.sync()
    assert array.is_deleted()
    assert host_copies() == (0, 0)
    torch.testing.assert_close(held.cpu(), rows(10).exp() * 3)


def test_other_programs_get_it_cut_once(padded, host_copies):
    x, wanted = padded
    torch.testing.assert_close((x[1:-1] * 2).cpu(), wanted[1:-1] * 2)
    torch.testing.assert_close(x.t().softmax(1).cpu(), wanted.t().softmax(1))
    assert host_copies() == (0, 1)
    torch.testing.assert_close(x.cpu(), wanted)


def test_what_is_of_one_size_in_another_program_is_cut_for_it(padded, counted):
    x, wanted = padded
    before = counted(families.SERVED)
    for length in (5, 9, 12, 6):
        taken = wanted.log().to("xla").exp()
        torch_xla.sync()
        assert type(taken._s.buffer) is type(x._s.buffer) is PaddedBuffer
        y = rows(length).to("xla")
        z = y.cumsum(0).sum(0) + x.sum(0)
        taken.mul_(y.sum(0))  # whose memory the program takes
        torch_xla.sync()
        torch.testing.assert_close(z.cpu(), rows(length).cumsum(0).sum(0) + wanted.sum(0))
        torch.testing.assert_close(taken.cpu(), wanted * rows(length).sum(0))
    assert counted(families.SERVED) - before >= 2
    torch.testing.assert_close(x.cpu(), wanted)


def test_who_donates_the_cut_value_leaves_none_behind(padded):
    x, wanted = padded
    keep = x.clone()
    x.add_(1.0)
    torch_xla.sync()
    y = keep.add_(x)
    torch_xla.sync()
    torch.testing.assert_close(x.cpu(), wanted + 1)
    torch.testing.assert_close(y.cpu(), 2 * wanted + 1)


@pytest.mark.parametrize(
    "taken",
    [
        lambda x: x.cpu(),
        lambda x: torch.tensor(x.tolist()),
        lambda x: copy.deepcopy(x).cpu(),
        lambda x: x.clone().detach().cpu(),
        lambda x: torch.empty(x.shape, device="xla").copy_(x).cpu(),
        lambda x: x.view(-1).view(x.shape).cpu(),
        lambda x: x.data[2].cpu().expand(4, 4)[:1],
    ],
)
def test_reading_gives_the_value_alone(padded, taken):
    x, wanted = padded
    read = taken(x)
    torch.testing.assert_close(read, wanted if read.shape == wanted.shape else wanted[2:3])


def test_a_file_holds_the_value_alone(padded):
    x, wanted = padded
    file = io.BytesIO()
    torch.save({"x": x}, file)
    assert len(file.getvalue()) < 4000
    file.seek(0)
    torch.testing.assert_close(torch.load(file, map_location="cpu")["x"], wanted)


def test_compiled_functions_get_it_cut(padded):
    x, wanted = padded
    compiled = torch.compile(lambda t: t.tanh() + 1, backend="openxla")
    torch.testing.assert_close(compiled(x).cpu(), wanted.tanh() + 1)


def test_operators_that_run_one_by_one_get_it_cut(padded, monkeypatch, counted):
    x, wanted = padded
    monkeypatch.setenv("SYNC_TENSORS_OPBYOP", "1")
    before = counted("OpByOpExecute")
    y = x.tanh() * 2
    torch_xla.sync()
    assert counted("OpByOpExecute") - before == 2
    torch.testing.assert_close(y.cpu(), wanted.tanh() * 2)


def test_waiting_includes_it(padded, monkeypatch):
    x, _ = padded
    waited = []
    backend = x._s.trace.backend
    monkeypatch.setattr(backend.client, "wait", lambda buffers: waited.extend(buffers))
    runtime.wait([x.device])
    assert len(waited) == 1 and waited[0] is x._s.buffer.array


def test_a_step_that_waits_for_its_program_takes_it(turned_on, host_copies):
    def deep(x):
        for _ in range(40):
            x = (x * 1.01).sin()
        return x

    for length in LENGTHS:
        y = rows(length).to("xla").exp()
        torch_xla.sync()
        z = deep(y)
        torch_xla.sync()
        torch.testing.assert_close(z.cpu(), deep(rows(length).exp()))
    assert host_copies()[1] == 0


def test_compiling_for_a_bound_keeps_no_values(turned_on):
    gc.collect()
    gc.disable()  # as training loops do, so as to collect between steps
    try:
        for length in LENGTHS:
            x = torch.ones(length, 4, device="xla").softmax(0)
            torch_xla.sync()
            if type(x._s.buffer) is PaddedBuffer:
                break
        kept = weakref.ref(x._s)
        assert any_padded()
        del x
        assert kept() is None and not any_padded()
    finally:
        gc.enable()


def test_what_failed_for_a_bound_keeps_no_values(turned_on):
    gc.collect()
    storages = []
    for length in LENGTHS:
        x = torch.ones(length, 4, device="xla")
        storages.append(weakref.ref(x._s))
        y = torch.linalg.svdvals(x * 2)
        torch_xla.sync()
    assert families.kept_out()
    del x, y
    gc.collect()
    assert [kept() for kept in storages] == [None] * len(LENGTHS)


def test_nothing_is_looked_for_while_there_is_none(turned_on):
    gc.collect()  # models of tests before this one are reference cycles
    x = torch.ones(3, 4, device="xla") * 2
    torch_xla.sync()
    assert not any_padded()
    del x
