"""What replicas know of each other, and how they meet outside of programs."""

from __future__ import annotations

import contextlib
import io
import time

import dist_collectives
import pytest
import torch

import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.data_parallel as dp
import torch_xla.distributed.xla_multiprocessing as xmp
import torch_xla.runtime as xr
from torch_xla._internal import pjrt
from xla_core.extension_api.jobs import connection


def counts(_index):
    """Every ordinal and count."""
    torch_xla.device()
    return {
        "device": str(torch_xla.device()),
        "devices": [str(d) for d in torch_xla.devices()],
        "global_ordinal": xr.global_ordinal(),
        "local_ordinal": xr.local_ordinal(),
        "world_size": xr.world_size(),
        "process_index": xr.process_index(),
        "process_count": xr.process_count(),
        "host_index": xr.host_index(),
        "local_process_count": xr.local_process_count(),
        "global_device_count": xr.global_device_count(),
        "local_device_count": xr.local_device_count(),
        "addressable_device_count": xr.addressable_device_count(),
        "global_runtime_device_count": xr.global_runtime_device_count(),
        "addressable_runtime_device_count": xr.addressable_runtime_device_count(),
        "master": (xm.is_master_ordinal(), xm.is_master_ordinal(local=False)),
        "local": xm.get_local_ordinal(),
        "ip": xr.get_master_ip(),
        "attributes": len(xr.global_runtime_device_attributes()),
        "sum": xm.all_reduce("sum", torch.ones(1, device="xla")).item(),
        "replicas": len(set(xm.xla_replication_devices())),
    }


def counts_to(path):
    """A launcher on one of several hosts: writes down what its processes found."""
    import json

    found = pjrt.run_multiprocess(counts, 0, start_method="fork")
    with open(path, "w") as file:  # noqa: PTH123 - a path as text crosses processes more simply
        json.dump(found, file)


def as_host(_index, path):
    counts_to(path)


def meetings(index):
    """rendezvous, mesh_reduce, do_on_ordinals, master_print."""
    world = xr.world_size()
    payloads = xm.rendezvous("all", f"from {index}".encode())
    assert payloads == [f"from {r}".encode() for r in range(world)]
    large = bytes([index]) * 3_000_000  # in several pieces
    assert xm.rendezvous("large", large) == [bytes([r]) * 3_000_000 for r in range(world)]
    assert xm.rendezvous("nothing") == [b""] * world
    if index in (1, 3):
        assert xm.rendezvous("odd", bytes([index]), replicas=[3, 1]) == [b"\1", b"\3"]
    else:
        with pytest.raises(ValueError, match=rf"ordinal {index} is not among replicas=\[1, 3\]"):
            xm.rendezvous("odd", replicas=[1, 3])
    assert xm.xla_rendezvous(b"x", tag="other order") == [b"x"] * world
    with pytest.raises(TypeError, match="takes a tag"):
        xm.rendezvous(3)
    for _ in range(20):
        assert xm.mesh_reduce("again", index, sum) == sum(range(world))
    tensor = torch.full((2,), float(index), device="xla")
    (lists,) = xm.mesh_reduce("tensors", {"t": tensor}, lambda found: [[f["t"] for f in found]])
    assert [t.tolist() for t in lists] == [[r, r] for r in range(world)]
    assert {t.device.type for t in lists} == {"cpu"}
    called = []
    xm.do_on_ordinals(lambda t: called.append(t.tolist()), (tensor,), ordinals=(0, 2))
    assert called == ([[index, index]] if index in (0, 2) else [])
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        xm.master_print("only once", fd=shown)
    return shown.getvalue()


def parameters(index):
    """broadcast_master_param, reduce_gradients, the return value of optimizer_step."""
    torch.manual_seed(index)
    world = xr.world_size()
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)).to("xla")
    xm.broadcast_master_param(model)
    same = xm.mesh_reduce("weights", model[0].weight, lambda all_: [w.tolist() for w in all_])
    assert same == [same[0]] * world
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for p in model.parameters():
        p.grad = torch.full_like(p, float(index))
    xm.reduce_gradients(optimizer)
    assert {v for p in model.parameters() for v in p.grad.flatten().tolist()} == {(world - 1) / 2}
    assert len(xm._fetch_gradients(optimizer)) == 4
    loss = torch.ones((), device="xla")
    returned = xm.optimizer_step(optimizer, optimizer_args={"closure": lambda: loss}, barrier=True)
    assert returned is loss
    calls = []
    buckets = xm.CoalescingBuckets(
        lambda tensors, _: calls.append(len(tensors)) or tensors,
        [torch.zeros(1 << 18, device="xla")] * 3,
        bucket_cap_mb=2,
    )
    assert len(buckets()) == 3
    assert calls == [2, 1]
    groups = xmp.create_optimized_replica_groups()
    assert groups == [list(range(world))]
    return True


