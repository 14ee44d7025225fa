"""``out=`` on ``xla``: what is written, cast, resized, warned about and refused is as on the CPU."""

from __future__ import annotations

import warnings

import pytest
import torch

from xla_core.dispatch import mutation


def table(device, dtype=torch.float32):
    return torch.arange(6).reshape(2, 3).clone().to(dtype).to(device)


def empty(device, *shape, dtype=torch.float32):
    return torch.full(shape, 9, dtype=dtype, device=device)


def outcome(run, device):
    """Results and warnings, or the exception."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            results = run(device)
        except Exception as error:  # the exception is what is compared
            return type(error), str(error)
    results = results if isinstance(results, tuple) else (results,)
    seen = [(r.dtype, tuple(r.shape), r.tolist()) for r in results]
    # C++ adds where it warned from
    texts = [str(w.message).partition(" (Triggered internally")[0] for w in caught]
    return seen, [(w.category, text, w.filename) for w, text in zip(caught, texts, strict=True)]


def into_itself(function, first, second):
    return function(first, second, out=first)


CASES = {
    "same shape": lambda d: torch.add(table(d), 1, out=empty(d, 2, 3)),
    "no elements yet": lambda d: torch.mul(table(d), 2, out=empty(d, 0)),
    "resized": lambda d: torch.add(table(d), 1, out=empty(d, 2)),
    "resized to fewer": lambda d: torch.add(table(d)[0], 1, out=empty(d, 4, 4)),
    "resized, product": lambda d: torch.mm(table(d), table(d).t(), out=empty(d, 5, 1)),
    "an operand too small": lambda d: into_itself(torch.add, table(d)[0, :1], table(d)),
    "an operand that fits": lambda d: into_itself(torch.sub, table(d), table(d)[0]),
    "cast to double": lambda d: torch.add(table(d), 1, out=empty(d, 2, 3, dtype=torch.float64)),
    "cast to bfloat16": lambda d: torch.mul(table(d), 2, out=empty(d, 2, 3, dtype=torch.bfloat16)),
    "cast to int is refused": lambda d: torch.add(
        table(d), 1, out=empty(d, 2, 3, dtype=torch.int64)
    ),
    "ints into float": lambda d: torch.add(table(d, torch.int64), 1, out=empty(d, 2, 3)),
    "an operator that casts nothing": lambda d: torch.neg(
        table(d), out=empty(d, 2, 3, dtype=torch.float64)
    ),
    "comparison into float": lambda d: torch.eq(table(d), 1, out=empty(d, 2, 3)),
    "sum into double": lambda d: torch.sum(table(d), 0, out=empty(d, 3, dtype=torch.float64)),
    "cumulative sum": lambda d: torch.cumsum(table(d), 0, out=empty(d, 2, 3)),
    "two outputs": lambda d: torch.max(
        table(d), 1, out=(empty(d, 0), empty(d, 0, dtype=torch.int64))
    ),
    "sort": lambda d: torch.sort(-table(d), out=(empty(d, 0), empty(d, 0, dtype=torch.int64))),
    "second output's dtype": lambda d: torch.sort(
        table(d), out=(empty(d, 0), empty(d, 0, dtype=torch.int32))
    ),
    "cat": lambda d: torch.cat([table(d), table(d)], out=empty(d, 0)),
    "stack": lambda d: torch.stack([table(d), table(d)], out=empty(d, 0)),
    "where": lambda d: torch.where(table(d) > 2, table(d), 0.0, out=empty(d, 2, 3)),
    "clamp": lambda d: torch.clamp(table(d), 1, 2, out=empty(d, 2, 3)),
    "index_select": lambda d: torch.index_select(
        table(d), 0, torch.tensor([1], device=d), out=empty(d, 1, 3)
    ),
    "factory": lambda d: torch.zeros(2, 3, out=empty(d, 2, 3, dtype=torch.int32)),
    "arange": lambda d: torch.arange(5, out=empty(d, 5)),
    "into a view": lambda d: _into_view(d, lambda x, out: torch.add(x, 1, out=out)),
    "matrix product into a transpose": lambda d: _into_transpose(d),
    "its own operand": lambda d: _own_operand(d),
    "operand's dtype": lambda d: torch.mm(table(d), table(d, torch.int64).t(), out=empty(d, 2, 2)),
    "operands that require grad": lambda d: torch.add(
        table(d).requires_grad_(), 1, out=empty(d, 2, 3)
    ),
    "an output that requires grad": lambda d: torch.add(
        table(d), 1, out=empty(d, 2, 3).requires_grad_()
    ),
    "expanded": lambda d: torch.add(table(d), 1, out=empty(d, 3).expand(2, 3)),
    "part of an expansion": lambda d: torch.add(table(d)[0], 1, out=empty(d, 3).expand(2, 3)[0]),
    # newer torch refuses it
    "two results into one": lambda d: torch.aminmax(
        table(d), dim=0, out=(lambda t: (t, t))(empty(d, 3))
    ),
}


def _into_view(device, call):
    base = empty(device, 4, 3)
    out = base[1:3]
    result = call(table(device), out)
    assert result is out
    return result, base


def _into_transpose(device):
    base = empty(device, 3, 2)
    torch.mm(table(device), torch.eye(3, device=device), out=base.t())
    return base


def _own_operand(device):
    x = table(device)
    return torch.sub(x * 3, x, out=x)


@pytest.mark.parametrize("run", CASES.values(), ids=CASES)
def test_out(run):
    assert outcome(run, "cpu") == outcome(run, "xla")


def test_the_resize_warning_is_shown_at_the_users_line():
    found = outcome(CASES["resized"], "xla")
    ((category, text, filename),) = found[1]
    assert category is UserWarning
    assert "was resized since it had shape [2]" in text
    assert filename == __file__


def test_views_of_a_resized_output_keep_what_they_look_at():
    def run(device):
        out = torch.arange(9.0).to(device)
        view, alias = out[3:6], out.detach()
        torch.mul(table(device)[0], 10, out=out)
        view.add_(1)
        return out, view, alias

    assert outcome(run, "cpu") == outcome(run, "xla")


def test_an_output_on_the_host_is_refused():
    with pytest.raises(RuntimeError, match=r"not an XLA tensor: torch\.FloatTensor"):
        torch.add(table("xla"), 1, out=torch.empty(0))


def test_the_refused_dtype_is_named_as_pytorch_names_it():
    text = mutation.MSG_OUT_DTYPE.format(result="Float", out="Long")
    with pytest.raises(RuntimeError, match=text):
        torch.add(table("xla"), 1, out=empty("xla", 2, 3, dtype=torch.int64))


def test_out_in_a_loop_compiles_once(compile_count):
    buffer = torch.zeros(2, 3, device="xla")
    x = table("xla")
    counts = []
    for step in range(4):
        torch.mul(x, 2.5 + step, out=buffer)
        torch.add(buffer, x, out=x)
        x.sum().item()
        counts.append(compile_count())
    assert counts[1:] == counts[1:2] * 3


NOT_IN_PLACE = {
    "cat": lambda x, at: torch.cat([x[:0].clone(), x], out=x),
    "gather": lambda x, at: torch.gather(x, 0, at, out=x),
    "index_select": lambda x, at: torch.index_select(x, 0, at, out=x),
    "cross": lambda x, at: torch.linalg.cross(x, torch.ones_like(x), out=x),
}


@pytest.mark.parametrize("name", NOT_IN_PLACE)
def test_operators_that_do_not_write_to_what_they_read(name):
    results = [
        outcome(
            lambda d: NOT_IN_PLACE[name](
                torch.tensor([1.0, 2.0, 3.0], device=d), torch.tensor([2, 1, 0], device=d)
            ),
            device,
        )
        for device in ("cpu", "xla")
    ]
    assert results[0] == results[1]
    assert results[0][0] is RuntimeError


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("shape", [(3,), (0,), (4,), (3, 1), (2, 3)])
def test_normal_draws_in_the_shape_of_out(shape):
    """With a tensor as mean it adds the mean afterwards: places of other sizes are filled, refused or resized."""

    def drawn(device):
        out = torch.zeros(shape, device=device)
        try:
            torch.normal(torch.full((3,), 100.0, device=device), 1.0, out=out)
        except RuntimeError:
            return RuntimeError
        return out.shape, bool((out > 90).all()), len(set(out.flatten().tolist())) > 1

    assert drawn("xla") == drawn("cpu")


GROWING = {
    "the end of a storage": lambda x: (x, x.flatten()[4:]),
    "a storage with views": lambda x: (x.view(6), x),
    "a transpose": lambda x: (x, x.t()[1:]),
    "a part in the middle": lambda x: (x, x.flatten()[1:3]),
    "an empty part": lambda x: (x, x.flatten()[:0]),
}


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("part", GROWING)
def test_what_shares_memory_with_an_output_that_grows(part):
    found = []
    for device in ("cpu", "xla"):
        whole, out = GROWING[part](table(device))
        torch.mul(torch.arange(8.0).to(device) + 1, 3, out=out)
        found.append((whole.tolist(), out.tolist()))
    assert found[0] == found[1]
