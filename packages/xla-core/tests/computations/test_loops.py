"""What is built on recorded bodies: layers, recurrent nets, loops, accumulated gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from functorch.compile import min_cut_rematerialization_partition
from torch import nn
from torch._higher_order_ops.while_loop import while_loop as torch_while_loop
from torch.nn import functional as F

import torch_xla
from torch_xla.experimental.fori_loop import fori_loop, while_loop
from torch_xla.experimental.gradient_accumulation import gradient_accumulation
from torch_xla.experimental.gru import GRU
from torch_xla.experimental.scan_layers import scan_layers
from xla_core.compilation import program_table
from xla_core.jax_bridge import jax_private
from xla_core.testing.against_cpu import assert_same


def last_program():
    return jax_private.module_text(program_table.all_programs()[-1].program.stablehlo)


def block():
    layers = [nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 8), nn.BatchNorm1d(8)]
    return nn.Sequential(*layers).eval()


def gradients(module):
    return [p.grad for p in module.parameters()]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"partition_fn": min_cut_rematerialization_partition},
        {"is_layer_pure": True},
    ],
)
def test_scanned_layers_are_the_layers_in_a_row(options, compile_count):
    torch.manual_seed(0)
    cpu = nn.ModuleList(block() for _ in range(4))
    model = copy.deepcopy(cpu).to("xla")
    x = torch.randn(5, 8)
    counts = []
    for _ in range(4):
        model.zero_grad()
        got = scan_layers(model, x.to("xla"), **options)
        got.square().sum().backward()
        torch_xla.sync()
        counts.append(compile_count())
    assert counts[3] == counts[1]
    expected = nn.Sequential(*cpu)(x)
    expected.square().sum().backward()
    assert_same([got, gradients(model)], [expected, gradients(cpu)], (1e-3, 1e-4))


def test_the_program_of_scanned_layers_does_not_grow_with_their_number():
    sizes = []
    for depth in (2, 6):
        model = nn.ModuleList(nn.Linear(4, 4) for _ in range(depth)).to("xla")
        stacked = scan_layers(model, torch.ones(2, 4, device="xla"))
        stacked.sum().backward()
        torch_xla.sync()
        text = last_program()
        assert text.count("stablehlo.while") == 2
        sizes.append(text.count("stablehlo.dot_general"))
    assert sizes[0] == sizes[1]


def test_dropout_in_layers_differs_from_layer_to_layer():
    layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)) for _ in range(2))
    with torch.no_grad():
        for layer in layers:
            layer[0].weight.copy_(torch.eye(4))
            layer[0].bias.zero_()
    layers.to("xla")
    x = torch.ones(64, 4, device="xla")
    # an element survives both layers in a quarter of the cases, not in a half
    assert 0.1 < (scan_layers(layers, x) != 0).float().mean().item() < 0.4


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (nn.Linear(8, 4), "Shape mismatch for 'weight' in layer 1"),
        (nn.Linear(8, 8, bias=False), r"Layer 1 has mismatched keys. Missing keys: {'bias'}."),
        (nn.LayerNorm(8), "'' is a LayerNorm instead of a Linear"),
    ],
)
def test_layers_that_differ_are_refused(other, text):
    layers = [nn.Linear(8, 8).to("xla"), other.to("xla")]
    with pytest.raises(ValueError, match=text):
        scan_layers(layers, torch.ones(2, 8, device="xla"))


def test_pure_layers_follow_their_modes():
    layers = [nn.Sequential(nn.Linear(4, 4), nn.Dropout()).to("xla") for _ in range(3)]
    x = torch.ones(8, 4, device="xla")
    scan_layers(layers, x, is_layer_pure=True)
    for layer in layers:
        layer[1].eval()
    result = scan_layers(layers, x, is_layer_pure=True)
    torch.testing.assert_close(result.cpu(), nn.Sequential(*layers)(x).cpu())


def test_no_layers_and_layers_without_parameters():
    x = torch.ones(2, device="xla")
    assert scan_layers([], x) is x
    assert scan_layers([nn.ReLU(), nn.ReLU()], -x).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("shape", [(6, 3, 4), (6, 4)])
@pytest.mark.parametrize(
    "options", [{}, {"num_layers": 2, "bias": False}, {"num_layers": 2, "batch_first": True}]
)
def test_the_gru_is_torchs(shape, options):
    torch.manual_seed(0)
    cpu, x = nn.GRU(4, 5, **options), torch.randn(shape)
    model = GRU(4, 5, **options)
    model.load_state_dict(cpu.state_dict())
    model.to("xla")
    batch = shape[0 if options.get("batch_first") else 1 : -1] if len(shape) == 3 else ()
    h = torch.randn(options.get("num_layers", 1), *batch[:1], 5)
    results = []
    for net, device in ((cpu, "cpu"), (model, "xla")):
        results.append([net(x.to(device)), net(x.to(device), h.to(device))])
        sum(t.square().sum() for pair in results[-1] for t in pair).backward()
    assert_same([results[1], gradients(model)], [results[0], gradients(cpu)], (1e-3, 1e-4))


def test_a_gru_of_two_directions_is_torchs_however_it_is_asked_for():
    with pytest.warns(UserWarning, match="one direction"):
        model = GRU(4, 5, 1, True, False, 0.0, True)
    assert type(model) is nn.GRU and model.bidirectional


@pytest.mark.parametrize("device", ["cpu", "xla"])
@pytest.mark.parametrize(("features", "shape"), [(4, (2, 2, 5)), (4, (1, 1, 5)), (3, (1, 2, 5))])
def test_states_and_inputs_of_other_sizes_are_refused(device, features, shape):
    model = (nn.GRU if device == "cpu" else GRU)(4, 5).to(device)
    x, h = torch.ones(3, 2, features, device=device), torch.ones(shape, device=device)
    with pytest.raises(RuntimeError, match=r"Expected|input\.size"):
        model(x, h)


def test_what_the_gru_does_not_have():
    with pytest.warns(UserWarning, match="one direction"):
        assert type(GRU(2, 3, bidirectional=True)) is nn.GRU
    packed = nn.utils.rnn.pack_sequence([torch.ones(2, 2)])
    with pytest.raises(TypeError, match="PackedSequence is not supported"):
        GRU(2, 3)(packed)
    with pytest.raises(ValueError, match="got 1D"):
        GRU(2, 3)(torch.ones(2))
    with pytest.raises(RuntimeError, match="unbatched 2-D input, hx should also be 2-D"):
        GRU(2, 3)(torch.ones(4, 2), torch.ones(1, 1, 3))


def test_a_while_loop_runs_until_its_condition_fails_and_compiles_once(compile_count):
    w = torch.full((2,), 1.5, device="xla")
    limit = torch.tensor(20.0, device="xla")
    torch_xla.sync()
    counts = []
    for start in (1.0, 2.0, 50.0, 3.0):
        n, x = while_loop(
            lambda n, x: (x < limit).all(),
            lambda n, x: (n + 1, x * w),
            (torch.zeros((), dtype=torch.int64, device="xla"), torch.full((2,), start).to("xla")),
        )
        expected, times = start, 0
        while expected < 20:
            expected, times = expected * 1.5, times + 1
        assert (n.item(), x.tolist()) == (times, [expected] * 2)
        counts.append(compile_count())
    assert counts[3] == counts[1]


def test_additional_inputs_are_given_and_stay():
    x, by = torch.ones(3, device="xla"), torch.full((3,), 2.0, device="xla")
    n, x = while_loop(lambda n, x, by: n < 3, lambda n, x, by: (n + 1, x * by), (0, x), (by,))
    assert (n.item(), x.tolist()) == (3, [8.0] * 3)


def test_a_loop_draws_new_numbers_in_every_iteration():
    kept = torch.ones(4096, device="xla")
    _, kept = while_loop(
        lambda n, x: n < 3, lambda n, x: (n + 1, x * (torch.rand_like(x) < 0.5)), (0, kept)
    )
    assert 0.08 < kept.mean().item() < 0.17  # an eighth


def test_torchs_own_while_loop_takes_xla_tensors():
    x = torch.ones(2, device="xla")
    n, x = torch_while_loop(
        lambda n, x: n < 4, lambda n, x: (n + 1, x * 2), (torch.zeros((), device="xla"), x)
    )
    assert (n.item(), x.tolist()) == (4.0, [16.0, 16.0])


@pytest.mark.parametrize("limit", [0, 1, 4])
def test_torchs_own_while_loop_has_gradients(limit):
    """Modules in its body have parameters, which ask for them: that raised."""
    outcomes = []
    for device in ("cpu", "xla"):
        torch.manual_seed(0)
        layer = nn.Linear(2, 2).to(device)
        x = torch.ones(3, 2, device=device, requires_grad=True)
        count, y = torch_while_loop(
            lambda n, y: n < limit,
            lambda n, y, layer=layer: (n + 1, layer(y).tanh()),
            (torch.zeros((), dtype=torch.int64, device=device), x),
        )
        y.square().sum().backward()
        grads = [g if g is None else g.cpu() for g in (x.grad, layer.weight.grad, layer.bias.grad)]
        outcomes.append([count.cpu(), y.detach().cpu(), *grads])
    assert_same(outcomes[1], outcomes[0])


def test_fori_loop_with_unsigned_bounds_of_which_the_lower_is_larger():
    lower, upper = (torch.tensor(n, dtype=torch.uint8, device="xla") for n in (3, 2))
    values = fori_loop(lower, upper, lambda x: x * 2, torch.ones(2, device="xla"))[1]
    assert values.tolist() == [1, 1]


def test_fori_loop_counts_on_the_device():
    start = torch.tensor([3.0], device="xla")
    for bounds in ((0, 5), (torch.tensor([2], device="xla"), torch.tensor([7], device="xla"))):
        left, x = fori_loop(*bounds, lambda x: x + 2, start)
        assert (left.item(), x.tolist()) == (0, [13.0])
    left, a, b = fori_loop(0, 5, lambda a, b: (b, a + b), start, start)
    assert (a.item(), b.item()) == (24.0, 39.0)
    assert fori_loop(5, 0, lambda x: x + 2, start)[1].tolist() == [3.0]


@pytest.mark.parametrize(
    ("condition", "body", "error", "text"),
    [
        (lambda x: x < 3, lambda x: x, TypeError, r"one element; it returned \(2,\)"),
        (lambda x: True, lambda x: x, TypeError, "it returned True"),
        (lambda x: x.sum() < 3, lambda x: x[:1], ValueError, "expected"),
        (lambda x: x.sum() < 3, lambda x: x.add_(1), RuntimeError, "writes in place"),
        (lambda x: x.sum().item() < 3, lambda x: x, RuntimeError, "may read a value"),
    ],
)
def test_what_loops_cannot_do_is_said(condition, body, error, text):
    with pytest.raises(error, match=text):
        while_loop(condition, body, (torch.ones(2, device="xla"),))


def accumulated(device, run):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(device)
    unused = nn.Parameter(torch.ones(2, device=device))
    model.register_parameter("unused", unused)
    xs, labels = torch.randn(5, 6, 4).to(device), torch.randint(0, 3, (5, 6)).to(device)
    seen = torch.zeros((), device=device)

    def train_step(x, label, seen):
        return F.cross_entropy(model[2](model[1](model[0](x))), label), seen + x.sum()

    results = [run(train_step, (xs, labels), model, seen) for _ in range(2)]
    torch_xla.sync()
    return [results, gradients(model)[:4]], unused.grad


def in_python(train_step, items, _model, carried):
    total = 0.0
    for x, label in zip(*items, strict=True):
        loss, carried = train_step(x, label, carried)
        (loss / 5).backward()
        total += loss.detach() / 5
    return total, carried


def test_accumulated_gradients_are_those_of_the_steps_one_by_one():
    expected, _ = accumulated("cpu", in_python)
    got, unused = accumulated("xla", gradient_accumulation)
    assert_same(got, expected)
    assert unused is None
    assert last_program().count("stablehlo.while") == 2  # one per call


@pytest.mark.parametrize(
    ("step", "items", "error", "text"),
    [
        (None, (), ValueError, "cannot be empty"),
        (None, (3,), ValueError, "Element 0 of iterable_tensors is not a tensor"),
        (None, (torch.ones(2), torch.ones(3)), ValueError, "Element 1 .* inconsistent"),
        (None, (torch.ones(0, 2),), ValueError, "Element 0 of iterable_tensors is empty"),
        (lambda x: x.sum(), (torch.ones(2, 2),), ValueError, "requires a gradient"),
        (lambda x: x, (torch.ones(2, 2),), ValueError, "loss of one element"),
    ],
)
def test_a_train_step_is_checked(step, items, error, text):
    on_device = tuple(t.to("xla") if isinstance(t, torch.Tensor) else t for t in items)
    with pytest.raises(error, match=text):
        gradient_accumulation(step, on_device, nn.Linear(2, 2))


def test_a_train_step_that_writes_or_leans_on_outer_history_is_refused():
    model = nn.BatchNorm1d(4).to("xla")
    xs = torch.randn(3, 5, 4, device="xla")
    with pytest.raises(RuntimeError, match="train_step writes in place"):
        gradient_accumulation(lambda x: model(x).square().sum(), (xs,), model)
    scale = model.weight * 2
    with pytest.raises(RuntimeError, match=r"computed outside of it"):
        gradient_accumulation(lambda x: (x * scale).sum(), (xs,), model)
