"""Copies by DLPack between ``xla`` tensors and another library's in the same memory.

The other device is CUDA where there is a GPU (xla-pjrt-cuda's tests). Here the CPU plays its part: its client takes
and gives real DLPack capsules, and PyTorch's CPU tensors are those of another device.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from xla_core.contract.device_protocol import Exchange, Placement, Topology, capabilities_of
from xla_core.dispatch import transfers
from xla_core.execution.runtime import client, trace_of
from xla_core.jax_bridge.jax_private import backends_started
from xla_core.launching import device_memory
from xla_core.plugins import discovery
from xla_core.support import counters

DTYPES = [torch.bool, torch.int64, torch.bfloat16, torch.float16, torch.float64, torch.complex64]


@pytest.fixture
def exchanging(monkeypatch):
    """The running client says that CPU tensors are in its memory; gives the list of what it was asked."""
    running = client()
    asked: list[str] = []

    def take(array, placement):
        asked.append("take")
        return running.take_dlpack(array, placement)

    def give(buffer):
        asked.append("give")
        return buffer

    found = dataclasses.replace(capabilities_of(running), exchange=Exchange("cpu", take, give))
    monkeypatch.setattr(type(running), "capabilities", found)
    return asked


def count(name):
    return counters.all_counters().get(name, 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_of_each_dtype_there_and_back(exchanging, dtype):
    backend = trace_of(torch.device("xla")).backend
    given = torch.arange(6).reshape(2, 3).to(dtype)
    before = count("DlpackToDevice"), count("DlpackFromDevice")
    buffer = device_memory.take(given.t(), backend)  # not contiguous
    back = device_memory.give(buffer, dtype, backend)
    assert torch.equal(back, given.t()) and back.dtype == dtype
    assert exchanging == ["take", "give"]
    assert (count("DlpackToDevice"), count("DlpackFromDevice")) == (before[0] + 1, before[1] + 1)


def test_both_sides_have_memory_of_their_own(exchanging):
    """Writing to one of them afterwards does not reach the other."""
    backend = trace_of(torch.device("xla")).backend
    given = torch.ones(4)
    buffer = device_memory.take(given, backend)
    given.zero_()
    first = device_memory.give(buffer, torch.float32, backend)
    first.mul_(5)
    assert device_memory.give(buffer, torch.float32, backend).tolist() == [1.0] * 4


def test_jax_starts_no_backend_of_its_own(run_python):
    code = """
import torch, torch_xla
from xla_core.launching.launch_queue import value_of
from xla_core.jax_bridge.jax_private import backends_started
t = torch.ones(2, device="xla") + 1
torch_xla.sync()
shown = torch.from_dlpack(value_of(t._s.buffer))
print(shown.tolist(), backends_started())
"""
    assert run_python(code).split("\n")[0] == "[2.0, 2.0] ()"


class Foreign(torch.Tensor):
    """A tensor that says it is not on the CPU."""

    is_cpu = property(lambda self: False)


def test_an_upload_from_another_device_asks_for_its_memory(exchanging, monkeypatch):
    trace = trace_of(torch.device("xla"))
    given = torch.arange(3.0).as_subclass(Foreign)
    assert transfers.upload(given, trace).tolist() == [0.0, 1.0, 2.0]
    assert transfers.upload(given, trace, torch.int64).tolist() == [0, 1, 2]
    assert exchanging == ["take", "take"]
    monkeypatch.undo()  # a device that exchanges nothing: through the host
    assert transfers.upload(given, trace).tolist() == [0.0, 1.0, 2.0]


def test_what_leaves_for_another_device_is_copied_in_its_memory(exchanging, monkeypatch):
    """The values of a tensor, of a view, and of one that nobody has written to."""
    found = capabilities_of(client())
    elsewhere = dataclasses.replace(found.exchange, device="cuda")
    monkeypatch.setattr(
        type(client()), "capabilities", dataclasses.replace(found, exchange=elsewhere)
    )
    place = torch.device("cuda", 0)
    x = torch.arange(6.0).reshape(2, 3).to("xla")
    assert transfers.leave(x, place).tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert transfers.leave((x + 1).t(), place).tolist() == [[1.0, 4.0], [2.0, 5.0], [3.0, 6.0]]
    assert exchanging == ["give", "give"]
    assert transfers.leave(torch.empty(2, device="xla"), place).shape == (2,)
    assert transfers.leave(x, torch.device("cpu")).tolist() == x.tolist()
    assert exchanging == ["give", "give"]


def test_what_does_not_go_directly_goes_through_the_host(exchanging, monkeypatch):
    backend = trace_of(torch.device("xla")).backend
    whole = torch.ones(2)
    # a number format that DLPack has no code for
    assert device_memory.take(torch.ones(2).to(torch.float8_e4m3fn), backend) is None
    # a device that keeps another format than the tensor's
    monkeypatch.setattr(backend, "numpy_dtype", lambda dtype: np.dtype(np.float16))
    assert device_memory.take(whole, backend) is None
    monkeypatch.undo()
    assert device_memory.take(whole, backend) is None  # the client has no exchange
    assert not device_memory.reaches(backend, torch.device("cpu"))
    assert exchanging == []


def test_a_mesh_of_several_devices_goes_through_the_host(exchanging, monkeypatch):
    backend = trace_of(torch.device("xla")).backend
    assert device_memory.reaches(backend, torch.device("cpu"))
    monkeypatch.setattr(backend, "placement", Placement((0, 1), "{devices=[2]<=[2]}"))
    assert not device_memory.reaches(backend, torch.device("cpu"))


def test_memory_that_is_not_the_runtimes_is_refused():
    """Where the client cannot take a tensor it says so, and the values go through the host."""
    factory = discovery.load_factory("CPU")
    two = factory(Topology(), {"CPU_NUM_DEVICES": "2"})

    class Elsewhere:
        def __dlpack_device__(self):
            return (1, 7)

    before = backends_started()
    with pytest.raises(BufferError, match="no CPU device of this process has the number 7"):
        two.take_dlpack(Elsewhere(), Placement((0,)))
    assert backends_started() == before
    two.shutdown()
