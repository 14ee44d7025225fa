"""The forms of capture, and what a captured function takes and gives."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torch_xla
from torch_xla.experimental.capture import (
    CaptureError,
    Graph,
    capture,
    graph,
    make_graphed_callables,
)
from xla_core.support import counters


def ones(*shape):
    return torch.ones(*shape, device="xla")


def values(tree):
    return torch.utils._pytree.tree_map(
        lambda t: t.tolist() if isinstance(t, torch.Tensor) else t, tree
    )


def replays():
    return counters.all_counters().get("CapturedStepReplayed", 0)


def check(function, make_calls, count=6):
    """A captured function returns what it returns by itself, and leaves its arguments as it does."""
    expected = []
    for args in make_calls():
        expected.append((values(function(*args)), values(args)))
    step, before = capture(function), replays()
    found = []
    for args in make_calls():
        found.append((values(step(*args)), values(args)))
    assert found == expected
    assert replays() > before
    return step


def ramp(count=6, shape=(2, 3)):
    return lambda: [(torch.full(shape, float(i), device="xla"),) for i in range(count)]


FUNCTIONS = {
    "one result": lambda x: x + 1,
    "nested results": lambda x: {"a": (x + 1, [x * 2]), "b": None, "c": "text", "d": 3},
    "the argument and more": lambda x: (x, x + 1, x),
    "a view of the argument": lambda x: (x[0], x + 1),
    "a view of a result": lambda x: (x * 2)[:, 1:].t(),
    "two views of a result": lambda x: (lambda y: (y[0], y[1:], y))(x * 2),
    "an argument that is written": lambda x: (x.mul_(2), x.sum())[1],
    "a view of an argument that is written": lambda x: (x[0].add_(1), x.sum())[1],
    "a clone": lambda x: (x.clone(), x + 1),
    "a copy of the argument": lambda x: (torch.empty_like(x).copy_(x), x + 1),
    "a constant of the host": lambda x: x + torch.tensor([1.0, 2.0, 3.0], device="xla"),
    "a factory": lambda x: x + torch.arange(3, device="xla"),
    "integers and booleans": lambda x: ((x > 2).any(), x.to(torch.int64)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_results(name):
    check(FUNCTIONS[name], ramp())


def test_results_are_tensors_of_their_own():
    step = capture(lambda x: x + 1)
    kept = [step(torch.full((2,), float(i), device="xla")) for i in range(6)]
    assert [t[0].item() for t in kept] == [1, 2, 3, 4, 5, 6]
    kept[4].zero_()
    assert kept[5].tolist() == [6, 6]


def test_views_of_results_share_them():
    step = capture(lambda x: (lambda y: (y, y[0]))(x * 2))
    for _ in range(5):
        whole, part = step(ones(2, 2))
    part.zero_()
    assert whole.tolist() == [[0, 0], [2, 2]]


def test_arguments_on_the_host_in_lists_and_by_name():
    def function(batch, *, scale, names=None):
        return {"y": batch["x"] * scale[0], "names": names}

    step, before = capture(function), replays()
    for i in range(6):
        x = torch.full((2,), float(i))
        found = step({"x": x}, scale=[torch.tensor(3.0, device="xla")], names="a")
        assert found["y"].device.type == "xla"
        assert values(found) == {"y": [3 * i, 3 * i], "names": "a"}
    assert replays() == before + 3


def test_every_shape_dtype_view_and_number_has_a_recording():
    step, before = capture(lambda x, n=1: x * 2 + n), replays()
    kinds = [(ones(2),), (ones(3),), (ones(2).int(),), (ones(2), 5), (ones(4)[1:3],)]
    for _ in range(5):
        for args in kinds:
            assert step(*args).tolist() == (args[0] * 2 + (args[1:] or (1,))[0]).tolist()
    assert step.recordings == 5
    assert replays() == before + 10


class Options(dict):
    """A dict that PyTorch does not flatten."""


class Size(tuple):
    """A tuple that PyTorch does not flatten."""

    __slots__ = ()


@pytest.mark.parametrize("kind", ["dict", "tuple"])
def test_containers_that_pytorch_does_not_flatten_are_told_apart(kind):
    def scaled(x, options):
        return x * (options["by"] if kind == "dict" else options[0])

    step, x = capture(scaled, max_recordings=20), ones(2)
    for by in (1, 1, 1, 1, 2, 3):
        options = Options(by=by) if kind == "dict" else Size((by,))
        assert step(x, options).tolist() == [by, by]
        assert step(x, options=options).tolist() == [by, by]
    options = Options(by=5) if kind == "dict" else Size((5,))
    before = replays()
    for _ in range(5):
        assert step(x, options).tolist() == [5, 5]
    assert replays() > before


def test_what_is_around_a_call_has_recordings_of_its_own():
    weight = ones(3, 3).requires_grad_(True)
    step = capture(lambda x: x @ weight)
    seen = set()
    for _ in range(5):
        with torch.no_grad():
            seen.add(step(ones(2, 3)).dtype)
        with torch.autocast("xla", torch.bfloat16):
            seen.add(step(ones(2, 3)).dtype)
    assert seen == {torch.float32, torch.bfloat16}
    assert step.recordings == 2


def test_a_decorator_for_methods():
    class Counter:
        def __init__(self, start):
            self.total = torch.full((2,), start, device="xla")

        @capture
        def add(self, x):
            self.total.add_(x)
            return self.total * 2

    first, second = Counter(1.0), Counter(5.0)
    for _ in range(5):
        first.add(ones(2))
        second.add(ones(2))
    assert first.add(ones(2)).tolist() == [14, 14]
    assert second.add(ones(2)).tolist() == [22, 22]
    assert Counter.add.__name__ == "add"


def test_a_decorator_with_options():
    @capture(warmup=0)
    def step(x):
        return x + 1

    before = replays()
    for _ in range(3):
        step(ones(2))
    assert replays() == before + 1


def test_a_module_in_evaluation():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten()).to("xla")
    net.eval()
    images = torch.randn(4, 1, 5, 5)
    with torch.no_grad():
        expected = net(images.to("xla")).cpu()
        step = capture(net)
        for _ in range(5):
            found = step(images)
    assert step.recordings == 1
    assert torch.equal(found.cpu(), expected)


def test_an_evaluation_minds_no_gradients():
    net = nn.Linear(3, 2).to("xla")
    step = capture(lambda x: net(x).sum())
    for i in range(8):
        if i == 5:
            net(ones(2, 3)).sum().backward()
        if i == 6:
            net.zero_grad()
        found = step(ones(2, 3))
    assert step.recordings == 1
    assert found.item() == net(ones(2, 3)).sum().item()


def test_generation_with_a_cache_that_is_written_in_place():
    def tokens(captured):
        torch.manual_seed(0)
        embed, head = nn.Embedding(11, 8).to("xla"), nn.Linear(8, 11).to("xla")
        cache = torch.zeros(6, 8, device="xla")
        place = torch.zeros((), dtype=torch.int64, device="xla")

        @torch.no_grad()
        def step(token):
            cache.index_copy_(0, place.reshape(1), embed(token).reshape(1, 8))
            seen = torch.arange(6, device="xla") <= place
            weights = (cache @ embed(token).reshape(8)).masked_fill(~seen, -1e9).softmax(0)
            place.add_(1)
            return head(weights @ cache).argmax()

        called = capture(step) if captured else step
        token = torch.tensor(3, device="xla")
        found = []
        for _ in range(6):
            token = called(token)
            found.append(token)
        return torch.stack(found).tolist()

    assert tokens(True) == tokens(False)


def test_random_numbers_go_on_as_in_ordinary_steps():
    def numbers(captured):
        torch_xla.manual_seed(7)
        step = (
            capture(lambda x: x + torch.rand_like(x))
            if captured
            else lambda x: x + torch.rand_like(x)
        )
        found = []
        for i in range(8):
            found.append(step(ones(3)).tolist())
            if i % 3 == 0:  # somebody else draws, too
                found.append(torch.rand(2, device="xla").tolist())
        return found

    assert numbers(True) == numbers(False)


def test_seeding_outside_is_seen():
    step = capture(lambda x: x + torch.rand_like(x))
    for _ in range(4):
        step(ones(3))
    torch_xla.manual_seed(3)
    first = step(ones(3)).tolist()
    torch_xla.manual_seed(3)
    assert step(ones(3)).tolist() == first
    torch_xla.manual_seed(3)
    assert (ones(3) + torch.rand_like(ones(3))).tolist() == first


def test_what_was_pending_is_run_before():
    x = ones(2)
    step = capture(lambda y: y + x)
    for i in range(6):
        x.add_(1)
        y = ones(2) * 10
        assert step(y).tolist() == [12 + i] * 2


def test_a_donated_buffer_that_somebody_holds_is_copied():
    state = torch.zeros(3, device="xla")
    step = capture(lambda x: state.add_(x))
    for _ in range(4):
        step(ones(3))
    torch_xla.sync()
    buffer = state._s.buffer  # as dlpack or a jax function would
    step(ones(3))
    assert state.tolist() == [5, 5, 5]
    assert not buffer.is_deleted()


@pytest.mark.parametrize("given", ["a state", "an argument"])
def test_a_program_that_was_made_for_a_step_that_writes_takes_nothing_from_one_that_does_not(given):
    """Both compute the same; the program of the first reuses the memory of what it writes."""
    state, x, shape = ones(300, 300), ones(300, 300), (300, 300)

    def write(state, x):
        state.copy_(state + x)

    for _ in range(3):
        write(state, x)
        torch_xla.sync()
    step = capture(lambda x: state + x) if given == "a state" else capture(torch.add)
    arguments = (x,) if given == "a state" else (state, x)
    for _ in range(6):
        assert torch.equal(step(*arguments).cpu(), torch.full(shape, 5.0))
        assert torch.equal(state.cpu(), torch.full(shape, 4.0))
    assert step.recordings == 1


def test_nothing_is_compiled_or_recorded_in_a_replay(compile_count):
    step = capture(lambda x: (x * 3).sum())
    for _ in range(4):
        step(ones(5))
    torch_xla.sync()
    compiled, operators = compile_count(), counters.all_counters().get("aten::mul", 0)
    xs = [torch.full((5,), float(i)) for i in range(4)]
    assert [step(x).item() for x in xs] == [0, 15, 30, 45]
    assert compile_count() == compiled
    assert counters.all_counters().get("aten::mul", 0) == operators


def test_a_captured_function_inside_another_one():
    inner = capture(lambda x: x + 1)
    outer = capture(lambda x: inner(x) * 2)
    for _ in range(5):
        assert outer(ones(2)).tolist() == [4, 4]
    assert outer.recordings == 1
    assert inner.recordings == 0


def test_a_failed_call_leaves_nothing_behind():
    def step(x, y):
        return x @ y

    captured = capture(step)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            captured(ones(2, 3), ones(2, 3))
    for _ in range(4):
        assert captured(ones(2, 3), ones(3, 1)).tolist() == [[3], [3]]


# -- blocks ----------------------------------------------------------------------------------------


def test_a_block_is_replayed_on_its_tensors():
    x = torch.zeros(3, device="xla")
    recorded = Graph()
    with pytest.raises(CaptureError, match="nothing has been recorded"):
        recorded.replay()
    with graph(recorded):
        y = x * 2
        total = y.sum()
    for i in range(4):
        x.copy_(torch.full((3,), float(i)))
        recorded.replay()
        assert (y.tolist(), total.item()) == ([2.0 * i] * 3, 6.0 * i)
    recorded.reset()
    with pytest.raises(CaptureError, match="nothing has been recorded"):
        recorded.replay()


def test_a_training_step_in_a_block():
    def train(captured):
        torch.manual_seed(0)
        torch_xla.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2)).to("xla")
        optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
        x = torch.zeros(3, 4, device="xla")

        def step():
            optimizer.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        losses = []
        recorded = Graph()
        for i in range(8):
            x.copy_(torch.full((3, 4), i / 4))
            optimizer.param_groups[0]["lr"] = 0.1 / (i + 1)
            if not captured or i == 0:
                loss = step()
            elif i == 1:
                with graph(recorded):
                    loss = step()
            else:
                recorded.replay()
            losses.append(loss.item())
        return (
            losses,
            [p.tolist() for p in net.parameters()],
            values(optimizer.state_dict()["state"]),
        )

    assert train(True) == train(False)


def test_an_optimizer_that_makes_its_state_in_a_block_is_refused():
    net = nn.Linear(2, 2).to("xla")
    optimizer = torch.optim.Adam(net.parameters())
    net(ones(1, 2)).sum().backward()
    with pytest.raises(CaptureError, match="Adam creates its state in the step"), graph(Graph()):
        optimizer.step()


def test_reading_in_a_block_is_refused():
    with pytest.raises(CaptureError, match="reads a value"), graph(Graph()):
        (ones(2) + 1).tolist()


# -- graphed callables -------------------------------------------------------------------------------


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x):
        return self.last(torch.tanh(self.norm(self.first(x)))[:, :].relu())


def trained(graphed):
    torch.manual_seed(0)
    net, outer = Small().to("xla"), nn.Linear(3, 1).to("xla")
    twin = {k: v.clone() for k, v in net.state_dict().items()}
    if graphed:
        net = make_graphed_callables(net, (torch.randn(5, 4).to("xla").requires_grad_(),))
        net.load_state_dict(twin)
    optimizer = torch.optim.SGD([*net.parameters(), *outer.parameters()], lr=0.1)
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(5):
        x = torch.randn(5, 4, generator=generator).to("xla").requires_grad_()
        optimizer.zero_grad()
        loss = outer(net(x)).square().mean()
        loss.backward()
        optimizer.step()
        found.append((loss.item(), x.grad.cpu()))
    return found, net


def test_graphed_modules_train_like_others():
    (found, net), (expected, other) = trained(True), trained(False)
    for (loss, grad), (wanted, gradient) in zip(found, expected, strict=True):
        assert loss == pytest.approx(wanted, rel=1e-5)
        torch.testing.assert_close(grad, gradient)
    for name, value in other.state_dict().items():
        torch.testing.assert_close(net.state_dict()[name].cpu(), value.cpu(), check_dtype=False)


def test_graphed_forward_passes_may_overlap():
    double = make_graphed_callables(lambda x: (x * x).sum(0), (ones(3, 2).requires_grad_(),))
    for _ in range(3):  # a gradient that is a view is of another kind than the sample's
        first = torch.full((3, 2), 2.0, device="xla", requires_grad=True)
        second = torch.full((3, 2), 5.0, device="xla", requires_grad=True)
        before = replays()
        a, b = double(first), double(second)
        (a.sum() + (b * b).sum()).backward()
        assert first.grad.tolist() == [[4, 4]] * 3
        assert second.grad.tolist() == [[2 * 75 * 10] * 2] * 3
    assert replays() == before + 4


def test_a_graphed_module_in_the_other_mode_is_not_replayed():
    net = make_graphed_callables(nn.Sequential(nn.Dropout(0.5)).to("xla"), (ones(2, 2),))
    net.eval()
    assert net(ones(2, 2)).tolist() == [[1, 1], [1, 1]]


def test_several_graphed_callables():
    functions = make_graphed_callables(
        (lambda x: x + 1, lambda x: F.relu(x)), ((ones(2),), (ones(2).requires_grad_(),))
    )
    assert [f(ones(2)).tolist() for f in functions] == [[2, 2], [1, 1]]
    gc.collect()
