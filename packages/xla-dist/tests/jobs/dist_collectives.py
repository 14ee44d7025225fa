"""Every collective on every dtype and group, and what numpy says it should give.

A *case* is (name, dtype, groups, arguments). ``run_all`` records all cases in one step on one replica;
``expected`` computes a case for all replicas at once.
"""

from __future__ import annotations

import functools
import itertools

import numpy as np
import torch

import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr

DTYPES = ("float32", "bfloat16", "int64", "bool")
KINDS = ("sum", "mul", "min", "max", "and", "or")
GROUPS = {
    2: (None, ((0,), (1,)), ((1, 0),)),
    4: (None, ((0, 1), (2, 3)), ((3, 0), (2, 1))),
}
PAIRS = {2: ((0, 1), (1, 0)), 4: ((0, 2), (2, 3), (3, 0))}  # nobody sends to 1, 1 sends to nobody
_UFUNCS = {
    "sum": np.add, "mul": np.multiply, "min": np.minimum, "max": np.maximum,
    "and": np.bitwise_and, "or": np.bitwise_or,
}  # fmt: skip
_BOOL = {"sum": "or", "max": "or", "or": "or", "mul": "and", "min": "and", "and": "and"}


def cases(world):
    """All cases for so many replicas."""
    found = [("permute", dtype, None, ()) for dtype in DTYPES]
    for dtype, groups in itertools.product(DTYPES, GROUPS[world]):
        kinds = KINDS if dtype in ("int64", "bool") else KINDS[:4]
        found += [("all_reduce", dtype, groups, (kind,)) for kind in kinds]
        found += [("all_reduce_list", dtype, groups, ("sum",))]
        found += [("reduce_scatter", dtype, groups, (kind, i % 2)) for i, kind in enumerate(kinds)]
        found += [("all_gather", dtype, groups, (dim,)) for dim in (0, -1)]
        found += [("all_to_all", dtype, groups, dims) for dims in ((0, 1), (1, 0))]
        found += [("broadcast", dtype, groups, (world - 1,))]
    for name in (  # the same collectives with further arguments
        "all_reduce_scaled", "all_gather_bucketized", "reduce_scatter_bucketized",
        "all_gather_output", "reduce_scatter_output",
    ):  # fmt: skip
        found += [(name, dtype, None, ()) for dtype in ("float32", "int64")]
    found += [("all_to_all", "float32", None, dims) for dims in ((0, 0), (1, 1))]
    return found


def value(rank, dtype, number=0):
    """What a replica brings: (4, 8), small numbers whose sums and products are exact."""
    random = np.random.default_rng(100 * number + rank)
    if dtype == "bool":
        return random.integers(0, 2, (4, 8)).astype(bool)
    small = random.integers(1, 4, (4, 8))
    if dtype == "int64":
        return small * (1 << 33) if number else small  # more than 32 bits, in the second tensor
    return small.astype(np.float32) * random.choice([-1, 1], (4, 8))


# --- numpy --------------------------------------------------------------------------------------


def _reduced(kind, values):
    if values[0].dtype == bool:
        kind = _BOOL[kind]
    return functools.reduce(_UFUNCS[kind], values)


def _each(groups, world, function):
    """``function(the group, a replica's place in it)`` for each replica."""
    nested = groups or (tuple(range(world)),)
    of = {r: (group, place) for group in nested for place, r in enumerate(group)}
    return [function(*of[r]) for r in range(world)]


def expected(case, world):
    """What every replica gets: a list of arrays for each."""
    name, dtype, groups, arguments = case
    first, second = ([value(r, dtype, n) for r in range(world)] for n in (0, 1))
    each = functools.partial(_each, groups, world)
    return [
        [np.asarray(x) for x in result]
        for result in _EXPECTED[name](each, first, second, world, *arguments)
    ]


def _permuted(_each, first, _second, world):
    origin = {target: source for source, target in PAIRS[world]}
    return [[first[origin[r]] if r in origin else np.zeros_like(first[r])] for r in range(world)]


def _part(whole, dim, group, place):
    return np.split(whole, len(group), dim)[place]


def _scattered(each, values, kind, dim):
    return each(lambda g, place: _part(_reduced(kind, [values[r] for r in g]), dim, g, place))


def _gathered(each, values, dim):
    return each(lambda g, _: np.concatenate([values[r] for r in g], dim))


def _pairs(*lists):
    return [list(results) for results in zip(*lists, strict=True)]


def _exchanged(each, values, split, concat):
    return each(
        lambda g, place: np.concatenate([_part(values[r], split, g, place) for r in g], concat)
    )


def _spread(each, first, second, _world, root):
    places = each(lambda g, _: root if root in g else None)
    return [
        [values[r if place is None else place] for values in (first, second)]
        for r, place in enumerate(places)
    ]


