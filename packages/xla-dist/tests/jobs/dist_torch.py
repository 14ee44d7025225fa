"""torch.distributed's backend ``xla``: every collective of a process group, checked by each rank."""

from __future__ import annotations

import os
import warnings

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from dist_jobs import refused

import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch_xla.distributed.xla_backend import ProcessGroupXla
from xla_dist.collectives import process_group


def initialize(method, port=0):
    """Join the default group; rank and number of ranks."""
    if method == "env://":
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        os.environ.update(RANK=str(xr.global_ordinal()), WORLD_SIZE=str(xr.world_size()))
    dist.init_process_group("xla", init_method=method)
    assert dist.get_backend() == "xla"
    return dist.get_rank(), dist.get_world_size()


def tensor(rank, *shape, device="xla", dtype=torch.float32):
    """Values that differ between ranks and elements."""
    count = torch.Size(shape).numel()
    return (torch.arange(count).reshape(shape) + 10 * rank + 1).to(dtype).to(device)


def same(got, wanted):
    torch.testing.assert_close(got.cpu(), wanted, rtol=0, atol=0)


def all_collectives(index, method, port):
    """With the default group and a group of some ranks, on the device and on the CPU."""
    rank, world = initialize(method, port)
    assert (rank, world) == (index, xr.world_size())
    ranks = list(range(1, world))  # not the first; with four ranks no half of them either
    some = dist.new_group(ranks)
    for device in ("xla", "cpu"):
        in_group(None, list(range(world)), rank, device)
        if rank in ranks:
            in_group(some, ranks, rank, device)
    objects(None, list(range(world)), rank)
    if rank in ranks:
        objects(some, ranks, rank)
        assert isinstance(some, ProcessGroupXla) or len(ranks) == 1
    one_sided(rank, world)
    refusals(rank)
    dist.barrier()
    dist.destroy_process_group()
    return True


def in_group(group, ranks, rank, device):
    """Every collective of tensors among ``ranks``."""
    reductions(group, ranks, rank, device)
    movements(group, ranks, rank, device)
    dist.barrier(group)


def reductions(group, ranks, rank, device):
    size, me = len(ranks), ranks.index(rank)
    every = torch.stack([tensor(r, 2, 3, device="cpu") for r in ranks])
    for op, wanted in (
        (dist.ReduceOp.SUM, every.sum(0)),
        (dist.ReduceOp.AVG, every.mean(0)),
        (dist.ReduceOp.PRODUCT, every.prod(0)),
        (dist.ReduceOp.MIN, every.amin(0)),
        (dist.ReduceOp.MAX, every.amax(0)),
    ):
        t = tensor(rank, 2, 3, device=device)
        assert dist.all_reduce(t, op, group=group) is None
        same(t, wanted)
    for op, combine in (
        (dist.ReduceOp.BAND, torch.bitwise_and),
        (dist.ReduceOp.BOR, torch.bitwise_or),
    ):
        t = tensor(rank, 4, device=device, dtype=torch.int64)
        dist.all_reduce(t, op, group=group)
        wanted = tensor(ranks[0], 4, device="cpu", dtype=torch.int64)
        for r in ranks[1:]:
            wanted = combine(wanted, tensor(r, 4, device="cpu", dtype=torch.int64))
        same(t, wanted)
    t = tensor(rank, 2, 3, device=device)
    work = dist.all_reduce(t, group=group, async_op=True)
    assert work.wait()
    assert work.is_completed()
    same(t, every.sum(0))
    t = tensor(rank, 2, 3, device=device)
    dist.reduce(t, ranks[-1], group=group)
    same(t, every.sum(0) if rank == ranks[-1] else every[me])
    for dtype in (torch.bfloat16, torch.bool):
        t = tensor(rank, 3, device=device, dtype=dtype)
        dist.all_reduce(t, dist.ReduceOp.MAX, group=group)
        same(t, tensor(ranks[-1], 3, device="cpu", dtype=dtype))
    whole = tensor(rank, 2 * size, device=device)
    summed = sum(tensor(r, 2 * size, device="cpu") for r in ranks)
    part = torch.zeros(2, device=device)
    dist.reduce_scatter_tensor(part, whole, group=group)
    same(part, summed.chunk(size)[me])
    part = torch.zeros(2, device=device)
    dist.reduce_scatter(part, list(whole.chunk(size)), dist.ReduceOp.AVG, group=group)
    same(part, summed.chunk(size)[me] / size)


