"""Threads on one device: each keeps its own step, and values pass between them exactly."""

from __future__ import annotations

import concurrent.futures
import copy
import gc
import queue
import random
import sys
import threading

import pytest
import torch
from torch import nn

import torch_xla
from torch_xla.core import xla_model as xm
from torch_xla.experimental.scan import scan
from xla_core.execution import index_checks, runtime
from xla_core.recording import step_turns, xla_tensor

THREADS = 4
STEPS = 8

knows_callers = pytest.mark.skipif(
    torch.__version__.startswith("2.11."),
    reason="torch 2.11 does not tell which thread called backward(): docs/versions.md",
)


@pytest.fixture(autouse=True)
def frequent_switches():
    """Threads take turns every few operators rather than every few steps."""
    former = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(former)


def in_threads(*work):
    """The results of functions that run in threads of their own; raises what one of them raises."""
    with concurrent.futures.ThreadPoolExecutor(len(work)) as pool:
        together = threading.Barrier(len(work))

        def run(one):
            together.wait()
            return one()

        futures = [pool.submit(run, one) for one in work]
        return [future.result(timeout=120) for future in futures]


def in_thread(function):
    """What ``function`` returns in a thread that has ended."""
    return in_threads(function)[0]


def train(width, device, steps=STEPS):
    """The losses of a model whose program is like no other width's, and its weights."""
    generator = torch.Generator().manual_seed(width)
    model = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=generator)
    model = model.to(device)
    batches = [torch.randn(16, 4, generator=generator).to(device) for _ in range(steps)]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(batch).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        if device == "xla":
            torch_xla.sync()
    return torch.stack(losses).cpu(), [p.detach().cpu() for p in model.parameters()]


def assert_close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


# -- each thread's step is its own ----------------------------------------------------------------


@knows_callers
def test_threads_compile_what_they_compile_one_after_the_other(compile_count):
    train(10, "xla")
    before = compile_count()
    for width in range(11, 11 + THREADS):
        train(width, "xla")
    alone = compile_count() - before
    found = in_threads(
        *[lambda width=width: train(width, "xla") for width in range(21, 21 + THREADS)]
    )
    assert alone >= THREADS
    assert compile_count() - before - alone == alone
    for width, result in enumerate(found, 21):
        assert_close(result, train(width, "cpu"))


@knows_callers
def test_threads_that_do_the_same_share_one_program(compile_count):
    in_threads(lambda: train(31, "xla"))
    before = compile_count()
    expected = train(31, "cpu")
    for result in in_threads(*[lambda: train(31, "xla")] * THREADS):
        assert_close(result, expected)
    assert compile_count() == before


