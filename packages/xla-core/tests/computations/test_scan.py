"""``scan``: a loop of the program instead of a loop of Python, forward and backward."""

from __future__ import annotations

import threading

import pytest
import torch
from functorch.compile import default_partition, min_cut_rematerialization_partition
from torch import nn
from torch.utils import _pytree as pytree

import torch_xla
from torch_xla.experimental import eager_mode_context
from torch_xla.experimental.scan import scan
from xla_core.compilation import program_table
from xla_core.jax_bridge import jax_private
from xla_core.support import counters
from xla_core.testing.against_cpu import assert_same, copy_to


def unrolled(fn, init, xs, **_options):
    """What ``scan`` stands for, as a loop of Python."""
    carry, ys = init, []
    for i in range(len(pytree.tree_leaves(xs)[0])):
        carry, y = fn(carry, pytree.tree_map(lambda x, i=i: x[i], xs))
        ys.append(pytree.tree_flatten(y))
    columns = zip(*(leaves for leaves, _ in ys), strict=True)
    stacked = [None if c[0] is None else torch.stack(c) for c in columns]
    return carry, pytree.tree_unflatten(stacked, ys[0][1])


def both(case, tensors, **options):
    """``case(run, *tensors)`` with the loop on the CPU and the scan on ``xla``, and all gradients."""
    found = []
    for device, run in (("cpu", unrolled), ("xla", scan)):
        given = copy_to(tensors, device)

        def with_options(*args, run=run):
            return run(*args, **options)

        results = [t for t in pytree.tree_leaves(case(with_options, *given)) if t is not None]
        sum((t.float() * t.shape.numel()).sum() for t in results if t.requires_grad).backward()
        found.append([*(t.detach() for t in results), *(t.grad for t in given)])
    assert [t is None for t in found[0]] == [t is None for t in found[1]]
    assert_same(found[1], found[0], (1e-4, 1e-4))  # sums over all iterations


def tensors(*shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator, requires_grad=True) for s in shapes]


def cell(run, h, xs, w):
    def fn(carry, x):
        carry = torch.tanh(carry @ w + x)
        return carry, carry * x.sum()

    return run(fn, h, xs)


def captures_views_with_a_history(run, h, xs, w):
    alpha = nn.functional.softplus(w).chunk(2)[1]

    def fn(carry, x):
        return torch.sigmoid(carry @ w) * alpha.sum(0) + x, alpha[0] * 2.5

    return run(fn, h, xs)


def nested_structures(run, h, xs, w):
    def fn(carry, item):
        x, extra = item["x"], item["extra"]
        state = torch.relu(carry["state"] @ w + x) * extra
        count = carry["count"] + 1
        return {"state": state, "count": count, "none": None}, (state.sum(0), None, [x, count])

    start = {"state": h, "count": torch.zeros((), dtype=torch.int64, device=h.device), "none": None}
    return run(fn, start, {"x": xs, "extra": torch.arange(len(xs), device=h.device)})


def passes_through(run, h, xs, w):
    return run(lambda carry, x: (carry, (x, carry, w)), h, xs)


def carry_without_gradient(run, h, xs, w):
    return run(lambda carry, x: (torch.ones_like(carry), carry * x + w.sum()), h, xs)


def writes_to_its_own(run, h, xs, w):
    def fn(carry, x):
        made = torch.zeros_like(carry)
        made[:, 1:] = carry[:, :-1]
        made += torch.tensor(0.5, device=w.device).mul_(3)
        made.exp_()
        return made * w[0], made

    return run(fn, h, xs)


def loops_inside(run, h, xs, w):
    def fn(carry, x):
        inner, ys = run(lambda c, row: ((c * w[0]).sin() + row, c), carry, x)
        return inner, ys.sum(0)

    return run(fn, h[0], xs)


def mixed_precision(run, h, xs, w):
    def fn(carry, x):
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            product = carry @ w
        return product.float().tanh(), x * product.dtype.itemsize

    return run(fn, h, xs)


BODIES = [
    cell,
    captures_views_with_a_history,
    nested_structures,
    passes_through,
    carry_without_gradient,
    writes_to_its_own,
    loops_inside,
]


@pytest.mark.parametrize("body", BODIES)
def test_values_and_gradients_are_those_of_the_loop(body):
    both(body, tensors((3, 4), (5, 3, 4), (4, 4)))


def test_mixed_precision_inside():
    h, xs, w = tensors((3, 4), (5, 3, 4), (4, 4))
    # the CPU and XLA round sums in bfloat16 differently: few steps, small numbers
    with torch.no_grad():
        xs, w = (xs[:2] * 0.1).requires_grad_(), (w * 0.1).requires_grad_()
    results = []
    for device, run in (("cpu", unrolled), ("xla", scan)):
        given = copy_to((h, xs, w), device)
        carry, ys = mixed_precision(run, *given)
        (carry.sum() + ys.sum()).backward()
        results.append([carry, ys, *(t.grad for t in given)])
    assert_same(results[1], results[0], (2e-2, 1e-3))


def test_eager_mode_runs_a_scan_as_one_operator():
    with eager_mode_context(True):
        both(cell, tensors((3, 4), (5, 3, 4), (4, 4)))


