"""``ProcessGroupXla``: torch.distributed's process groups on ``xla``.

A collective of xla tensors is recorded, and runs with the step; ``wait()`` returns immediately, because reading a
result waits for it anyway. CPU tensors (of object collectives, for example) and transfers between two ranks go
through the job's coordinator immediately. Only the members of a group call its collectives.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Final

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
    "all_to_all_single on xla tensors needs parts of one size for all {size} ranks; got sizes {sizes}. Programs "
    "have fixed shapes: pad the parts, or use CPU tensors"
)
MSG_WORLD: Final = (
    "{name}: there are {got} replicas now, but there were {wanted} when this process group was created; "
    "call xm.set_replication before init_process_group"
)
MSG_MESH: Final = "xla_pg_options: rank {rank} is in no row of mesh={mesh}"
MSG_SIZE: Final = "a process group of size={size} cannot have the ranks {ranks}"
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
    """A process group of the backend ``xla`` with ``size`` members, of which this process is number ``rank``.

    ``ranks`` are the members' ordinals, in order (default: the first ``size``). ``prefix_store`` is the store that
    ``torch.distributed`` has created for it. ``timeout`` is kept but has no effect: ``XLA_DIST_WAIT_TIMEOUT``
    bounds a wait. Raises ValueError unless there are ``size`` ranks.
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
        """This group: it has no backend in C++. ``batch_isend_irecv`` of torch 2.15 asks for its capabilities."""
        del device
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        """The devices of tensors that it takes: ``torch.distributed.checkpoint.async_save`` requires the CPU."""
        return [torch.device("xla"), torch.device("cpu")]

    # --- its name: a C++ backend, which this group does not have, stores the names of torch's own groups ---

    def getGroupName(self) -> str:
        """The name that ``torch.distributed`` has given to the group."""
        return self._name

    def setGroupName(self, name: str) -> None:
        """Set the name by which functional collectives find the group."""
        self._name = name

    _set_group_name = setGroupName
    group_name = property(getGroupName)

    def getGroupDesc(self) -> str:
        """The description of the group: ``group_desc`` of ``dist.new_group``."""
        return self._description

    def setGroupDesc(self, description: str) -> None:
        """Set the description of the group."""
        self._description = description

    _set_group_desc = setGroupDesc
    group_desc = property(getGroupDesc)

    # --- running ---

    def run(
        self, name: str, tensors: Sequence[torch.Tensor], *arguments: Operand
    ) -> list[torch.Tensor]:
        """Run the group's collective ``name``, an operator of ``collective_ops``; returns new tensors.

        ``arguments`` are those of the operator before its groups. Raises ValueError if some of ``tensors`` are on
        the CPU and others on xla.
        """
        return self._run(name, tensors, *arguments)

    def reduced(
        self, name: str, tensors: Sequence[torch.Tensor], op: object, *arguments: object
    ) -> list[torch.Tensor]:
        """``run`` for a collective that reduces by ``op``, a ``dist.ReduceOp``, which may be ``AVG``.

        Raises ValueError for an operation that the backend does not have.
        """
        return self._averaged(self._run(name, tensors, _kind(op), *arguments), op)

    def _run(
        self, name: str, tensors: Sequence[torch.Tensor], *arguments: object
    ) -> list[torch.Tensor]:
        """Record a collective of xla tensors, or compute one of CPU tensors; returns new tensors."""
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
            return _through_broadcasts(self, name, tensors, arguments)
        operand = tensors[0] if name == "all_to_all" else tensors
        return model_collectives.record(trace, name, operand, *arguments, *self._groups)

    def _on_host(
        self, name: str, tensors: list[torch.Tensor], arguments: Sequence[object]
    ) -> list[torch.Tensor]:
        of_ranks = rendezvous.gather_objects(f"torch.distributed {name}", tensors, self.ranks)
        size = len(self.ranks)
        results = host_collectives.compute(name, of_ranks, [*arguments, range(size), size])
        return results[self.me]

    # --- reductions ---

    def allreduce(self, tensors: Operand, opts: Operand = None) -> dist.Work:
        """Reduce ``tensors`` in place by ``opts.reduceOp`` (default: SUM)."""
        op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
        results = self._run("all_reduce", tensors, _kind(op))
        return _stored(tensors, self._averaged(results, op))

    def allreduce_coalesced(self, tensors: Operand, opts: object = None) -> dist.Work:
        """``allreduce``, which reduces several tensors by one collective in any case."""
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: Operand, opts: Operand) -> dist.Work:
        """Reduce ``tensors`` in place on rank ``opts.rootRank``; on other ranks they keep their values."""
        results = self._averaged(
            self._run("all_reduce", tensors, _kind(opts.reduceOp)), opts.reduceOp
        )
        return _stored(tensors, results) if self.me == opts.rootRank else _work(tensors)

    def reduce_scatter(self, outputs: Operand, inputs: Operand, opts: Operand = None) -> dist.Work:
        """Reduce a list of tensors, one per rank, and write this rank's result to the output.

        ``inputs`` has such a list for each of ``outputs``.
        """
        for output, parts in zip(outputs, inputs, strict=True):
            self._reduce_scatter_base(output, torch.cat([p.reshape(-1) for p in parts]), opts)
        return _work(outputs)

    def _reduce_scatter_base(
        self, output: Operand, input: Operand, opts: Operand = None
    ) -> dist.Work:
        """Write this rank's slice of the reduction of ``input`` to ``output``."""
        op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
        results = self._run("reduce_scatter", [input.reshape(-1)], _kind(op), 0)
        (part,) = self._averaged(results, op)
        return _stored([output], [part.reshape(output.shape)])

    def reduce_scatter_tensor_coalesced(
        self, outputs: Operand, inputs: Operand, opts: object = None
    ) -> dist.Work:
        """``_reduce_scatter_base`` for each of several tensors."""
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
        """Replace the values of ``tensors`` by those of rank ``opts.rootRank``."""
        return _stored(tensors, self._run("broadcast", tensors, opts.rootRank))

    def allgather(self, outputs: Operand, inputs: Operand, opts: object = None) -> dist.Work:
        """Write the tensors of all ranks to a list of outputs, one per rank; further outputs do not change.

        ``outputs`` has such a list for each of ``inputs``.
        """
        del opts
        for places, value in zip(outputs, inputs, strict=True):
            _stored(places[: len(self.ranks)], self._gathered(value).unbind(0))
        return _work(outputs)

    def _gathered(self, value: torch.Tensor) -> torch.Tensor:
        """The values of all ranks, stacked along a new first dimension."""
        return self._run("all_gather", [value[None]], 0)[0]

    def _allgather_base(self, output: Operand, input: Operand, opts: object = None) -> dist.Work:
        """Write the tensors of all ranks to ``output``, one after the other."""
        del opts
        (whole,) = self._run("all_gather", [input.reshape(-1)], 0)
        return _stored([output], [whole.reshape(output.shape)])

    def allgather_coalesced(
        self, output_lists: Operand, input_list: Operand, opts: object = None
    ) -> dist.Work:
        """Write each rank's list of tensors to ``output_lists``, which has one list per rank."""
        del opts
        for i, value in enumerate(input_list):
            _stored([places[i] for places in output_lists], self._gathered(value).unbind(0))
        return _work(output_lists)

    def allgather_into_tensor_coalesced(
        self, outputs: Operand, inputs: Operand, opts: object = None
    ) -> dist.Work:
        """``_allgather_base`` for each of several tensors."""
        for output, input in zip(outputs, inputs, strict=True):
            self._allgather_base(output, input, opts)
        return _work(outputs)

    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def gather(self, outputs: Operand, inputs: Operand, opts: Operand) -> dist.Work:
        """Write the tensors of all ranks to ``outputs`` on rank ``opts.rootRank``."""
        parts = [self._gathered(value).unbind(0) for value in inputs]
        if self.me == opts.rootRank:
            for places, values in zip(outputs, parts, strict=True):
                _stored(places, values)
        return _work(outputs)

    def scatter(self, outputs: Operand, inputs: Operand, opts: Operand) -> dist.Work:
        """Send each rank one tensor of the list that rank ``opts.rootRank`` has for each output."""
        for i, output in enumerate(outputs):
            parts = inputs[i] if self.me == opts.rootRank else [output] * len(self.ranks)
            (whole,) = self._run("broadcast", [torch.stack(list(parts))], opts.rootRank)
            _stored([output], [whole[self.me]])
        return _work(outputs)

    def alltoall(self, outputs: Operand, inputs: Operand, opts: object = None) -> dist.Work:
        """Send input i to rank i, and write the tensor from rank i to output i.

        Tensors of different shapes go through the host.
        """
        del opts
        if len({t.shape for t in [*inputs, *outputs]}) == 1:
            (whole,) = self._run("all_to_all", [torch.stack(list(inputs))], 0, 0)
            return _stored(outputs, whole.unbind(0))
        host = [t.detach().cpu() for t in inputs]
        of_ranks = rendezvous.gather_objects("torch.distributed alltoall", host, self.ranks)
        return _stored(outputs, [sent[self.me] for sent in of_ranks])

    def alltoall_base(
        self,
        output: Operand,
        input: Operand,
        output_sizes: Operand,
        input_sizes: Operand,
        opts: object = None,
    ) -> dist.Work:
        """Send slices of ``input`` along dimension 0 to the ranks; ``output`` gets the received slices.

        ``input_sizes`` and ``output_sizes`` are the numbers of rows; empty means slices of one size. Raises
        ValueError for xla tensors with different sizes.
        """
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
        """Run this rank's pending step, and wait for all ranks of the group."""
        del opts
        training.sync()
        if len(self.ranks) > 1:
            rendezvous.rendezvous("torch.distributed barrier", b"", self.ranks)
        return _work([])

    def send(self, tensors: Operand, destination: int, tag: int = 0) -> dist.Work:
        """Send ``tensors`` to rank ``destination`` of the group; does not wait until it receives them."""
        key = self._mail(self.ranks[self.me], self.ranks[destination], tag)
        rendezvous.put(key, pickle.dumps([t.detach().cpu() for t in tensors]))
        return _work(tensors)

    def recv(self, tensors: Operand, source: int, tag: int = 0) -> dist.Work:
        """Write the tensors that rank ``source`` of the group sends to ``tensors``; waits for them."""
        origin = self.ranks[source]
        key = self._mail(origin, self.ranks[self.me], tag)
        with BoundedWait(f"recv from rank {source}", self.ranks[self.me]) as bounded_wait:
            data = rendezvous.take(key, origin, bounded_wait)
        return _stored(tensors, pickle.loads(data))

    def _mail(self, source: int, target: int, tag: int) -> str:
        """The key of the next message from ``source`` to ``target``; both ranks count the messages."""
        route = (source, target, tag)
        number = self._sent[route] = self._sent.get(route, 0) + 1
        group = "-".join(map(str, self.ranks))
        return f"xla/mail/{group}/{source}-{target}-{tag}/{number}"

    def recv_anysource(self, tensors: Operand, tag: int = 0) -> dist.Work:
        """Not supported: raises NotImplementedError, because a receiver must name the source."""
        raise NotImplementedError(
            "the xla backend receives from a named rank: recv(tensor, src=...)"
        )