def test_one_model_that_threads_serve_is_one_program(compile_count):
    """Its weights, and a view of one of them, are inputs of all their steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6)).requires_grad_(False)
    scale = torch.rand(3, 6)
    batches = torch.randn(THREADS, STEPS, 5, 6)

    def answer(model, scale, batch):
        hidden = model(batch) * scale
        return (model(hidden) + scale).sum(1)  # the weights and the view once more

    served, row = copy.deepcopy(model).to("xla"), scale.to("xla")[1]

    def serve(number):
        found = []
        for batch in batches[number]:
            found.append(answer(served, row, batch.to("xla")).cpu())
        return found

    in_thread(lambda: serve(0))
    before = compile_count()
    found = in_threads(*[lambda number=number: serve(number) for number in range(THREADS)])
    assert compile_count() == before
    for number, answers in enumerate(found):
        assert_close(answers, [answer(model, scale[1], batch) for batch in batches[number]])


def test_training_beside_evaluation_of_another_model(compile_count):
    torch.manual_seed(0)
    model, data = nn.Linear(4, 3).requires_grad_(False), torch.randn(10, 4)
    on_device, batch = copy.deepcopy(model).to("xla"), data.to("xla")

    def evaluate():
        return [on_device(batch).logsumexp(1).mean().item() for _ in range(3 * STEPS)]

    in_thread(evaluate)
    in_thread(lambda: train(41, "xla"))
    before = compile_count()
    (losses, weights), values = in_threads(lambda: train(41, "xla"), evaluate)
    assert compile_count() == before
    assert_close((losses, weights), train(41, "cpu"))
    assert values == pytest.approx([model(data).logsumexp(1).mean().item()] * (3 * STEPS), rel=1e-5)


def test_sync_cuts_no_other_threads_step():
    x = torch.arange(4.0, device="xla")
    torch_xla.sync()
    half = x * 2
    depth = x._s.trace.cur.depth

    def other():
        y = torch.ones(3, device="xla") + 1
        torch_xla.sync()
        assert y._s.buffer is not None
        xm.mark_step()
        return y.tolist()

    assert in_thread(other) == [2, 2, 2]
    with x._s.trace.lock:
        assert x._s.trace.cur.depth == depth
    assert half._s.buffer is None
    assert xm_pending(half)
    whole = half + 1
    torch_xla.sync()
    assert whole._s.buffer is not None
    assert whole.tolist() == [1, 3, 5, 7]


def xm_pending(tensor):
    return torch_xla._XLAC._check_tensor_need_materialization([tensor]) == [True]


def test_a_compiled_region_is_its_threads_own():
    entered, synced = threading.Event(), threading.Event()

    @torch_xla.compile(full_graph=True)
    def region(x):
        y = x * 3
        entered.set()
        assert synced.wait(60)
        return y + 1

    def other():
        assert entered.wait(60)
        try:
            x = torch.ones(2, device="xla") + 1
            torch_xla.sync()
            return x.tolist()  # which nothing in the region may
        finally:
            synced.set()

    first, second = in_threads(lambda: region(torch.ones(2, device="xla")).tolist(), other)
    assert (first, second) == ([4, 4], [2, 2])
    assert runtime.trace_of(None).region is None


def test_step_closures_run_at_the_end_of_their_threads_step():
    ran = []
    x = torch.ones(2, device="xla") * 5
    xm.add_step_closure(lambda t: ran.append(t.tolist()), (x,))
    in_thread(torch_xla.sync)
    assert not ran
    assert xm_pending(x)
    torch_xla.sync()
    assert ran == [[5, 5]]


def test_step_closures_of_a_thread_that_has_ended_run_with_the_next_step():
    ran = []

    def work():
        xm.add_step_closure(ran.append, (torch.ones(2, device="xla") * 6,))

    in_thread(work)
    assert not ran
    torch_xla.sync()
    assert ran[0].tolist() == [6, 6]


# -- backward -------------------------------------------------------------------------------------


@knows_callers
def test_backward_belongs_to_the_step_of_its_caller():
    recorded = {}

    def hook(number):
        def look(gradient):
            trace = gradient._s.trace
            with trace.lock:
                recorded.setdefault(number, []).append(trace.turns.active.owner)
            return gradient

        return look

    def work(number):
        w = torch.full((8,), float(number), device="xla", requires_grad=True)
        for _ in range(STEPS):
            y = w
            for _ in range(10):
                y = y * 1.0625
                y.register_hook(hook(number))
            w.grad = None
            y.sum().backward()
            with w._s.trace.lock:
                own = w._s.trace.turns.active.owner
            torch_xla.sync()
        return own, w.grad.tolist()

    found = in_threads(*[lambda number=number: work(number) for number in range(THREADS)])
    for number, (own, gradient) in enumerate(found):
        assert set(recorded[number]) == {own}
        assert gradient == pytest.approx([1.0625**10] * 8)
    assert len({id(own) for own, _ in found}) == THREADS


def test_backward_of_a_graph_that_another_thread_recorded():
    w = torch.ones(3, device="xla", requires_grad=True)
    loss = (w * torch.arange(3.0, device="xla")).sum()
    in_thread(loss.backward)
    assert w.grad.tolist() == [0, 1, 2]


@knows_callers
@pytest.mark.parametrize("nested", [False, True])
def test_backward_of_one_thread_while_another_records_the_body_of_a_loop(nested):
    ready, inside, done = threading.Event(), threading.Event(), threading.Event()
    shared = torch.randn(3).to("xla") * 2  # pending when the body captures it

    def body(carry, x):
        carry = carry * x.tanh() + shared
        inside.set()
        assert done.wait(20)  # the other thread's backward pass runs meanwhile
        if nested:
            carry, _ = scan(lambda c, y: (c + y.sin(), c), carry, torch.stack([x, x]))
        return carry, carry * 2

    def loops():
        ready.wait(30)
        x = torch.randn(4, 3).to("xla").requires_grad_()
        start = torch.zeros(3).to("xla")
        final, ys = scan(body, start, x)
        (final.sum() + ys.sum()).backward()
        return x.grad.cpu(), x.detach().cpu()

    def backwards():
        # nothing but autograd's own thread gets in while a body is recorded
        leaves = [torch.linspace(-1, 1, 5).to("xla").requires_grad_() for _ in range(3)]
        losses = [((w * (i + 1)).exp() * w).sum() for i, w in enumerate(leaves)]
        one = torch.ones(()).to("xla")
        ready.set()
        inside.wait(30)
        for loss in losses:
            loss.backward(one)
        done.set()
        return [(w.grad.cpu(), shared.cpu()) for w in leaves]

    (grad, x), found = in_threads(loops, backwards)
    for i, (got, value) in enumerate(found):
        w = torch.linspace(-1, 1, 5).requires_grad_()
        ((w * (i + 1)).exp() * w).sum().backward()
        torch.testing.assert_close(got, w.grad)
        torch.testing.assert_close(value, shared.cpu())
    x.requires_grad_()
    carry, total = torch.zeros(3), 0
    for row in x:
        carry = carry * row.tanh() + shared.cpu()
        if nested:
            carry = carry + 2 * row.sin()
        total = total + carry.sum() * 2
    (carry.sum() + total).backward()
    torch.testing.assert_close(grad, x.grad)


def test_gradients_of_threads_add_up():
    w = torch.ones(3, device="xla", requires_grad=True)
    lock = threading.Lock()

    def work(number):
        for _ in range(STEPS):
            loss = (w * number).sum()
            with lock:
                loss.backward()
            torch_xla.sync()

    in_threads(*[lambda number=number: work(number) for number in range(THREADS)])
    assert w.grad.tolist() == [STEPS * sum(range(THREADS))] * 3


# -- values pass between threads ------------------------------------------------------------------


def test_pending_tensors_pass_through_a_queue():
    passed = queue.Queue(maxsize=2)

    def produce():
        for n in range(5 * STEPS):
            x = torch.full((4,), float(n), device="xla")
            passed.put((x * 2, x.view(2, 2)[1] + 1))
        passed.put(None)

    def consume():
        found = []
        while (item := passed.get()) is not None:
            doubled, rest = item
            found.append((doubled + 1).sum() + rest.sum())
            if len(found) % 3 == 0:
                torch_xla.sync()
        return torch.stack(found).tolist()

    _, found = in_threads(produce, consume)
    assert found == [4 * (2 * n + 1) + 2 * (n + 1) for n in range(5 * STEPS)]


def test_a_step_that_another_thread_needs_is_run_and_goes_on():
    x = torch.arange(3.0, device="xla")
    y = x + 1

    def other():
        return (y * 2).tolist()

    assert in_thread(other) == [2, 4, 6]
    assert (y + x).tolist() == [1, 3, 5]


def test_writes_in_place_are_seen_by_other_threads():
    total = torch.zeros(4, device="xla")
    lock = threading.Lock()
    seen = []

    def work(number):
        for n in range(2 * STEPS):
            with lock:
                total.add_(number)
                total[n % 4] += 1
                seen.append((total + 0, number, n))
            if n % 3 == number % 3:
                torch_xla.sync()

    in_threads(*[lambda number=number: work(number) for number in range(THREADS)])
    expected = torch.zeros(4)
    for value, number, n in seen:
        expected.add_(number)
        expected[n % 4] += 1
        assert torch.equal(value.cpu(), expected)
    assert torch.equal(total.cpu(), expected)


def test_a_value_that_was_read_stays_what_it_was():
    """One thread overwrites what another has read but not run; the memory is not given away."""
    x = torch.ones(1000, device="xla")
    torch_xla.sync()
    before = x * 3

    def other():
        x.mul_(5)
        torch_xla.sync()
        x.copy_(torch.full((1000,), 7.0))  # from the host: the storage just gets it

    in_thread(other)
    after = x * 3
    assert before.eq(3).all().item()
    assert after.eq(21).all().item()


def test_views_across_threads():
    base = torch.arange(12.0, device="xla")
    rows = base.view(3, 4)
    column = rows[:, 1]
    expected = torch.arange(12.0)

    def other():
        column.mul_(10)
        rows[0].add_(1)
        base[11] = -1
        return column.tolist()

    expected.view(3, 4)[:, 1].mul_(10)
    expected.view(3, 4)[0].add_(1)
    expected[11] = -1
    column + 1  # read, and in this thread's step
    assert in_thread(other) == expected.view(3, 4)[:, 1].tolist()
    assert torch.equal(column.cpu(), expected.view(3, 4)[:, 1])
    assert torch.equal((rows + 0).cpu(), expected.view(3, 4))
    rows.zero_()
    assert in_thread(lambda: base.sum().item()) == 0


def test_a_tensor_that_nobody_wrote_to_is_written_by_two_threads():
    x = torch.empty(4, device="xla")
    x[:2] = 1

    def other():
        x[2:] = 2

    in_thread(other)
    assert x.tolist() == [1, 1, 2, 2]


# -- threads that end -----------------------------------------------------------------------------


def test_a_thread_that_ended_leaves_tensors_that_read_right():
    def work():
        x = torch.arange(4.0, device="xla")
        return x * 2, x.view(2, 2)[1], x

    doubled, row, x = in_thread(work)
    assert xm_pending(doubled)
    assert (doubled + 1).tolist() == [1, 3, 5, 7]
    assert row.tolist() == [2, 3]
    x.add_(1)
    assert row.tolist() == [3, 4]


def test_sync_runs_what_threads_recorded_that_have_ended():
    x = in_thread(lambda: torch.ones(3, device="xla") * 4)
    assert xm_pending(x)
    torch_xla.sync()
    assert not xm_pending(x)
    assert x.tolist() == [4, 4, 4]


def test_a_thread_with_the_number_of_one_that_ended_has_a_step_of_its_own(compile_count):
    def work():
        ((torch.ones(5, device="xla") * 3).sqrt() - 1).sum()  # wanted by nobody
        return (torch.ones(6, device="xla") * 7).tanh().sum()

    kept = [in_thread(work)]
    torch_xla.sync()
    before = compile_count()
    for _ in range(2 * STEPS):
        kept.append(in_thread(work))  # most systems give all of them the same number
    assert len({value.item() for value in kept}) == 1
    assert compile_count() == before


def test_threads_that_end_leave_no_steps_behind():
    trace = runtime.trace_of(None)
    gone = [in_thread(lambda: torch.ones(2, device="xla") + 1) for _ in range(40)]
    assert len(trace.parked) <= step_turns.MOST_ENDED + 2
    assert len(trace.turns.owners) <= 2
    assert torch.stack(gone).sum().item() == 160
    torch_xla.sync()
    assert not trace.parked


def test_a_step_that_fails_is_told_where_its_values_are_read(monkeypatch):
    def work():
        x = torch.ones(2, device="xla")
        torch_xla.sync()
        # the step computes the index: one that is there already raises here
        return x, x.gather(0, torch.tensor([4], device="xla") + 1)

    monkeypatch.setenv("XLA_CHECK_INDICES", "1")
    # the switch is read when a handler is made, at an operator's first use
    monkeypatch.setattr(xla_tensor, "_plain", {})
    xla_tensor.set_handler_wrapper(None)
    x, bad = in_thread(work)
    with pytest.raises(index_checks.IndexOutOfRangeError):
        bad.tolist()
    assert x.tolist() == [1, 1]
    monkeypatch.undo()
    xla_tensor.set_handler_wrapper(None)


# -- all of it ------------------------------------------------------------------------------------


def test_random_seeds_are_one_sequence():
    """Threads draw from the device's one generator: no number comes twice, all are drawn."""

    def draw(count):
        return [torch.rand((), device="xla") for _ in range(count)]

    torch_xla.manual_seed(5)
    expected = sorted(t.item() for t in draw(THREADS * STEPS))
    torch_xla.manual_seed(5)
    found = in_threads(*[lambda: draw(STEPS)] * THREADS)
    assert sorted(t.item() for drawn in found for t in drawn) == expected