def last_program():
    return jax_private.module_text(program_table.all_programs()[-1].program.stablehlo)


def trained(length, step=scan):
    h, xs, w = copy_to(tensors((3, 4), (length, 3, 4), (4, 4)), "xla")
    torch_xla.sync()
    carry, ys = cell(step, h, xs, w)
    (carry.sum() + ys.sum()).backward()
    torch_xla.sync()
    return w.grad


def test_the_program_has_one_loop_per_pass_whatever_the_length():
    sizes = []
    for length in (4, 40):
        trained(length)
        text = last_program()
        assert text.count("stablehlo.while") == 2
        sizes.append(text.count("\n"))
    assert sizes[0] == sizes[1]


def test_repeating_a_scan_compiles_nothing_new(compile_count):
    trained(4)
    before = compile_count()
    grads = [trained(4) for _ in range(3)]
    assert compile_count() == before
    torch.testing.assert_close(grads[0].cpu(), grads[2].cpu())


def test_numbers_in_the_body_are_arguments_of_the_program(compile_count):
    xs = torch.arange(4.0, device="xla")
    torch_xla.sync()
    before = None
    for scale in (2.5, 3.5, 4.5):
        _, ys = scan(lambda c, x, scale=scale: (c, x * scale), xs[0], xs)
        assert ys.tolist() == [scale * i for i in range(4)]
        before = before or compile_count()
    assert compile_count() == before


def test_every_iteration_draws_its_own_numbers_and_the_gradient_uses_the_same():
    xs = torch.ones(6, 50, device="xla", requires_grad=True)
    carry, ys = scan(
        lambda c, x: (c + nn.functional.dropout(x, 0.5), nn.functional.dropout(x, 0.5)),
        torch.zeros(50, device="xla"),
        xs,
    )
    ys.sum().backward(retain_graph=True)
    torch.testing.assert_close(xs.grad.cpu(), ys.detach().cpu())
    assert len({tuple(row) for row in ys.tolist()}) == 6
    again = scan(lambda c, x: (c, nn.functional.dropout(x, 0.5)), xs[0], xs)[1]
    assert again.tolist() != ys.tolist()
    assert 0.3 < (ys == 0).float().mean().item() < 0.7
    carry.sum().backward()


@pytest.mark.parametrize("partition", [default_partition, min_cut_rematerialization_partition])
def test_partition_functions_of_functorch(partition):
    both(captures_views_with_a_history, tensors((3, 4), (5, 3, 4), (4, 4)), partition_fn=partition)


def stacks(partition):
    """How many values the forward loop carries and stacks, for a chain of cheap operators."""
    xs = torch.rand(8, 16, device="xla", requires_grad=True)
    torch_xla.sync()

    def fn(carry, x):
        return carry, ((x.sin().cos() * 2 + 1).exp() * x).tanh()

    _, ys = scan(fn, xs[0].detach(), xs, partition_fn=partition)
    ys.sum().backward()
    torch_xla.sync()
    forward = last_program().partition("stablehlo.while")[2].partition("cond")[0]
    return forward.count("%iterArg")


def test_min_cut_keeps_less_than_the_default():
    assert stacks(min_cut_rematerialization_partition) < stacks(default_partition)


def test_a_pure_function_is_called_once_per_shapes():
    calls = []
    w = torch.ones(4, device="xla", requires_grad=True)

    def fn(carry, x):
        calls.append(1)
        return carry * w, x + carry

    def run(length):
        init, xs = torch.ones(4, device="xla"), torch.ones(length, 4, device="xla")
        carry, ys = scan(fn, init, xs, is_fn_pure=True)
        w.grad = None
        (carry.sum() + ys.sum()).backward()
        return carry.tolist(), w.grad.tolist()

    assert run(3) == ([1.0] * 4, [6.0] * 4)
    with torch.no_grad():
        w.mul_(2)
    assert run(3) == ([8.0] * 4, [17.0] * 4)  # w**3 + w**2 + w + 1 + 3, and what follows from it
    assert len(calls) == 1
    run(5)
    assert len(calls) == 1  # one iteration looks the same
    scan(fn, torch.ones(2, 4, device="xla"), torch.ones(3, 2, 4, device="xla"), is_fn_pure=True)
    assert len(calls) == 2


def test_the_gradient_is_of_the_values_that_the_forward_pass_had():
    w = torch.full((2,), 3.0, device="xla", requires_grad=True)
    xs = torch.ones(2, 2, device="xla", requires_grad=True)
    _, ys = scan(lambda c, x: (c, x * w), torch.zeros(1, device="xla"), xs)
    with torch.no_grad():
        w.fill_(7.0)
    ys.sum().backward()
    assert xs.grad.tolist() == [[3.0, 3.0], [3.0, 3.0]]


def test_no_iteration_at_all():
    carry, ys = scan(
        lambda c, x: (c * 2, x[:1]), torch.ones(2, device="xla"), torch.ones(0, 3, device="xla")
    )
    assert carry.tolist() == [1.0, 1.0]
    assert ys.shape == (0, 1)