def _sums(each, values, kind="sum"):
    return each(lambda g, _: _reduced(kind, [values[r] for r in g]))


_EXPECTED = {
    "permute": _permuted,
    "all_reduce": lambda each, a, b, w, kind: _pairs(_sums(each, a, kind)),
    "all_reduce_list": lambda each, a, b, w, kind: _pairs(
        _sums(each, a, kind), _sums(each, b, kind)
    ),
    "all_reduce_scaled": lambda each, a, b, w: [
        [(x[0] * 2).astype(x[0].dtype)] for x in _pairs(_sums(each, a))
    ],
    "reduce_scatter": lambda each, a, b, w, kind, dim: _pairs(_scattered(each, a, kind, dim)),
    "all_gather": lambda each, a, b, w, dim: _pairs(_gathered(each, a, dim)),
    "all_to_all": lambda each, a, b, w, s, c: _pairs(_exchanged(each, a, s, c)),
    "broadcast": _spread,
    "all_gather_bucketized": lambda each, a, b, w: _pairs(
        _gathered(each, a, 0), _gathered(each, b, 0)
    ),
    "reduce_scatter_bucketized": lambda each, a, b, w: _pairs(
        _scattered(each, a, "sum", 0), _scattered(each, b, "sum", 0)
    ),
    "all_gather_output": lambda each, a, b, w: _pairs(_gathered(each, a, 0)),
    "reduce_scatter_output": lambda each, a, b, w: _pairs(_scattered(each, a, "sum", 0)),
}


# --- on the device ------------------------------------------------------------------------------


def _run(name, groups, arguments, first, second):
    groups = [list(g) for g in groups] if groups else None
    size = len(groups[0]) if groups else xr.world_size()
    rows, columns = first.shape
    if name == "permute":
        return [xm.collective_permute(first, [list(p) for p in PAIRS[xr.world_size()]])]
    if name == "all_reduce":
        return [xm.all_reduce(arguments[0], first, groups=groups)]
    if name == "all_reduce_list":
        both = [first, second]
        assert xm.all_reduce(arguments[0], both, groups=groups, pin_layout=False) is both
        return both
    if name == "all_reduce_scaled":
        return [xm.all_reduce(xm.REDUCE_SUM, first, scale=2.0, groups=groups)]
    if name == "reduce_scatter":
        kind, dim = arguments
        return [xm.reduce_scatter(kind, first, 1.0, dim, size, groups)]
    if name == "all_gather":
        return [xm.all_gather(first, arguments[0], groups)]
    if name == "all_to_all":
        return [xm.all_to_all(first, *arguments, size, groups)]
    if name == "broadcast":
        xm.collective_broadcast([first, second], arguments[0], groups)
        return [first, second]
    if name == "all_gather_bucketized":
        return xm.all_gather_bucketized([first, second], 0, groups, bucket_cap_mb=1)
    if name == "reduce_scatter_bucketized":
        return xm.reduce_scatter_bucketized("sum", [first, second], 1.0, 0, size, groups)
    if name == "all_gather_output":
        output = first.new_zeros(rows * size, columns)
        assert xm.all_gather(first, 0, groups, output=output) is output
        return [output]
    output = first.new_zeros(rows // size, columns)
    assert xm.reduce_scatter("sum", first, 1.0, 0, size, groups, output=output) is output
    return [output]


def run_all(index):
    """Every case of this replica, as float64 or integer arrays, in the order of ``cases``."""
    device = torch_xla.device()
    results = []
    for name, dtype, groups, arguments in cases(xr.world_size()):
        given = [
            torch.from_numpy(value(index, dtype, n)).to(getattr(torch, dtype)).to(device)
            for n in (0, 1)
        ]
        results.append(_run(name, groups, arguments, *given))
    torch_xla.sync()
    wanted = [getattr(torch, dtype) for _, dtype, _, _ in cases(xr.world_size())]
    for tensors, dtype in zip(results, wanted, strict=True):
        assert {t.dtype for t in tensors} == {dtype}
    return [
        [(t.float() if t.dtype == torch.bfloat16 else t).cpu().numpy() for t in tensors]
        for tensors in results
    ]


def refuses_dimensions(_index):
    """A dimension that is not there is an error in a world of one, too."""
    x, world = torch.ones(4, device="xla"), xr.world_size()
    calls = [
        lambda: xm.all_gather(x, 1),
        lambda: xm.reduce_scatter("sum", x, 1.0, -2, world),
        lambda: xm.all_to_all(x, 0, 3, world),
    ]
    for call in calls:
        try:
            call()
        except IndexError as error:
            assert "Dimension out of range" in str(error)
        else:
            raise AssertionError("no error")
    assert xm.all_gather(x, -1).shape == (4 * world,)
    return True
