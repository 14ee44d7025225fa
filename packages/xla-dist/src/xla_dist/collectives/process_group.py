"""torch.distributed's process groups on ``xla``: collectives recorded in the graph.

A collective is recorded and runs with the step; ``wait()`` returns at once, as reading a result
waits for it anyway. CPU tensors (object collectives, sizes) and one-sided transfers go through the
coordinator at once. A group of some ranks is called by these only; the others do not notice.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from xla_core.extension_api import distributed, jobs, runtime, training
from xla_core.extension_api.operators import Operand
from xla_core.extension_api.tensors import XLATensor, storage_of
from xla_dist.collectives import host_collectives, model_collectives
from xla_dist.job_health.bounded_wait import BoundedWait
from xla_dist.processes import rendezvous

MSG_OP: Final = "the xla backend has no reduction {op}; it has {known}"
MSG_MIXED: Final = "{name}: tensors on {devices}; give either xla tensors or CPU tensors"
MSG_SPLITS: Final = (
    "all_to_all_single on xla tensors splits evenly over the {size} ranks; got sizes {sizes}. Programs "
    "have fixed shapes: pad the parts, or use CPU tensors"
)
MSG_WORLD: Final = (
    "{name}: there are {got} replicas now, and there were {wanted} when this process group was made; "
    "call xm.set_replication before init_process_group"
)
MSG_MESH: Final = "xla_pg_options: rank {rank} is in no row of mesh={mesh}"
MSG_SIZE: Final = "a process group of size={size} with ranks={ranks}"
MSG_IRREGULAR: Final = (
    "xla_pg_options: ranks {ranks} are neither a row nor a column of a rectangle of all {world} ranks; name "
    "the groups by {{'mesh': [[...], ...]}}"
)

_KINDS: Final[list[tuple[object, str]]] = [
    (dist.ReduceOp.SUM, "sum"),
    (dist.ReduceOp.AVG, "sum"),
    (dist.ReduceOp.PRODUCT, "mul"),
    (dist.ReduceOp.MIN, "min"),
    (dist.ReduceOp.MAX, "max"),
    (dist.ReduceOp.BAND, "and"),
    (dist.ReduceOp.BOR, "or"),
]


def _kind(op: Operand) -> str:
    for known, kind in _KINDS:
        if op == known:
            return kind
    names = "SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR"
    raise ValueError(MSG_OP.format(op=op, known=names))


class ProcessGroupXla(dist.ProcessGroup):
    """The process group of the backend ``xla``, of ``size`` members, of which this process is number ``rank``.

    ``ranks`` are the members' ordinals, in order (default: the first ``size``). ``prefix_store`` is what
    ``torch.distributed`` made for it. ``timeout`` is kept: collectives wait as long as the job lives. Raises
    ValueError unless there are ``size`` ranks.
    """

    def __init__(
        self,
        prefix_store: object,
        rank: int,
        size: int,
        timeout: timedelta | None = None,
        *,
        ranks: Sequence[int] | None = None,
    ) -> None:
        super().__init__(rank, size)
        self.prefix_store = prefix_store
        self.timeout = timeout
        self.ranks = list(range(size) if ranks is None else ranks)
        if len(self.ranks) != size:
            raise ValueError(MSG_SIZE.format(size=size, ranks=self.ranks))
        self._mesh = [self.ranks]
        self.me = rank
        self._sent: dict[tuple[int, int, int], int] = {}
        self._world = runtime.world_size()
        self._groups = _padded_groups(self.ranks, self._world)
        self._name = self._description = ""

    def getBackendName(self) -> str:
        """``"xla"``."""
        return "xla"

    def _get_backend(self, device: torch.device) -> ProcessGroupXla:
        """Itself: there is no backend in C++. ``batch_isend_irecv`` of torch 2.15 asks it what it can do."""
        del device
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        """Where its tensors may be: ``torch.distributed.checkpoint.async_save`` asks for the CPU."""
        return [torch.device("xla"), torch.device("cpu")]

    # --- its name: that of torch's own groups is kept by a backend in C++, which this one has not ---

    def getGroupName(self) -> str:
        """The name that ``torch.distributed`` has given the group."""
        return self._name

    def setGroupName(self, name: str) -> None:
        """Give the group the name by which functional collectives find it."""
        self._name = name

    _set_group_name = setGroupName
    group_name = property(getGroupName)

    def getGroupDesc(self) -> str:
        """What the group is for, as ``group_desc`` of ``dist.new_group`` says."""
        return self._description

    def setGroupDesc(self, description: str) -> None:
        """Say what the group is for."""
        self._description = description

    _set_group_desc = setGroupDesc
    group_desc = property(getGroupDesc)

    # --- running ---

    def run(
        self, name: str, tensors: Sequence[torch.Tensor], *arguments: Operand
    ) -> list[torch.Tensor]:
        """The collective ``name`` of the group (``collective_ops``); new tensors, nothing is written."""
        return self._run(name, tensors, *arguments)

    def reduced(
        self, name: str, tensors: Sequence[torch.Tensor], op: object, *arguments: object
    ) -> list[Any]:
        """``run`` of one that reduces by ``op``, which may be the mean."""
        return self._averaged(self._run(name, tensors, _kind(op), *arguments), op)

    def _run(
        self, name: str, tensors: Sequence[torch.Tensor], *arguments: object
    ) -> list[torch.Tensor]:
        """One collective of the group; new tensors."""
        on_xla = [isinstance(t, XLATensor) for t in tensors]
        if all(on_xla):
            return self._record(name, [t.detach() for t in tensors], arguments)
        if any(on_xla):
            devices = sorted({str(t.device) for t in tensors})
            raise ValueError(MSG_MIXED.format(name=name, devices=", ".join(devices)))
        return self._on_host(name, [t.detach() for t in tensors], arguments)

    def _record(
        self, name: str, tensors: list[torch.Tensor], arguments: Sequence[Operand]
    ) -> list[torch.Tensor]:
        if len(self.ranks) == 1:
            return [t.clone() for t in tensors]
        trace = storage_of(tensors[0]).trace
        world = model_collectives.world_of(trace)
        if world != self._world:
            raise RuntimeError(MSG_WORLD.format(name=name, got=world, wanted=self._world))
        if name == "broadcast":
            arguments = [self.ranks[arguments[0]]]
        if -1 in self._groups[0] and name not in ("all_reduce", "broadcast"):
            return _through_reduction(self, name, tensors, arguments)
        given = tensors[0] if name == "all_to_all" else tensors
        return model_collectives.record(trace, name, given, *arguments, *self._groups)

    def _on_host(
        self, name: str, tensors: list[torch.Tensor], arguments: Sequence[object]
    ) -> list[torch.Tensor]:
        everyone = rendezvous.gather_objects(f"torch.distributed {name}", tensors, self.ranks)
        size = len(self.ranks)
        results = host_collectives.compute(name, everyone, [*arguments, range(size), size])
        return results[self.me]

    # --- reductions ---

    def allreduce(self, tensors: Operand, opts: Operand = None) -> dist.Work:
        """Reduce in place."""
        op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
        results = self._run("all_reduce", tensors, _kind(op))
        return _stored(tensors, self._averaged(results, op))

    def allreduce_coalesced(self, tensors: Operand, opts: object = None) -> dist.Work:
        """``allreduce`` of several tensors by one collective."""
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: Operand, opts: Operand) -> dist.Work:
        """Reduce in place on rank ``opts.rootRank``; the others keep their values."""
        results = self._averaged(
            self._run("all_reduce", tensors, _kind(opts.reduceOp)), opts.reduceOp
        )
        return _stored(tensors, results) if self.me == opts.rootRank else _work(tensors)

    def reduce_scatter(self, outputs: Operand, inputs: Operand, opts: Operand = None) -> dist.Work:
        """Each rank's own of ``inputs[0]`` (one tensor per rank), reduced."""
        for output, parts in zip(outputs, inputs, strict=True):
            self._reduce_scatter_base(output, torch.cat([p.reshape(-1) for p in parts]), opts)
        return _work(outputs)

    def _reduce_scatter_base(
        self, output: Operand, input: Operand, opts: Operand = None
    ) -> dist.Work:
        """This rank's slice of ``input``, reduced."""
        op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
        results = self._run("reduce_scatter", [input.reshape(-1)], _kind(op), 0)
        (part,) = self._averaged(results, op)
        return _stored([output], [part.reshape(output.shape)])

    def reduce_scatter_tensor_coalesced(
        self, outputs: Operand, inputs: Operand, opts: object = None
    ) -> dist.Work:
        """``_reduce_scatter_base`` of several tensors."""
        for output, input in zip(outputs, inputs, strict=True):
            self._reduce_scatter_base(output, input, opts)
        return _work(outputs)

    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def _averaged(self, results: list[torch.Tensor], op: object) -> list[torch.Tensor]:
        if op != dist.ReduceOp.AVG:
            return results
        return [(r / len(self.ranks)).to(r.dtype) for r in results]

    # --- movements ---

    def broadcast(self, tensors: Operand, opts: Operand) -> dist.Work:
        """Rank ``opts.rootRank``'s values, in place."""
        return _stored(tensors, self._run("broadcast", tensors, opts.rootRank))

    def allgather(self, outputs: Operand, inputs: Operand, opts: object = None) -> dist.Work:
        """Every rank's tensor, one output each; outputs beyond the ranks stay as they are."""
        del opts
        for places, value in zip(outputs, inputs, strict=True):
            _stored(places[: len(self.ranks)], self._gathered(value).unbind(0))
        return _work(outputs)

    def _gathered(self, value: torch.Tensor) -> torch.Tensor:
        """Every rank's ``value`` along a new first dimension."""
        return self._run("all_gather", [value[None]], 0)[0]

    def _allgather_base(self, output: Operand, input: Operand, opts: object = None) -> dist.Work:
        """Every rank's tensor in one output."""
        del opts
        (whole,) = self._run("all_gather", [input.reshape(-1)], 0)
        return _stored([output], [whole.reshape(output.shape)])

    def allgather_coalesced(
        self, output_lists: Operand, input_list: Operand, opts: object = None
    ) -> dist.Work:
        """Every rank's list of tensors; ``output_lists`` has a list per rank."""
        del opts
        for i, value in enumerate(input_list):
            _stored([places[i] for places in output_lists], self._gathered(value).unbind(0))
        return _work(output_lists)

    def allgather_into_tensor_coalesced(
        self, outputs: Operand, inputs: Operand, opts: object = None
    ) -> dist.Work:
        """``_allgather_base`` of several tensors."""
        for output, input in zip(outputs, inputs, strict=True):
            self._allgather_base(output, input, opts)
        return _work(outputs)

    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def gather(self, outputs: Operand, inputs: Operand, opts: Operand) -> dist.Work:
        """Every rank's tensor, on rank ``opts.rootRank``."""
        parts = [self._gathered(value).unbind(0) for value in inputs]
        if self.me == opts.rootRank:
            for places, values in zip(outputs, parts, strict=True):
                _stored(places, values)
        return _work(outputs)

    def scatter(self, outputs: Operand, inputs: Operand, opts: Operand) -> dist.Work:
        """Rank ``opts.rootRank``'s list of tensors, one to each rank."""
        for i, output in enumerate(outputs):
            parts = inputs[i] if self.me == opts.rootRank else [output] * len(self.ranks)
            (whole,) = self._run("broadcast", [torch.stack(list(parts))], opts.rootRank)
            _stored([output], [whole[self.me]])
        return _work(outputs)

    def alltoall(self, outputs: Operand, inputs: Operand, opts: object = None) -> dist.Work:
        """The i-th input goes to rank i; outputs by where they come from."""
        del opts
        if len({t.shape for t in [*inputs, *outputs]}) == 1:
            (whole,) = self._run("all_to_all", [torch.stack(list(inputs))], 0, 0)
            return _stored(outputs, whole.unbind(0))
        host = [t.detach().cpu() for t in inputs]
        everyone = rendezvous.gather_objects("torch.distributed alltoall", host, self.ranks)
        return _stored(outputs, [sent[self.me] for sent in everyone])

    def alltoall_base(
        self,
        output: Operand,
        input: Operand,
        output_sizes: Operand,
        input_sizes: Operand,
        opts: object = None,
    ) -> dist.Work:
        """Slices of ``input`` along dimension 0, one to each rank."""
        size = len(self.ranks)
        if not input_sizes and not output_sizes:
            (whole,) = self._run("all_to_all", [input], 0, 0)
            return _stored([output], [whole])
        if isinstance(input, XLATensor) and len({*input_sizes, *output_sizes}) > 1:
            sizes = [*input_sizes, *output_sizes]
            raise ValueError(MSG_SPLITS.format(size=size, sizes=sizes))
        rows = [input.size(0) // size] * size
        inputs = list(input.split(list(input_sizes) or rows))
        outputs = list(output.split(list(output_sizes) or [output.size(0) // size] * size))
        return self.alltoall(outputs, inputs, opts)

    all_to_all_single = alltoall_base

    # --- on the host ---

    def barrier(self, opts: object = None) -> dist.Work:
        """Wait for all ranks of the group, and for what this one has recorded."""
        del opts
        training.sync()
        if len(self.ranks) > 1:
            rendezvous.rendezvous("torch.distributed barrier", b"", self.ranks)
        return _work([])

    def send(self, tensors: Operand, destination: int, tag: int = 0) -> dist.Work:
        """Hand tensors to another rank; returns at once."""
        key = self._mail(self.ranks[self.me], self.ranks[destination], tag)
        rendezvous.put(key, pickle.dumps([t.detach().cpu() for t in tensors]))
        return _work(tensors)

    def recv(self, tensors: Operand, source: int, tag: int = 0) -> dist.Work:
        """Take what rank ``source`` sent, waiting for it."""
        origin = self.ranks[source]
        key = self._mail(origin, self.ranks[self.me], tag)
        with BoundedWait(f"recv from rank {source}", self.ranks[self.me]) as patience:
            data = rendezvous.take(key, origin, patience)
        return _stored(tensors, pickle.loads(data))

    def _mail(self, source: int, target: int, tag: int) -> str:
        """The key of the next message from ``source`` to ``target``: both count them."""
        route = (source, target, tag)
        number = self._sent[route] = self._sent.get(route, 0) + 1
        group = "-".join(map(str, self.ranks))
        return f"xla/mail/{group}/{source}-{target}-{tag}/{number}"

    def recv_anysource(self, tensors: Operand, tag: int = 0) -> dist.Work:
        """Not here: raises NotImplementedError; name the source."""
        raise NotImplementedError(
            "the xla backend receives from a named rank: recv(tensor, src=...)"
        )


def _padded_groups(ranks: Sequence[int], world: int) -> tuple[list[int], int]:
    """Replica groups for a program that only ``ranks`` run: they first, then the others somehow.

    Where the others do not fill groups of the same size, the rest of a group is -1.
    """
    size = len(ranks)
    others = [r for r in range(world) if r not in ranks]
    return [*ranks, *others, *[-1] * (-len(others) % size)], size


def _through_reduction(
    group: ProcessGroupXla, name: str, tensors: list[torch.Tensor], arguments: Sequence[object]
) -> list[Any]:
    """A movement between ranks that are no whole number of equal groups: by sums of bit patterns.

    XLA moves only between groups of one size. Every rank writes its value into its row of zeros, and
    broadcasts of the rows, which are exact, give everyone all of them.
    """
    size = len(group.ranks)
    rows = [group._run("broadcast", tensors, place) for place in range(size)]
    return host_collectives.compute(name, rows, [*arguments, range(size), size])[group.me]


def _stored(targets: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> dist.Work:
    with torch.no_grad():
        for target, value in zip(targets, values, strict=True):
            target.copy_(value.reshape(target.shape))
    return _work(list(targets))


def _work(result: object) -> dist.Work:
    """A finished work: what was recorded runs with the step, and reading a result waits for it."""
    return distributed.finished_work(result)


def create(options: Operand, backend_options: object) -> ProcessGroupXla:
    """The process group that torch.distributed asks the backend for.

    ``backend_options`` is ``pg_options`` of ``dist.new_group``: with ``{"xla_pg_options": {"mesh":
    rows}}``, rows of ranks, every row is a group of its own. With ``{"xla_pg_options": {"spmd": True}}`` the
    ranks have to be a row or a column of a rectangle (``regular_rows``). Raises ValueError for a rank in no row.
    """
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    if jobs.connection() is None:
        runtime.world_size()  # starts the client, which joins the job of the environment
    mine = ranks[options.group_rank]
    wanted = backend_options if isinstance(backend_options, Mapping) else {}
    given = wanted.get("xla_pg_options", {})
    mesh = given.get("mesh") or [ranks]
    if given.get("spmd") and not given.get("mesh"):
        mesh = regular_rows(ranks, runtime.world_size())
    row = next((list(row) for row in mesh if mine in row), None)
    if row is None:
        raise ValueError(MSG_MESH.format(rank=mine, mesh=mesh))
    group = ProcessGroupXla(options.store, row.index(mine), len(row), options.timeout, ranks=row)
    group._mesh = [list(r) for r in mesh]
    group.setGroupName(options.group_id)
    return group


def regular_rows(ranks: Sequence[int], world: int) -> list[list[int]]:
    """All rows, or all columns, of the rectangle of ``world`` ranks in which ``ranks`` are one.

    ``[1, 5, 9]`` of 12 gives ``[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]``. Raises ValueError where there is no
    such rectangle.
    """
    size = len(ranks)
    others = world // size
    if size * others == world:
        rows = [list(range(i, i + size)) for i in range(0, world, size)]
        columns = [list(range(i, world, others)) for i in range(others)]
        for lines in (rows, columns):
            if list(ranks) in lines:
                return lines
    raise ValueError(MSG_IRREGULAR.format(ranks=list(ranks), world=world))


def new_xla_process_group(
    ranks: Sequence[int] | None = None,
    timeout: timedelta | None = None,
    backend: str | None = None,
    pg_options: object = None,
    **kwargs: object,
) -> Any:
    """``dist.new_group``, which also takes ``pg_options={'xla_pg_options': {'mesh': rows}}``.

    ``mesh`` is a list of lists of ranks: every row is a group of its own. ``{'spmd': True}`` in its place checks
    that ``ranks`` are a row or a column of a rectangle of all ranks, and raises ValueError otherwise.
    ``dist.new_group`` takes the same options; this is torch_xla's name for it.
    """
    named = {"timeout": timeout, "backend": backend, "pg_options": pg_options, **kwargs}
    return dist.new_group(list(ranks) if ranks is not None else None, **named)