class Machine:
    """Random operators on tensors that threads share, each done on the CPU too, under one lock."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.lock = threading.Lock()
        self.pairs = []
        for _ in range(6):
            value = torch.tensor([self.random.uniform(-1, 1) for _ in range(6)]).reshape(2, 3)
            self.pairs.append((value.to("xla"), value))
        self.wrong = []

    def act(self):
        choose = self.random.choice
        kind, place = self.random.randrange(9), self.random.randrange(6)
        (x, host), (y, other) = choose(self.pairs), choose(self.pairs)
        number = self.random.uniform(-1, 1)
        both = self.pairs[place]
        if kind == 0:
            self.pairs[place] = (x * number + y, host * number + other)
        elif kind == 1:
            self.pairs[place] = (
                (x @ y.t()).tanh().sum() + x,
                (host @ other.t()).tanh().sum() + host,
            )
        elif kind == 2:
            self.pairs[place] = (x.t()[1].expand(3, 2).t() + 0, host.t()[1].expand(3, 2).t() + 0)
        elif kind == 3:
            self.pairs[place] = (x.clone().view(3, 2).t()[:, :].t().view(2, 3), host.clone())
        elif kind == 4:
            [t.mul_(number) for t in both]
        elif kind == 5:
            [t[1].add_(number) for t in both]
        elif kind == 6:
            [t[:, 2].copy_(s[:, 0]) for t, s in zip(both, (x, host), strict=True)]
        elif kind == 7:
            w, v = (t.detach().clone().requires_grad_() for t in both)
            (w * x.detach()).tanh().sum().backward()
            (v * host.detach()).tanh().sum().backward()
            self.pairs[place] = (w.grad, v.grad)
        else:
            [t.clamp_(-1, 1) for t in both]
            if not torch.allclose(x.cpu(), host, atol=1e-5):
                self.wrong.append((x.cpu(), host))

    def work(self, number):
        for n in range(60):
            with self.lock:
                self.act()
            scratch = torch.full((2,), float(n), device="xla") + number
            if n % 10 == number:
                torch_xla.sync()
            elif n % 10 == 9:
                assert scratch.tolist() == [n + number] * 2


@pytest.mark.parametrize("seed", range(3))
def test_random_operators_in_threads_compute_what_the_cpu_computes(seed):
    machine = Machine(seed)
    in_threads(*[lambda number=number: machine.work(number) for number in range(THREADS)])
    assert not machine.wrong
    for x, host in machine.pairs:
        torch.testing.assert_close(x.cpu(), host, rtol=1e-4, atol=1e-4)
    gc.collect()
    torch_xla.sync()
    assert not runtime.trace_of(None).parked


def test_a_step_that_ran_is_not_kept_by_having_been_parked():
    """Who counts references would take its values for wanted ones."""
    x = torch.ones(3, device="xla")
    torch_xla.sync()
    y = x + 1
    recorded, looked = threading.Event(), threading.Event()

    def record_and_stay():
        kept = torch.ones(2, device="xla") * 3
        recorded.set()
        looked.wait()
        return kept.tolist()

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        other = pool.submit(record_and_stay)
        recorded.wait()
        z = y * 2
        torch_xla.sync()
        references = sys.getrefcount(y._s)  # an assert would hold one more
        looked.set()
    assert references == 2, "more than the tensor and the argument refer to its storage"
    assert z.tolist() == [4.0] * 3 and other.result() == [3.0, 3.0]
