"""Autograd, hooks, modules and optimizers on ``xla``: all PyTorch's own, on top of the device."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

import torch_xla
import torch_xla.core.xla_model as xm

# Sums and products of float32 in another order than the CPU's kernels: a few units in the last place.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def close(x, expected):
    torch.testing.assert_close(x.detach().cpu(), expected.detach(), **CLOSE)


def on_both(run, *shapes):
    """``run(device, *inputs)`` on the CPU and on xla with equal inputs; both results."""
    torch.manual_seed(0)
    inputs = [torch.randn(shape) for shape in shapes]
    results = []
    for device in ("cpu", "xla"):
        torch.manual_seed(1)
        results.append(
            run(device, *(x.detach().clone().to(device).requires_grad_() for x in inputs))
        )
    return results


# -- gradients ----------------------------------------------------------------------------------


def test_backward_accumulates():
    x = torch.tensor([1.0, 2.0], device="xla", requires_grad=True)
    for expected in ([2, 4], [4, 8]):
        (x * x).sum().backward()
        assert x.grad.device.type == "xla"
        assert x.grad.tolist() == expected
    x.grad = None
    (3 * x).sum().backward()
    assert x.grad.tolist() == [3, 3]


def test_backward_with_a_gradient_and_of_a_subset():
    x = torch.ones(3, device="xla", requires_grad=True)
    y = torch.ones(3, device="xla", requires_grad=True)
    (x * y).backward(torch.tensor([1.0, 2.0, 3.0], device="xla"), inputs=[x])
    assert x.grad.tolist() == [1, 2, 3]
    assert y.grad is None
    with pytest.raises(
        RuntimeError, match="grad can be implicitly created only for scalar outputs"
    ):
        (x * y).backward()


def test_gradient_of_the_wrong_shape_is_refused():
    x = torch.ones(3, device="xla", requires_grad=True)
    with pytest.raises(RuntimeError, match="Mismatch in shape"):
        (x * 2).backward(torch.ones(2, device="xla"))
    with pytest.raises(RuntimeError, match="attempting to assign a gradient of size"):
        x.grad = torch.ones(2, device="xla")


def test_errors_of_autograd_itself():
    x = torch.ones(3, device="xla", requires_grad=True)
    loss = (x * x).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
        loss.backward()
    with pytest.raises(RuntimeError, match="does not require grad and does not have a grad_fn"):
        torch.ones(1, device="xla").backward()
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad is being used"):
        x.add_(1)
    y = x.exp()
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_grad_and_double_backward():
    def run(_device, x, w):
        loss = ((x @ w).tanh() ** 2).sum()
        gx, gw = torch.autograd.grad(loss, (x, w), create_graph=True)
        penalty = gx.pow(2).sum() + gw.norm()
        penalty.backward()
        return [loss, gx, gw, x.grad, w.grad]

    for expected, x in zip(*on_both(run, (4, 3), (3, 5)), strict=True):
        close(x, expected)


def test_functions_of_autograd():
    x = torch.tensor([1.0, 2.0, 3.0])

    def f(v):
        return (v**3).sum()

    for function in (torch.autograd.functional.jacobian, torch.autograd.functional.hessian):
        close(function(f, x.to("xla")), function(f, x))
    close(
        torch.autograd.functional.vjp(lambda v: v.exp(), x.to("xla"), x.to("xla"))[1],
        torch.autograd.functional.vjp(lambda v: v.exp(), x, x)[1],
    )


def test_custom_function():
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, scale):
            ctx.save_for_backward(x)
            ctx.scale = scale
            ctx.mark_non_differentiable(sign := x.sign())
            return x**3 * scale, sign

        @staticmethod
        def backward(ctx, gradient, _):
            (x,) = ctx.saved_tensors
            return 3 * x * x * ctx.scale * gradient, None

    x = torch.tensor([2.0, -1.0], device="xla", requires_grad=True)
    y, sign = Cube.apply(x, 0.5)
    y.sum().backward()
    assert y.tolist() == [4, -0.5]
    assert sign.tolist() == [1, -1] and not sign.requires_grad
    assert x.grad.tolist() == [6, 1.5]
    assert torch.autograd.gradcheck(
        lambda v: Cube.apply(v, 2.0)[0],
        torch.tensor([0.5, 2.0], dtype=torch.float64, device="xla", requires_grad=True),
    )


def test_in_place_autograd_function():
    class DoubleIt(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.mark_dirty(x)
            return x.mul_(2)

        @staticmethod
        def backward(ctx, gradient):
            return 2 * gradient

    x = torch.ones(2, device="xla", requires_grad=True)
    y = DoubleIt.apply(x.clone())
    y.sum().backward()
    assert y.tolist() == x.grad.tolist() == [2, 2]


def test_no_grad_enable_grad_and_detach():
    x = torch.ones(2, device="xla", requires_grad=True)
    with torch.no_grad():
        y = x * 2
        with torch.enable_grad():
            z = x * 3
    assert not y.requires_grad and y.is_leaf
    assert z.requires_grad
    d = z.detach()
    assert not d.requires_grad
    (z + d).sum().backward()
    assert x.grad.tolist() == [3, 3]
    with torch.no_grad():
        x.sub_(0.5 * x.grad)
    assert x.tolist() == [-0.5, -0.5]


def test_inference_mode():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2))
    x = torch.randn(3, 4)
    expected = model(x)
    model.to("xla")
    with torch.inference_mode():
        y = model(x.to("xla"))
        made = torch.arange(4.0, device="xla").view(2, 2).t()
        made[0] += 1
    assert y.is_inference() and not y.requires_grad
    close(y, expected)
    assert made.tolist() == [[1, 3], [1, 3]]
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        y * torch.ones(2, device="xla", requires_grad=True)


def test_graph_between_host_and_device():
    host = torch.tensor([1.0, 2.0], requires_grad=True)
    x = torch.tensor([3.0, 4.0], device="xla", requires_grad=True)
    y = (host.to("xla") * x).cpu().exp().log().sum() + (x * 2).sum().cpu()
    y.backward()
    assert host.grad.device.type == "cpu"
    assert x.grad.device.type == "xla"
    torch.testing.assert_close(host.grad, torch.tensor([3.0, 4.0]))
    torch.testing.assert_close(x.grad.cpu(), torch.tensor([3.0, 4.0]))


def test_checkpoint_recomputes_with_the_same_dropout():
    def run(device, x, w):
        def block(v):
            return F.gelu(v @ w)

        checkpoint(block, x, use_reentrant=False).sum().backward()
        first = x.grad, w.grad
        x.grad = w.grad = None
        checkpoint(block, x, use_reentrant=True).sum().backward()
        return [*first, x.grad, w.grad]

    for expected, x in zip(*on_both(run, (4, 3), (3, 3)), strict=True):
        close(x, expected)


def test_saved_tensor_hooks():
    packed = []

    def pack(tensor):
        packed.append(tensor.device.type)
        return tensor.cpu()

    x = torch.tensor([2.0, 3.0], device="xla", requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda host: host.to("xla")):
        y = (x * x).sum()
    y.backward()
    assert x.grad.tolist() == [4, 6]
    assert packed == ["xla", "xla"]
    with torch.autograd.graph.save_on_cpu():
        z = x.exp().sum()
    x.grad = None
    z.backward()
    close(x.grad, torch.tensor([2.0, 3.0]).exp())


def test_anomaly_mode_names_the_operator():
    x = torch.tensor([0.0], device="xla", requires_grad=True)
    with (
        pytest.warns(UserWarning, match="Anomaly Detection has been enabled"),
        torch.autograd.detect_anomaly(),
    ):
        y = (x.sqrt() * 0).sum()
        with (
            pytest.warns(UserWarning, match="Error detected in SqrtBackward0"),
            pytest.raises(RuntimeError, match="'SqrtBackward0' returned nan values"),
        ):
            y.backward()


# -- hooks --------------------------------------------------------------------------------------


def test_tensor_hooks():
    x = torch.ones(2, device="xla", requires_grad=True)
    seen = []
    handle = x.register_hook(lambda g: seen.append(g.tolist()) or g * 10)
    x.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.tolist()))
    y = x * 3
    y.retain_grad()
    y.sum().backward()
    assert seen == [[3, 3], [30, 30]]
    assert y.grad.tolist() == [1, 1]
    handle.remove()
    x.grad = None
    (x * 3).sum().backward()
    assert x.grad.tolist() == [3, 3]


def test_module_hooks():
    layer = nn.Linear(2, 2, device="xla")
    seen = []
    layer.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
    layer.register_forward_hook(lambda _, __, out: seen.append(out.device.type))
    layer.register_full_backward_hook(lambda _, gi, go: seen.append((gi[0].shape, go[0].shape)))
    x = torch.ones(3, 2, device="xla", requires_grad=True)
    layer(x).sum().backward()
    assert seen == ["xla", ((3, 2), (3, 2))]
    expected = (x.detach().cpu() * 2).sum(0).expand(2, 2)
    close(layer.weight.grad, expected.contiguous())


def test_optimizer_step_in_backward():
    p = nn.Parameter(torch.ones(2, device="xla"))
    optimizer = torch.optim.SGD([p], lr=0.5)

    def step(_):
        optimizer.step()
        optimizer.zero_grad()

    p.register_post_accumulate_grad_hook(step)
    for _ in range(2):
        (p * 1.0).sum().backward()
    assert p.tolist() == [0, 0]
    assert p.grad is None


# -- modules ------------------------------------------------------------------------------------


def test_parameters_and_buffers():
    p = nn.Parameter(torch.ones(2, device="xla"))
    assert isinstance(p, nn.Parameter) and isinstance(p, torch.Tensor)
    assert p.is_leaf and p.requires_grad
    module = nn.Module()
    module.p = p
    module.register_buffer("b", torch.zeros(1, device="xla"))
    assert [n for n, _ in module.named_parameters()] == ["p"]
    assert list(module.state_dict()) == ["p", "b"]
    module.double()
    assert module.p.dtype is module.b.dtype is torch.float64
    module.p.data = torch.zeros(3, device="xla")
    assert module.p.shape == (3,) and isinstance(module.p, nn.Parameter)
    with pytest.raises((RuntimeError, TypeError)):
        module.p.data = torch.zeros(3)


def test_state_dict_round_trip():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)).to("xla")
    model(torch.randn(4, 1, 5, 5).to("xla"))
    state = model.state_dict()
    assert state["1.num_batches_tracked"].item() == 1
    twin = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)).to("xla")
    assert str(twin.load_state_dict(state)) == "<All keys matched successfully>"
    with torch.no_grad():
        model[0].weight.zero_()
    assert torch.equal(twin[0].weight.cpu(), twin.state_dict()["0.weight"].cpu())
    assert twin[0].weight.abs().sum() > 0
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight"):
        nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3)).to("xla").load_state_dict(state)


def test_weight_norm_spectral_norm_and_orthogonal_parametrizations():
    def run(device, x):
        model = nn.Sequential(
            parametrizations.weight_norm(nn.Linear(4, 4)),
            parametrizations.spectral_norm(nn.Linear(4, 3)),
        )
        model.to(device)
        model(x).pow(2).sum().backward()
        return [model(x), x.grad, *(p.grad for p in model.parameters())]

    for expected, x in zip(*on_both(run, (5, 4)), strict=True):
        close(x, expected)


def test_pruning_and_weight_tying():
    layer = nn.Linear(4, 4, bias=False, device="xla")
    prune.l1_unstructured(layer, "weight", amount=0.5)
    assert (layer.weight == 0).sum().item() == 8
    embedding = nn.Embedding(5, 3, device="xla")
    head = nn.Linear(3, 5, bias=False, device="xla")
    head.weight = embedding.weight
    head(embedding(torch.tensor([1, 2], device="xla"))).sum().backward()
    assert embedding.weight.grad is head.weight.grad
    assert embedding.weight.grad.shape == (5, 3)


def test_clip_grad():
    for norm_type in (2.0, 1.0, float("inf")):
        parameters = {
            d: [nn.Parameter(torch.ones(3, device=d)) for _ in range(2)] for d in ("cpu", "xla")
        }
        totals = {}
        for device, ps in parameters.items():
            for scale, p in enumerate(ps, 1):
                p.grad = torch.arange(3.0, device=device) * scale
            totals[device] = torch.nn.utils.clip_grad_norm_(ps, 1.5, norm_type)
        close(totals["xla"], totals["cpu"])
        for x, host in zip(parameters["xla"], parameters["cpu"], strict=True):
            close(x.grad, host.grad)
    torch.nn.utils.clip_grad_value_(parameters["xla"], 0.1)
    assert max(p.grad.abs().max().item() for p in parameters["xla"]) <= 0.1 + 1e-7
    p = nn.Parameter(torch.ones(1, device="xla"))
    p.grad = torch.full((1,), float("nan"), device="xla")
    with pytest.raises(RuntimeError, match=r"The total norm of order 2\.0 for gradients"):
        torch.nn.utils.clip_grad_norm_([p], 1.0, error_if_nonfinite=True)


def test_parameters_to_vector_and_back():
    model = nn.Linear(2, 3).to("xla")
    vector = torch.nn.utils.parameters_to_vector(model.parameters())
    torch.nn.utils.vector_to_parameters(torch.zeros_like(vector), model.parameters())
    assert vector.shape == (9,)
    assert model.weight.abs().sum().item() == 0


def test_module_that_is_frozen_learns_nothing():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)).to("xla")
    model[0].requires_grad_(False)
    model(torch.ones(1, 2, device="xla")).sum().backward()
    assert model[0].weight.grad is None
    assert model[1].weight.grad is not None


# -- optimizers ---------------------------------------------------------------------------------

OPTIMIZERS = {
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "SGD momentum": lambda ps: torch.optim.SGD(
        ps, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
    "Adam": lambda ps: torch.optim.Adam(ps, lr=0.01),
    "Adam amsgrad": lambda ps: torch.optim.Adam(ps, lr=0.01, amsgrad=True, weight_decay=0.1),
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.01),
    "AdamW loop": lambda ps: torch.optim.AdamW(ps, lr=0.01, foreach=False),
    "AdamW capturable": lambda ps: torch.optim.AdamW(ps, lr=torch.tensor(0.01), foreach=False),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, lr=0.01, momentum=0.5, centered=True),
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.05),
    "Adadelta": lambda ps: torch.optim.Adadelta(ps),
    "Adamax": lambda ps: torch.optim.Adamax(ps),
    "NAdam": lambda ps: torch.optim.NAdam(ps),
    "RAdam": lambda ps: torch.optim.RAdam(ps),
    "ASGD": lambda ps: torch.optim.ASGD(ps),
    "Rprop": lambda ps: torch.optim.Rprop(ps),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_optimizer_follows_the_cpu(make):
    torch.manual_seed(0)
    host = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    model = copy.deepcopy(host).to("xla")
    data = torch.randn(6, 4)
    optimizers = make(host.parameters()), make(model.parameters())
    for _ in range(6):
        for m, optimizer, x in (
            (host, optimizers[0], data),
            (model, optimizers[1], data.to("xla")),
        ):
            optimizer.zero_grad()
            m(x).pow(2).mean().backward()
            optimizer.step()
        torch_xla.sync()
    for p, expected in zip(model.parameters(), host.parameters(), strict=True):
        close(p, expected)


def test_lbfgs_with_a_closure():
    target = torch.tensor([1.0, -2.0], device="xla")
    p = nn.Parameter(torch.zeros(2, device="xla"))
    optimizer = torch.optim.LBFGS([p], max_iter=10)

    def closure():
        optimizer.zero_grad()
        loss = (p - target).pow(2).sum()
        loss.backward()
        return loss

    first = optimizer.step(closure)
    assert first.item() == 5.0
    torch.testing.assert_close(p.detach().cpu(), target.cpu(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["Adam", "SGD momentum", "RMSprop"])
def test_optimizer_state_dict_continues_where_it_stopped(name):
    def train(model, optimizer, steps):
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(2, 3, device="xla")).pow(2).sum().backward()
            xm.optimizer_step(optimizer, barrier=True)

    torch.manual_seed(0)
    model = nn.Linear(3, 2).to("xla")
    optimizer = OPTIMIZERS[name](model.parameters())
    train(model, optimizer, 2)
    twin = copy.deepcopy(model)
    resumed = OPTIMIZERS[name](twin.parameters())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    # through the CPU, as the documents advise
    through = nn.Linear(3, 2)
    through.load_state_dict({k: v.cpu() for k, v in model.state_dict().items()})
    through.to("xla")
    third = OPTIMIZERS[name](through.parameters())
    third.load_state_dict(copy.deepcopy(xm._maybe_convert_to_cpu(optimizer.state_dict())))
    train(model, optimizer, 3)
    train(twin, resumed, 3)
    train(through, third, 3)
    assert torch.equal(twin.weight, model.weight)
    assert torch.equal(through.weight, model.weight)
    kinds = {
        v.device.type
        for s in third.state.values()
        for v in s.values()
        if torch.is_tensor(v) and v.dim()
    }
    assert kinds == {"xla"}


def test_schedulers_move_the_learning_rate():
    p = nn.Parameter(torch.zeros(1, device="xla"))
    optimizer = torch.optim.SGD([p], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for _ in range(3):
        p.grad = torch.ones(1, device="xla")
        optimizer.step()
        scheduler.step()
        torch_xla.sync()
    assert p.item() == -1.75


def test_exponential_moving_average():
    model = nn.Linear(2, 2).to("xla")
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    start = model.weight.detach().cpu().clone()
    average.update_parameters(model)
    with torch.no_grad():
        model.weight.add_(1)
    average.update_parameters(model)
    close(average.module.weight, start + 0.1)


class CallsInBackward(torch.autograd.Function):
    """Its backward function is the one that it is called with."""

    @staticmethod
    def forward(ctx, x, function):
        ctx.function = function
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return ctx.function(gradient), None


@pytest.mark.parametrize(
    "alias",
    [
        pytest.param(lambda t: t.data, id="data"),
        pytest.param(lambda t: t.detach(), id="detach"),
        pytest.param(lambda t: t.view_as(t).detach(), id="view"),
    ],
)
def test_a_backward_function_writes_to_what_its_aliases_show(alias):
    """They were copies there, as gradients that become a leaf's are."""

    def fill(gradient):
        buffer = gradient.new_zeros(3, 4)
        view = buffer.view(4, 3)
        for column in range(3):
            alias(view)[:, column] = column + 1
        alias(buffer[0])[3] = 7
        return buffer * gradient

    gradients = []
    for device in ("cpu", "xla"):
        x = torch.ones(3, 4, device=device, requires_grad=True)
        CallsInBackward.apply(x, fill).sum().backward()
        gradients.append(x.grad.cpu())
    assert gradients[1].equal(gradients[0]) and gradients[0].count_nonzero() == 12


def test_a_gradient_that_is_a_view_is_copied_whoever_calls_autograd():
    def gradient_of(run):
        leaf = torch.ones(2, 3, device="xla", requires_grad=True)
        weights = torch.arange(6.0).reshape(3, 2).to("xla").requires_grad_()
        run((leaf.t() * weights).sum())
        weights_before = weights.detach().cpu()
        leaf.grad.zero_()
        assert weights.detach().cpu().equal(weights_before)
        return weights.grad.tolist()

    def from_inside(loss):
        def run(gradient):
            with torch.enable_grad():
                loss.backward()
            return gradient

        x = torch.ones(1, device="xla", requires_grad=True)
        CallsInBackward.apply(x, run).sum().backward()

    assert gradient_of(lambda loss: loss.backward()) == gradient_of(from_inside) == [[1.0] * 2] * 3
