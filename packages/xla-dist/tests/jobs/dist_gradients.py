"""Every differentiable collective: run on a replica, and on all replicas in one process.

A case is (name, dtype, groups, arguments); what it gives is the value and the gradients of its inputs
for a loss ``sum(value * weight)``, each replica with a weight of its own.
"""

from __future__ import annotations

import copy
import functools

import torch
from torch import nn

import torch_xla
import torch_xla.core.functions as xf
import torch_xla.runtime as xr
from xla_core.extension_api.programs import all_programs, module_text
from xla_core.testing.internals import KEPT_PREFIX
from xla_dist.collectives.autograd_functions import AllGather, AllToAll, ReduceScatter

GROUPS = {2: (None, ((1, 0),)), 4: (None, ((0, 1), (2, 3)), ((3, 0), (2, 1)))}


def cases(world):
    """All cases for so many replicas."""
    found = []
    for dtype in ("float32", "bfloat16"):
        for groups in GROUPS[world]:
            found += [("all_reduce", dtype, groups, (k,)) for k in ("sum", "min", "max", "mul")]
            found += [("gather", dtype, groups, (dim,)) for dim in (0, 1)]
            found += [("scatter", dtype, groups, (dim,)) for dim in (0, 1)]
            found += [("exchange", dtype, groups, dims) for dims in ((0, 1), (1, 1))]
        found += [("all_gather", dtype, None, (dim,)) for dim in (0, 1)]
        found += [("sum_layer", dtype, None, ())]
    found += [("distributed_mm", "float32", None, (split,)) for split in (1, 2)]
    found += [("batch_norm", "float32", None, (shape,)) for shape in ((6, 3), (4, 3, 5))]
    return found


def inputs(case, rank, world):
    """A replica's inputs, all of which get gradients, and the weight of its result's shape."""
    name, dtype, _, arguments = case
    random = torch.Generator().manual_seed(rank)
    make = functools.partial(torch.randn, generator=random)
    if name == "distributed_mm":
        return [make(6, 2), make(2 * world, 4)]
    given = [make(*arguments[0]) if name == "batch_norm" else make(4, 8)]
    return [x.to(getattr(torch, dtype)) for x in given]


def weight(rank, like):
    """What a replica's result is weighted with in its loss."""
    random = torch.Generator().manual_seed(1000 + rank)
    return torch.randn(like.shape, generator=random).to(like.dtype)


# --- all replicas in one process ----------------------------------------------------------------


def expected(case, world):
    """Value and gradients for every replica, by PyTorch on the CPU, in float64."""
    name, dtype, groups, arguments = case
    given = [[x.double().requires_grad_() for x in inputs(case, r, world)] for r in range(world)]
    nested = groups or (tuple(range(world)),)
    results = [None] * world
    for group in nested:
        values = [given[r] for r in group]
        for r, result in zip(group, _REFERENCE[name](values, *arguments), strict=True):
            results[r] = result
    rounded = [weight(r, x.to(getattr(torch, dtype))) for r, x in enumerate(results)]
    sum((x * w.double()).sum() for x, w in zip(results, rounded, strict=True)).backward()
    return [
        [results[r].detach(), *(x.grad for x in given[r])] for r in range(world)
    ]  # fmt: skip


def _firsts(values):
    return [v[0] for v in values]


def _reduced(values, kind):
    stacked = torch.stack(_firsts(values))
    reduce = {"sum": torch.sum, "mul": torch.prod, "min": torch.amin, "max": torch.amax}[kind]
    return [reduce(stacked, dim=0)] * len(values)


def _gathered(values, dim):
    return [torch.cat(_firsts(values), dim)] * len(values)


def _scattered(values, dim):
    return sum(_firsts(values)).chunk(len(values), dim)


def _exchanged(values, split, concat):
    parts = [x.chunk(len(values), split) for x in _firsts(values)]
    return [torch.cat([p[i] for p in parts], concat) for i in range(len(values))]


def _multiplied(values, _split):
    whole = torch.cat([w for w, _ in values], dim=1)
    return [whole @ x for _, x in values]