def movements(group, ranks, rank, device):
    size, me = len(ranks), ranks.index(rank)
    every = [tensor(r, 2, 3, device="cpu") for r in ranks]
    mine = tensor(rank, 2, 3, device=device)
    for root in (ranks[0], ranks[-1]):
        t = mine.clone()
        dist.broadcast(t, root, group=group)
        same(t, every[ranks.index(root)])
    places = [torch.zeros(2, 3, device=device) for _ in ranks]
    dist.all_gather(places, mine, group=group)
    for place, wanted in zip(places, every, strict=True):
        same(place, wanted)
    whole = torch.zeros(2 * size, 3, device=device)
    dist.all_gather_into_tensor(whole, mine, group=group)
    same(whole, torch.cat(every))
    root = ranks[-1]
    places = [torch.zeros(2, 3, device=device) for _ in ranks] if rank == root else None
    dist.gather(mine, places, root, group=group)
    for place, wanted in zip(places or [], every, strict=bool(places)):
        same(place, wanted)
    t = torch.zeros(2, 3, device=device)
    dist.scatter(t, [x.to(device) for x in every] if rank == root else None, root, group=group)
    same(t, every[me])
    rows = [tensor(10 * rank + r, 3, device=device) for r in ranks]
    places = [torch.zeros(3, device=device) for _ in ranks]
    dist.all_to_all(places, rows, group=group)
    for place, r in zip(places, ranks, strict=True):
        same(place, tensor(10 * r + rank, 3, device="cpu"))
    output = torch.zeros(size, 3, device=device)
    dist.all_to_all_single(output, torch.stack(rows), group=group)
    same(output, torch.stack([tensor(10 * r + rank, 3, device="cpu") for r in ranks]))
    if device == "cpu":  # slices of other sizes: one row to the first, two to the second, ...
        sizes = [i + 1 for i in range(size)]
        received = torch.zeros((me + 1) * size, 2)
        given = tensor(rank, sum(sizes), 2, device="cpu")
        dist.all_to_all_single(received, given, [me + 1] * size, sizes, group=group)
        theirs = [tensor(r, sum(sizes), 2, device="cpu").split(sizes)[me] for r in ranks]
        same(received, torch.cat(theirs))


def objects(group, ranks, rank):
    """Every collective of Python objects."""
    found = [None] * len(ranks)
    dist.all_gather_object(found, {"rank": rank, "text": "x" * (3 * rank)}, group=group)
    assert found == [{"rank": r, "text": "x" * (3 * r)} for r in ranks]
    root = ranks[-1]
    found = [None] * len(ranks) if rank == root else None
    dist.gather_object((rank, "mine"), found, root, group=group)
    assert found == ([(r, "mine") for r in ranks] if rank == root else None)
    said = ["from the root", root] if rank == root else [None, None]
    dist.broadcast_object_list(said, root, group=group)
    assert said == ["from the root", root]
    given = [f"for {r}" for r in ranks] if rank == root else [None] * len(ranks)
    mine = [None]
    dist.scatter_object_list(mine, given, root, group=group)
    assert mine == [f"for {rank}"]


def one_sided(rank, world):
    """Transfers between two ranks: a ring, twice, with tags, and objects."""
    after, before = (rank + 1) % world, (rank - 1) % world
    for tag in (0, 7):
        got = torch.zeros(3, device="xla")
        work = dist.isend(tensor(rank, 3), after, tag=tag)
        dist.recv(got, before, tag=tag)
        work.wait()
        same(got, tensor(before, 3, device="cpu"))
    got = torch.zeros(2, device="xla")
    moves = [
        dist.P2POp(dist.isend, tensor(rank, 2), after), dist.P2POp(dist.irecv, got, before)
    ]  # fmt: skip
    for work in dist.batch_isend_irecv(moves):
        work.wait()
    same(got, tensor(before, 2, device="cpu"))
    said = [None]
    if rank == 0:
        dist.send_object_list([{"a": 1}], 1)
    elif rank == 1:
        dist.recv_object_list(said, 0)
        assert said == [{"a": 1}]


def refusals(rank):
    """What cannot be done says so, before anything waits."""
    t = tensor(rank, 2)
    refused(ValueError, "no reduction", dist.all_reduce, t, dist.ReduceOp.BXOR)
    mixed = [torch.zeros(2), torch.zeros(2, device="xla")]
    refused(ValueError, "either xla tensors or CPU tensors", dist.group.WORLD.allreduce, mixed)
    refused(NotImplementedError, "named rank", dist.recv, t)


