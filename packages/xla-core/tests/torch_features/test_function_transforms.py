"""``torch.func``, forward-mode AD, ``torch.autograd.functional`` and ``make_fx`` on ``xla`` tensors.

Each transform of each function is compared with what it gives on the CPU.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import func, nn
from torch.autograd import functional
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

WEIGHT = torch.tensor([[0.5, -1.0, 2.0], [1.5, 0.3, -0.7], [0.1, 0.9, 0.4]])


def closes_over(x):
    """A tensor of the device that is no argument: make_fx keeps it as a constant."""
    weight = WEIGHT.to(x.device)
    return torch.tanh(x @ weight.cos()) * weight.sum().exp()


def views_and_writes(x):
    y = x.clone()
    y[..., 1:] *= 2
    y.view(-1)[0].add_(x.sum())
    return y.transpose(0, -1) * x


def pieces(x):
    y = torch.softmax(x * x, -1).log() + torch.where(x > 0.5, torch.sin(x), x * x)
    return torch.cat([y.unsqueeze(0), y.flip(-1)[None]]).prod(0)


def gated(x):
    """Of a gated linear unit PyTorch has derivatives as operators of their own."""
    return nn.functional.glu(torch.cat([x, x.cos() * 2], -1), -1)


FUNCTIONS = {
    "closes over": closes_over,
    "writes": views_and_writes,
    "pieces": pieces,
    "gated": gated,
}


def total(f):
    return lambda x: f(x).square().sum()


def dual(f, x):
    with forward_ad.dual_level():
        made = forward_ad.make_dual(x, torch.cos(x))
        primal, tangent = forward_ad.unpack_dual(f(made))
        return primal, tangent


def linearized(f, x):
    output, jvp = func.linearize(f, x)
    return output, jvp(torch.cos(x)), jvp(x)


def rows(f):
    """A transform under ``vmap``: of each of two scaled copies of the argument."""
    return lambda x: func.vmap(f)(torch.stack([x, x * 0.5]))


TRANSFORMS = {
    "linearize": linearized,
    "jvp": lambda f, x: func.jvp(f, (x,), (torch.cos(x),)),
    "vjp": lambda f, x: func.vjp(f, x)[1](torch.cos(x)),
    "grad": lambda f, x: func.grad(total(f))(x),
    "grad_and_value": lambda f, x: func.grad_and_value(total(f))(x),
    "grad of grad": lambda f, x: func.grad(total(func.grad(total(f))))(x),
    "jacfwd": lambda f, x: func.jacfwd(f)(x),
    "jacrev": lambda f, x: func.jacrev(f)(x),
    "jacrev in chunks": lambda f, x: func.jacrev(f, chunk_size=2)(x),
    "hessian": lambda f, x: func.hessian(total(f))(x),
    "jvp of grad": lambda f, x: func.jvp(func.grad(total(f)), (x,), (torch.cos(x),)),
    "vmap": lambda f, x: rows(f)(x),
    "vmap of jvp": lambda f, x: rows(lambda y: func.jvp(f, (y,), (y,)))(x),
    "vmap of grad": lambda f, x: rows(func.grad(total(f)))(x),
    "vmap of hessian": lambda f, x: rows(func.hessian(total(f)))(x),
    "forward mode": dual,
    "functionalize": lambda f, x: func.functionalize(f)(x),
    "functionalize views": lambda f, x: func.functionalize(f, remove="mutations_and_views")(x),
    "jacobian": functional.jacobian,
    "jacobian forward": lambda f, x: functional.jacobian(
        f, x, vectorize=True, strategy="forward-mode"
    ),
    "functional.hessian": lambda f, x: functional.hessian(total(f), x),
    "functional.jvp": lambda f, x: functional.jvp(f, x, torch.cos(x)),
    "functional.vjp": lambda f, x: functional.vjp(f, x, torch.cos(x)),
    "functional.hvp": lambda f, x: functional.hvp(total(f), x, x),
    "functional.vhp": lambda f, x: functional.vhp(total(f), x, x),
    "make_fx": lambda f, x: make_fx(f)(x)(x * 2),
    "make_fx of grad": lambda f, x: make_fx(func.grad(total(f)))(x)(x * 2),
    "make_fx of vmap": lambda f, x: make_fx(rows(f))(x)(x * 2),
}


def outcome(transform, function, device):
    """The tensors that come out, on the CPU; or the error and its message."""
    x = torch.tensor([0.3, 0.7, 1.1]).to(device)
    x = torch.stack([x, x - 0.2, x + 0.1])
    try:
        result = transform(function, x)
    except Exception as error:
        return type(error), str(error).splitlines()[0]
    leaves = torch.utils._pytree.tree_leaves(result)
    assert all(leaf.device.type == device for leaf in leaves)
    return [leaf.detach().cpu() for leaf in leaves]


@pytest.mark.filterwarnings(
    # torch 2.13, on the CPU too: of the graph that linearize folds
    "ignore:Attempted to insert a get_attr Node:UserWarning",
)
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_transform_gives_what_it_gives_on_the_cpu(transform, function, fallbacks):
    got = outcome(TRANSFORMS[transform], FUNCTIONS[function], "xla")
    expected = outcome(TRANSFORMS[transform], FUNCTIONS[function], "cpu")
    if isinstance(expected, tuple):
        assert got == expected
        return
    assert isinstance(got, list), got
    # float32 through two derivatives; XLA sums in another order
    torch.testing.assert_close(got, expected, rtol=2e-4, atol=2e-5)
    assert not fallbacks()


def test_functional_call_and_ensembles():
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)) for _ in range(3)]
    found = []
    for device in ("cpu", "xla"):
        moved = [copy.deepcopy(model).to(device) for model in models]
        x = torch.linspace(-1, 1, 6).reshape(2, 3).to(device)
        named = dict(moved[0].named_parameters())
        once = func.functional_call(moved[0], {k: v * 2 for k, v in named.items()}, (x,))
        params, buffers = func.stack_module_state(moved)
        base = copy.deepcopy(moved[0]).to("meta")

        def run(params, buffers, x, base=base):
            return func.functional_call(base, (params, buffers), (x,))

        each = func.vmap(run, in_dims=(0, 0, None))(params, buffers, x)

        def loss(params, row, model=moved[0]):
            return func.functional_call(model, params, (row,)).square().sum()

        per_sample = func.vmap(func.grad(loss), in_dims=(None, 0))(
            {k: v.detach() for k, v in named.items()}, x
        )
        found.append([t.detach().cpu() for t in (once, each, *per_sample.values())])
    torch.testing.assert_close(found[1], found[0])


def test_random_functions_under_vmap_are_refused_or_random():
    x = torch.zeros(3, 4, device="xla")
    with pytest.raises(RuntimeError, match="random"):
        func.vmap(lambda row: row + torch.rand_like(row))(x)
    different = func.vmap(lambda row: row + torch.rand_like(row), randomness="different")(x).cpu()
    assert not torch.equal(different[0], different[1])
    same = func.vmap(lambda row: row + torch.rand_like(row), randomness="same")(x).cpu()
    assert torch.equal(same[0], same[1])
    assert same[0].std() > 0


class Recorder(TorchDispatchMode):
    """Keeps the names of operators that run below it."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.tensor([1.0, 2.0], device="xla"),
        lambda: torch.tensor([1.0, 2.0]).to("xla"),
        lambda: torch.ones(2, device="xla").cumsum(0),
        lambda: torch.as_tensor([1.0, 2.0], device="xla"),
        lambda: torch.arange(1.0, 3.0, device="xla"),
    ],
)
def test_tensors_are_made_below_a_dispatch_mode(make):
    with Recorder() as recorder:
        made = make()
    assert made.device.type == "xla"
    assert made.tolist() == [1, 2]
    assert recorder.names


def test_constants_of_a_graph_are_traced():
    """A graph holds the operations on what its function closes over, not their results' memory."""
    weight = torch.ones(3, device="xla")
    graph = make_fx(lambda x: x * weight.exp())(torch.ones(3, device="xla"))
    assert [node.name for node in graph.graph.nodes if node.op == "call_function"] == ["exp", "mul"]
    weight.add_(1)
    assert torch.allclose(graph(torch.ones(3, device="xla")).cpu(), torch.full((3,), 2.0).exp())