def _normalized(values, _shape):
    batches = _firsts(values)
    module = torch.nn.BatchNorm1d(3, dtype=torch.float64)
    return module(torch.cat(batches)).chunk(len(batches))


_REFERENCE = {
    "all_reduce": _reduced,
    "gather": _gathered,
    "all_gather": _gathered,
    "scatter": _scattered,
    "exchange": _exchanged,
    "sum_layer": lambda values: _reduced(values, "sum"),
    "distributed_mm": _multiplied,
    "batch_norm": _normalized,
}


# --- one replica --------------------------------------------------------------------------------


def _run(name, groups, arguments, given):
    groups = [list(g) for g in groups] if groups else None
    if name == "distributed_mm":
        return xf.distributed_mm(*given, *arguments)
    (x,) = given
    if name == "all_reduce":
        return xf.all_reduce(arguments[0], x, groups=groups)
    if name == "all_gather":
        return xf.all_gather(x, *arguments)
    if name == "gather":
        return AllGather.apply(x, *arguments, groups)
    if name == "scatter":
        return ReduceScatter.apply(x, *arguments, groups)
    if name == "exchange":
        return AllToAll.apply(x, *arguments, groups)
    if name == "sum_layer":
        return xf.AllReduceSumLayer.apply(x)
    return xf.SyncBatchNorm(3).to(x.device)(x)


def run_all(index):
    """Value and gradients of every case on this replica, as float32 arrays."""
    device = torch_xla.device()
    found = []
    for case in cases(xr.world_size()):
        name, _, groups, arguments = case
        given = [
            x.to(device).detach().requires_grad_() for x in inputs(case, index, xr.world_size())
        ]
        result = _run(name, groups, arguments, given)
        (result * weight(index, result).to(device)).sum().backward()
        found.append([result.detach(), *(x.grad for x in given)])
    torch_xla.sync()
    return [[t.float().cpu().numpy() for t in tensors] for tensors in found]


# --- equal layers with a collective in each -----------------------------------------------------

LAYERS = 12


class Block(nn.Module):
    """Adds ``total`` of its result over the replicas to its input."""

    def __init__(self, total):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.total = total

    def forward(self, x):
        return x + self.total(self.down(nn.functional.gelu(self.up(self.norm(x)))))


def blocks(total):
    """The same layers on every replica."""
    torch.manual_seed(0)
    return nn.Sequential(*[Block(total) for _ in range(LAYERS)])


def weighted(index):
    """A replica's batch, and the weight of its result in the loss."""
    random = torch.Generator().manual_seed(index)
    return torch.randn(4, 8, generator=random), torch.randn(4, 8, generator=random)


def repeated(index):
    """Result and gradients on this replica, and how many collectives its functions have inside."""
    device = torch_xla.device()
    model = blocks(lambda x: xf.all_reduce("sum", x, 0.5)).to(device)
    x, weight = (t.to(device) for t in weighted(index))
    result = model(x)
    (result * weight).sum().backward()
    torch_xla.sync()
    step = max(all_programs(), key=lambda program: program.operations)
    functions = module_text(step.program.stablehlo).split("func.func private @")[1:]
    inside = [f.count("all_reduce") for f in functions if f.startswith(KEPT_PREFIX)]
    values = [result.detach(), *(p.grad for p in model.parameters())]
    return [t.cpu().numpy() for t in values], inside


def repeated_on_cpu(world):
    """The same for all replicas in one process, in float64."""
    model = blocks(nn.Identity())
    models = [copy.deepcopy(model).double() for _ in range(world)]
    values, weights = zip(*map(weighted, range(world)), strict=True)
    values = [x.double() for x in values]
    for layer in range(LAYERS):
        # what a layer adds is its result less its input
        added = [m[layer](x) - x for m, x in zip(models, values, strict=True)]
        values = [x + 0.5 * sum(added) for x in values]
    sum((x * w.double()).sum() for x, w in zip(values, weights, strict=True)).backward()
    return [
        [x.detach(), *(p.grad for p in m.parameters())] for x, m in zip(values, models, strict=True)
    ]