def mesh_groups(index):
    """``new_group`` with torch_xla's own options."""
    initialize("xla://")
    rows = [[0, 1], [2, 3]]
    group = dist.new_group(pg_options={"xla_pg_options": {"mesh": rows}})
    t = torch.ones(2, device="xla") * (index + 1)
    dist.all_reduce(t, group=group)
    same(t, torch.full((2,), 3.0 if index < 2 else 7.0))
    whole = torch.zeros(4, device="xla")
    dist.all_gather_into_tensor(whole, torch.ones(2, device="xla") * index, group=group)
    first = rows[index // 2][0]
    same(whole, torch.tensor([first, first, first + 1, first + 1]).float())
    refused(ValueError, "neither a row nor a column", process_group.regular_rows, [0, 1, 3], 6)
    refused(ValueError, "neither a row nor a column", process_group.regular_rows, [1, 2], 4)
    assert process_group.regular_rows([1, 5, 9], 12) == [[i, i + 4, i + 8] for i in range(4)]
    assert process_group.regular_rows([2, 3], 4) == rows
    regular = {"xla_pg_options": {"spmd": True}}
    for column in ([0, 2], [1, 3]):
        group = dist.new_group(column, pg_options=regular)
        if index in column:
            assert group._mesh == [[0, 2], [1, 3]]
            t = torch.ones(2, device="xla") * (index + 1)
            dist.all_reduce(t, group=group)
            same(t, torch.full((2,), sum(column) + 2.0))
    alone = ProcessGroupXla(prefix_store=None, rank=index, size=4, timeout=None)
    assert (alone.rank(), alone.size(), alone.ranks) == (index, 4, [0, 1, 2, 3])
    refused(ValueError, "size=2", lambda: ProcessGroupXla(None, 0, 2, ranks=[0]))
    return True


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 10)
    )


def digits():
    from sklearn.datasets import load_digits  # the fork server does without

    data = load_digits()
    images = torch.from_numpy(data.images).float()[:, None] / 16
    return images, torch.from_numpy(data.target).long()


def trains(index, how, steps, batch):
    """The losses of training on the digits, each the mean over the global batch, and a weight."""
    device = torch_xla.device()
    images, labels = digits()
    world = xr.world_size()
    model = network().to(device)
    if how.startswith("ddp"):
        initialize("xla://")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch about its own future
            model = torch.nn.parallel.DistributedDataParallel(
                model, gradient_as_bucket_view=how == "ddp views"
            )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        mine = torch.arange(step * batch, (step + 1) * batch).chunk(world)[index]
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(
            model(images[mine].to(device)), labels[mine].to(device)
        )
        loss.backward()
        if how == "xm":
            xm.optimizer_step(optimizer)
        else:
            optimizer.step()
        losses.append(xm.all_reduce("sum", loss.detach(), 1 / world))
        torch_xla.sync()
    weights = {n: p.detach().cpu().numpy() for n, p in model.named_parameters()}
    return [loss.item() for loss in losses], list(weights.values())


def functional(index):
    """Functional collectives on the world and a group of some ranks; a group of other replicas."""
    rank, world = initialize("xla://")
    ranks = list(range(1, world))
    some = dist.new_group(ranks, group_desc="not the first")
    if rank in ranks:
        assert some.group_name != dist.group.WORLD.group_name
    for group, members in ((dist.group.WORLD, list(range(world))), (some, ranks)):
        if rank in members:
            functional_in(group, members, rank)
    xm.set_replication("xla:0", [])
    refused(RuntimeError, "there are 1 replicas now", dist.all_reduce, tensor(rank, 2))
    xm.set_replication("xla:0", ["xla:0"])
    summed = tensor(rank, 2)
    dist.all_reduce(summed)
    same(summed, sum(tensor(r, 2, device="cpu") for r in range(world)))
    dist.destroy_process_group()
    return True


def functional_in(group, ranks, rank):
    size, mine = len(ranks), ranks.index(rank)
    value = tensor(rank, 2 * size)
    everyone = [tensor(r, 2 * size, device="cpu") for r in ranks]
    slices = slice(2 * mine, 2 * mine + 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", FutureWarning)  # names change between releases of torch
        same(functional_collectives.all_reduce(value, "sum", group), sum(everyone))
        same(functional_collectives.all_reduce(value, "max", group), everyone[-1])
        (reduced,) = functional_collectives.all_reduce_coalesced([value], "sum", group)
        same(reduced, sum(everyone))
        same(functional_collectives.broadcast(value, 0, group), everyone[0])
        same(functional_collectives.all_gather_tensor(value, 0, group), torch.cat(everyone))
        scattered = functional_collectives.reduce_scatter_tensor(value, "sum", 0, group)
        same(scattered, sum(everyone)[slices])
        exchanged = functional_collectives.all_to_all_single(value, None, None, group)
        same(exchanged, torch.cat([v[slices] for v in everyone]))