def _padded_groups(ranks: Sequence[int], world: int) -> tuple[list[int], int]:
    """Replica groups for a program that only ``ranks`` run: a group of them, and groups of the other replicas.

    XLA wants every replica in a group, although the others do not run this program. -1 fills the last group up to
    the size of the others.
    """
    size = len(ranks)
    others = [r for r in range(world) if r not in ranks]
    return [*ranks, *others, *[-1] * (-len(others) % size)], size


def _through_broadcasts(
    group: ProcessGroupXla, name: str, tensors: list[torch.Tensor], arguments: Sequence[object]
) -> list[torch.Tensor]:
    """A collective of a group that does not divide the replicas into groups of one size, by broadcasts.

    XLA reduces in groups of different sizes, but moves values only between groups of one size. Our broadcast is an
    exact reduction: each rank broadcasts its values, and each computes its result from those of all ranks.
    """
    size = len(group.ranks)
    rows = [group._run("broadcast", tensors, place) for place in range(size)]
    return host_collectives.compute(name, rows, [*arguments, range(size), size])[group.me]


def _stored(targets: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> dist.Work:
    """Copy ``values`` into ``targets``; returns a finished work."""
    with torch.no_grad():
        for target, value in zip(targets, values, strict=True):
            target.copy_(value.reshape(target.shape))
    return _work(list(targets))


def _work(result: object) -> dist.Work:
    """A work that has finished: the collective runs with the step, and reading its result waits for it."""
    return distributed.finished_work(result)


def create(options: Operand, backend_options: object) -> ProcessGroupXla:
    """Create a process group for ``torch.distributed``, which passes ``options`` for a new group.

    ``backend_options`` is ``pg_options`` of ``dist.new_group``. With ``{"xla_pg_options": {"mesh": rows}}``, where
    ``rows`` are lists of ranks, each row is a group of its own. With ``{"xla_pg_options": {"spmd": True}}`` the
    ranks must be a row or a column of a rectangle (``regular_rows``). Raises ValueError if this rank is in no row.
    """
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    if jobs.connection() is None:
        runtime.world_size()  # starts the client, which joins the job of the environment
    rank = ranks[options.group_rank]
    by_backend = backend_options if isinstance(backend_options, Mapping) else {}
    xla_options = by_backend.get("xla_pg_options", {})
    mesh = xla_options.get("mesh") or [ranks]
    if xla_options.get("spmd") and not xla_options.get("mesh"):
        mesh = regular_rows(ranks, runtime.world_size())
    row = next((list(row) for row in mesh if rank in row), None)
    if row is None:
        raise ValueError(MSG_MESH.format(rank=rank, mesh=mesh))
    group = ProcessGroupXla(options.store, row.index(rank), len(row), options.timeout, ranks=row)
    group._mesh = [list(r) for r in mesh]
    group.setGroupName(options.group_id)
    return group


def regular_rows(ranks: Sequence[int], world: int) -> list[list[int]]:
    """All rows, or all columns, of the rectangle of ``world`` ranks in which ``ranks`` are a row or a column.

    ``[1, 5, 9]`` of 12 ranks gives ``[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]``. Raises ValueError if there is
    no such rectangle.
    """
    size = len(ranks)
    count = world // size
    if size * count == world:
        rows = [list(range(i, i + size)) for i in range(0, world, size)]
        columns = [list(range(i, world, count)) for i in range(count)]
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
) -> dist.ProcessGroup:
    """``dist.new_group`` under the name that torch_xla has for it.

    ``pg_options={'xla_pg_options': {'mesh': rows}}``, with a list of lists of ranks, makes each row a group of its
    own. ``{'spmd': True}`` instead of the mesh requires that ``ranks`` are a row or a column of a rectangle of
    all ranks, and raises ValueError otherwise. The other arguments are those of ``dist.new_group``.
    """
    options = {"timeout": timeout, "backend": backend, "pg_options": pg_options, **kwargs}
    return dist.new_group(list(ranks) if ranks is not None else None, **options)