def mistakes(_index):
    """Wrong arguments are named at the call."""
    x = torch.ones(3, device="xla")
    for error, words, call in (
        (TypeError, "tensors on an xla device, got one on cpu", lambda: xm.all_reduce("sum", torch.ones(1))),
        (ValueError, "'average' is not one of sum, mul", lambda: xm.all_reduce("average", x)),
        (TypeError, "there is no reduction 'and' of torch.float32", lambda: xm.all_reduce("and", x)),
        (ValueError, "exactly one group", lambda: xm.all_reduce("sum", x, groups=[[0]])),
        (ValueError, "of size 3 cannot be split evenly over 2", lambda: xm.reduce_scatter("sum", x, 1.0, 0, 2)),
        (ValueError, "shard_count=3, but the groups have 2", lambda: xm.reduce_scatter("sum", x, 1.0, 0, 3)),
        (ValueError, "split_count=3", lambda: xm.all_to_all(x, 0, 0, 3)),
        (IndexError, "Dimension out of range", lambda: xm.all_gather(x, 2)),
        (ValueError, "sends at most once", lambda: xm.collective_permute(x, [[0, 1], [0, 0]])),
        (ValueError, "no ordinal 5", lambda: xm.collective_broadcast([x], 5)),
        (ValueError, "output has shape (3,)", lambda: xm.all_gather(x, output=x)),
        (NotImplementedError, "collective_permute", lambda: xm.send(x, 1)),
        (RuntimeError, "call launch() or spawn() before", lambda: xmp.spawn(mistakes)),
    ):  # fmt: skip
        with pytest.raises(error) as caught:
            call()
        assert words in str(caught.value)
    return True


def threads(_index):
    """Replicas as threads of one process: the same collectives."""
    world = len(torch_xla.devices())
    found = pjrt.spawn_threads(dist_collectives.run_all)
    for i, case in enumerate(dist_collectives.cases(world)):
        expected = dist_collectives.expected(case, world)
        for replica in range(world):
            for got, wanted in zip(found[replica][i], expected[replica], strict=True):
                assert (got == wanted).all(), (case, replica)
    facts = pjrt.spawn_threads(
        lambda _: (str(torch_xla.device()), xr.global_ordinal(), xr.world_size())
    )
    assert facts == {i: (f"xla:{i}", i, world) for i in range(world)}
    started = []
    found = pjrt._run_thread_per_device(
        0, 1, lambda: xr.global_ordinal() * 10, lambda *process: started.append(process)
    )
    assert (found, started) == ({i: i * 10 for i in range(world)}, [(0, 1)])
    found = pjrt._run_singleprocess(lambda x, y: x + y + xr.global_ordinal(), 1, y=2)
    assert found == {i: 3 + i for i in range(world)}
    gathered = pjrt.spawn_threads(lambda i: xm.rendezvous("threads", bytes([i])))
    assert gathered == {i: [bytes([j]) for j in range(world)] for i in range(world)}
    calls = []
    torch_xla.launch(lambda i, x: calls.append((i, x)), args=(7,), debug_single_process=True)
    assert sorted(calls) == [(i, 7) for i in range(world)]
    assert (xr.world_size(), connection()) == (1, None)  # on their own again


def threads_fail(_index):
    """A thread that raises, ends early or calls something else ends the others."""

    def raises(index):
        if index == 1:
            raise ValueError("the second thread gives up")
        xm.all_reduce("sum", torch.ones(1, device="xla"))

    def ends(index):
        if index == 0:
            xm.rendezvous("alone")

    def differs(index):
        xm.all_reduce("sum", torch.ones(2 + index, device="xla"))

    for function, words in (
        (raises, "the second thread gives up"),
        (
            ends,
            "ordinal 0 waits at rendezvous 'alone', and ordinal 1 does not arrive: it has finished",
        ),
        (differs, "ordinal 1: all_reduce sum"),
    ):
        with pytest.raises((ValueError, RuntimeError)) as caught:
            pjrt.spawn_threads(function)
        assert words in str(caught.value), str(caught.value)