def test_a_pending_value_is_captured_within_the_step(compile_count):
    base = torch.arange(3.0, device="xla")
    torch_xla.sync()
    before = compile_count()
    pending = base * 2
    carry, _ = scan(lambda c, x: (c + pending, None), torch.zeros(3, device="xla"), base)
    torch_xla.sync()
    assert compile_count() == before + 1
    assert (carry.tolist(), pending.tolist()) == ([0.0, 6.0, 12.0], [0.0, 2.0, 4.0])


W = torch.ones(1)


@pytest.mark.parametrize(
    ("fn", "error", "text"),
    [
        (lambda c, x: (c.add_(x), x), RuntimeError, "writes in place to its argument number 0"),
        (lambda c, x: (c, x.mul_(2)), RuntimeError, "writes in place to its argument number 1"),
        (lambda c, x: (c * x.sum().item(), x), RuntimeError, "nothing in it may read a value"),
        (
            lambda c, x: (c.sum(), x),
            ValueError,
            r"Got \[float32\[\]\] but expected \[float32\[1\]\]",
        ),
        (lambda c, x: (c.double(), x), ValueError, "keep the `carry` unchanged"),
        (lambda c, x: ((c, c), x), ValueError, "keep the `carry` unchanged"),
        (lambda c, x: c, ValueError, "must return a pair"),
        (lambda c, x: (c, 1.5), TypeError, "the output that `fn` returned contains 1.5"),
        (lambda c, x: (c, W), TypeError, "a tensor on cpu"),
    ],
)
def test_what_a_body_cannot_do_is_said(fn, error, text):
    with torch.no_grad(), pytest.raises(error, match=text):
        scan(fn, torch.zeros(1, device="xla"), torch.ones(4, 1, device="xla"))


def test_other_threads_wait_while_a_body_is_recorded():
    results, inside, done = [], threading.Event(), threading.Event()

    def work():
        inside.wait()
        for n in range(20):
            results.append((torch.full((2,), float(n), device="xla") * 2).tolist())
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    w = torch.ones(2, device="xla", requires_grad=True)

    def fn(carry, x):
        inside.set()
        assert not done.wait(0.2)  # it has begun, and may not record into this body
        return carry * w, x + w

    carry, ys = scan(fn, torch.ones(2, device="xla"), torch.ones(3, 2, device="xla"))
    thread.join()
    (carry.sum() + ys.sum()).backward()
    assert results == [[2.0 * n, 2.0 * n] for n in range(20)]
    assert w.grad.tolist() == [6.0, 6.0]


def test_writing_to_what_is_captured_is_refused_and_undone():
    total, module = torch.zeros(2, device="xla"), nn.BatchNorm1d(2).to("xla")
    xs = torch.randn(3, 4, 2, device="xla")
    with pytest.raises(RuntimeError, match=r"writes in place to a tensor of \(2,\)"):
        scan(lambda c, x: (c, total.add_(x.sum(0))), torch.zeros(1, device="xla"), xs)
    with pytest.raises(RuntimeError, match="writes in place"):
        scan(lambda c, x: (c, module(x)), torch.zeros(1, device="xla"), xs)
    assert total.tolist() == [0.0, 0.0]
    assert module.running_mean.tolist() == [0.0, 0.0]


def test_a_carry_that_requires_a_gradient_is_not_written_to_either():
    init = torch.zeros(1, device="xla", requires_grad=True)
    with pytest.raises(RuntimeError, match="writes in place to an argument"):
        scan(lambda c, x: (c.add_(x), x), init, torch.ones(4, 1, device="xla"))


def test_what_escapes_a_body_has_no_value():
    kept = []

    def fn(carry, x):
        kept.append(carry + 1)
        return carry, x

    scan(fn, torch.zeros(1, device="xla"), torch.ones(4, 1, device="xla"))
    with pytest.raises(RuntimeError, match="computed inside the function of scan"):
        kept[0].tolist()


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((3, W, W), ValueError, "`fn` 3 must be callable"),
        ((cell, W.to("xla"), []), ValueError, "is an empty PyTree"),
        ((cell, W.to("xla"), W), TypeError, "`xs` contains a tensor on cpu"),
        ((cell, W.to("xla"), torch.tensor(1.0, device="xla")), ValueError, "no dimensions"),
        (
            (cell, None, [torch.ones(2, device="xla"), torch.ones(3, device="xla")]),
            ValueError,
            "same leading dimension size. Got 2 and 3",
        ),
    ],
)
def test_arguments_are_checked(arguments, error, text):
    with pytest.raises(error, match=text):
        scan(*arguments)


def test_counters_are_read_inside_a_body():
    before = counters.all_counters().get("xla::add", 0)
    x = torch.ones(3, device="xla") + 1
    seen = []

    def step(carry, row):
        carry = carry + row
        seen.append(counters.all_counters().get("xla::add", 0))
        return carry, carry

    total, _ = scan(step, torch.zeros(3, device="xla"), x.expand(2, 3))
    assert total.tolist() == [4.0, 4.0, 4.0]
    assert set(seen) <= {before, before + 1}  # the body's own operators belong to one operation