def wrappers(index, model, executor, path):
    """What is made once, before the processes start."""
    with open(path, "a") as file:  # noqa: PTH123 - as above

        def turn():
            for _ in range(20):
                file.write(f"{index} ")
                file.flush()
                time.sleep(0.001)
            return index

        assert executor.run(turn) == index
    mine = model.to(torch_xla.device())
    return xm.mesh_reduce("weights", mine.weight, lambda all_: [w.tolist() for w in all_])


def data_parallel(_index):
    """DataParallel on some devices, on PyTorch's own CPU, and where a loop fails; set_replication."""
    batches = [(torch.full((2, 3), float(i)), i) for i in range(5)]
    seen = []

    def loop(model, loader, device, context):
        counter = context.getattr_or("counter", lambda: {"runs": 0})
        counter["runs"] += 1
        for number, (inputs, label) in loader:
            assert inputs.device == device == next(model.parameters()).device
            seen.append((str(device), number, label, model(inputs).shape[0]))
        return len(loader), counter["runs"]

    native = dp.DataParallel(lambda: torch.nn.Linear(3, 1), device_ids=[])
    assert native.devices == []
    assert native(loop, batches) == [(5, 1)]
    assert seen == [("cpu", i, i, 2) for i in range(5)]
    seen.clear()
    parallel = dp.DataParallel(torch.nn.Linear(3, 1), device_ids=["xla:0", "xla:1"])
    assert [str(d) for d in parallel.devices] == ["xla:0", "xla:1"]
    assert parallel(loop, batches) == [(2, 1)] * 2
    assert parallel(loop, batches) == [(2, 2)] * 2  # the context is kept
    first = [("xla:0", 0, 0, 2), ("xla:0", 1, 2, 2), ("xla:1", 0, 1, 2), ("xla:1", 1, 3, 2)]
    assert sorted(seen) == sorted(first * 2)

    def fails(model, loader, device, context):
        for number, _ in loader:
            if (str(device), number) == ("xla:1", 1):
                raise ZeroDivisionError("in one of the loops")

    with pytest.raises(ZeroDivisionError, match="in one of the loops"):
        parallel(fails, batches)
    devices = torch_xla.devices()
    xm.set_replication(devices[0], devices)
    assert xr.world_size() == len(devices)
    xm.set_replication(devices[0], [])
    assert xr.world_size() == 1
    with pytest.raises(ValueError, match="xla:0 is not among"):
        xm.set_replication("xla:0", ["xla:1", "xla:2"])


def set_replications(index):
    """set_replication, as accelerate calls it; DataParallel with the one device that a process has."""
    world = xr.world_size()
    before = xm.all_reduce("sum", torch.full((1,), index + 1.0, device="xla"))  # pending meanwhile
    xm.set_replication(torch_xla.device(), xm.get_xla_supported_devices())
    total = sum(range(1, world + 1))

    def synchronised():
        assert (xr.world_size(), xr.global_ordinal()) == (world, index)
        assert len(xm.xla_replication_devices()) == world
        weight = torch.nn.Parameter(torch.zeros(1, device="xla"))
        weight.grad = torch.full((1,), index + 1.0, device="xla")
        xm.optimizer_step(torch.optim.SGD([weight], lr=1.0))
        assert weight.item() == pytest.approx(-total / world)
        assert xm.all_gather(torch.ones(1, device="xla")).shape == (world,)

    synchronised()
    assert before.item() == total

    def loop(model, loader, device, context):
        synchronised()
        return [model(batch).item() for _, batch in loader]

    parallel = dp.DataParallel(torch.nn.Flatten(0), device_ids=["xla:0"])
    assert parallel(loop, [torch.ones(1)]) == [[1.0]]
    synchronised()
    xm.set_replication("xla:0", [])
    assert (xr.world_size(), xm.all_reduce("sum", torch.ones(1, device="xla")).item()) == (1, 1.0)
    xm.set_replication("xla:0", ["xla:0"])
    synchronised()


def two_devices_of_one_of_several(_index):
    """A process of several may drive one device; another one is no replica."""
    assert xr.world_size() == 2
    with pytest.raises(NotImplementedError, match="xla:0, xla:1: in a job of 2 processes"):
        xm.set_replication("xla:0", xm.get_xla_supported_devices())
    torch_xla.device(1)
    with pytest.raises(RuntimeError, match="xla:1 is not one of this job's 2 replicas"):
        xr.world_size()


def is_initialized(index, count):
    """A process that some other launcher started, on a host with ``count`` devices."""
    pjrt.initialize_multiprocess(index, count)
    assert (xr.local_ordinal(), xr.world_size()) == (index, count)
    assert len(xm.get_xla_supported_devices()) == 1
    assert xm.all_reduce("sum", torch.ones(1).to("xla")).item() == count
