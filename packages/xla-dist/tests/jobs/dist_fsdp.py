"""Sharded training: what runs on every replica, and the checks that each of them makes."""

from __future__ import annotations

import functools
import gc

import torch
from dist_jobs import refused
from torch import nn

import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel as FSDP
from torch_xla.distributed.fsdp import checkpoint_module
from torch_xla.distributed.fsdp.wrap import transformer_auto_wrap_policy
from xla_core.extension_api import runtime
from xla_core.extension_api.programs import program_figures, program_runs
from xla_core.support import counters

WIDTH = 24


class Block(nn.Module):
    """A residual block with a bias, a norm and an argument that takes no gradient."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x, scale=None):
        y = self.down(torch.relu(self.up(self.norm(x))))
        return x + (y if scale is None else y * scale)


class Net(nn.Module):
    """Blocks between layers that belong to the outermost wrapper, a buffer and a tied weight."""

    def __init__(self, depth=2):
        super().__init__()
        self.first = nn.Linear(7, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(depth)])
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = nn.Parameter(torch.eye(WIDTH) * 0.5)
        self.again = nn.Linear(WIDTH, WIDTH, bias=False)
        self.again.weight = self.last.weight
        self.register_buffer("shift", torch.full((), 0.1))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x, scale=torch.ones((), device=x.device))
        return self.again(self.last(x)) + self.shift


def network(depth=2):
    torch.manual_seed(0)
    return Net(depth)


def batch(step, size=16):
    random = torch.Generator().manual_seed(step)
    x = torch.randn(size, 7, generator=random)
    return x, torch.tanh(x.sum(1, keepdim=True)).expand(size, WIDTH).contiguous()


POLICY = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
KINDS = {
    "whole": {},
    "nested": {"auto_wrap_policy": POLICY},
    "kept": {"auto_wrap_policy": POLICY, "reshard_after_forward": False},
    "flat": {"auto_wrap_policy": POLICY, "flatten_parameters": True},
    "rows": {"auto_wrap_policy": POLICY, "shard_param_on_dim_0": True},
    "together": {
        "auto_wrap_policy": POLICY, "coalesce_all_gather_ops": True,
        "reduce_scatter_bucket_size_mb": 1, "disable_reshard_on_root": False,
        "optimization_barrier_in_forward": False, "optimization_barrier_in_backward": False,
    },
    "recomputed": {
        "auto_wrap_policy": POLICY, "sync_on_finalization": True,
        "auto_wrapper_callable": lambda m, *a, **k: FSDP(checkpoint_module(m), *a, **k),
    },
    "recomputed outside": {
        "auto_wrap_policy": POLICY,
        "auto_wrapper_callable": lambda m, *a, **k: checkpoint_module(FSDP(m, *a, **k)),
    },
    "half": {"auto_wrap_policy": POLICY, "compute_dtype": torch.bfloat16, "fp32_reduce_scatter": True},
}  # fmt: skip


def wrapped(kind, depth=2):
    return FSDP(network(depth), **KINDS[kind])


def step_of(model, optimizer, rank, world):
    """One step on this replica's part of the batch; the loss over all replicas."""
    x, y = (t.chunk(world)[rank].to("xla") for t in batch(0))
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x).float(), y)
    loss.backward()
    optimizer.step()
    mean = xm.all_reduce("sum", loss.detach(), 1 / world)
    torch_xla.sync()
    return mean.item()


def alone(steps):
    """The same on one CPU: losses, state dict."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    losses = []
    for _ in range(steps):
        x, y = batch(0)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {k: v.detach() for k, v in model.state_dict().items()}


def trains(index, kinds, steps):
    """For each kind the losses, this replica's state dict and metadata."""
    return [_trained(kind, steps) for kind in kinds]


def tensors_in_cycles():
    """Tensors that only Python's collector could free, as texts.

    Other threads of the process may leave small cycles of their own (an exception and its frame) at any time.
    """
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        return [repr(garbage)[:200] for garbage in gc.garbage if isinstance(garbage, torch.Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


def _trained(kind, steps):
    rank, world = xr.global_ordinal(), xr.world_size()
    model = wrapped(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    before = len(program_runs())
    losses = [step_of(model, optimizer, rank, world)]
    gc.collect()
    gc.disable()
    losses += [step_of(model, optimizer, rank, world) for _ in range(steps - 1)]
    gc.enable()
    assert tensors_in_cycles() == []  # a cycle would hold full parameters until Python looks for it
    assert all(p.grad.shape == p.shape for p in model.parameters())
    assert {p.runs for p in program_runs()[before:]} == {steps}  # nothing compiles again
    state = {k: v.float().cpu().numpy() for k, v in model.state_dict().items()}
    return losses, state, model.get_shard_metadata()


# --- gradients ----------------------------------------------------------------------------------


def backward(model, step, parts):
    """Gradients of a step's batch, or of one part of it."""
    for t in parts:
        x, y = batch(step, t)
        device = next(model.parameters()).device
        nn.functional.mse_loss(model(x.to(device)), y.to(device)).backward()


def full_gradients(model):
    """The gradients of a sharded model by original name, put together."""
    found = {}
    for part in model.modules():
        if not isinstance(part, FSDP):
            continue
        for shard in part._unit.shards:
            if shard.parameter.grad is not None:
                whole = shard.layout.full(xm.all_gather(shard.parameter.grad))
                found[id(shard.parameter)] = whole.cpu()
    return {n: found.get(id(p)) for n, p in model.get_original_names_and_sharded_parameters()}


def frozen():
    """A network of which the norms and the first layer are not trained."""
    model = network(2)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" not in name and "first" not in name)
    return model


def gradients(index):
    """Accumulation without and with reductions, norms, and parameters that do not train."""
    world = xr.world_size()
    reference = frozen()
    model = FSDP(frozen(), auto_wrap_policy=POLICY)
    backward(reference, 0, [16, 8])
    with model.no_sync():
        backward(model, 0, [16])
    assert not model.params_with_grad
    backward(model, 0, [8])  # every replica has the same batch: the mean is each one's
    names = {n: p.grad for n, p in reference.named_parameters()}
    for name, gradient in full_gradients(model).items():
        torch.testing.assert_close(gradient, names[name], rtol=1e-4, atol=1e-6)
    for kind in (2.0, 1.0, torch.inf):
        wanted = nn.utils.clip_grad_norm_(reference.parameters(), 0.01, kind)
        torch.testing.assert_close(model.clip_grad_norm_(0.01, kind).cpu(), wanted)
        for name, gradient in full_gradients(model).items():
            torch.testing.assert_close(gradient, names[name], rtol=1e-4, atol=1e-6)
    model.zero_grad()
    model.set_gradient_divide_factors(1, 0.5, recursive=True)  # a sum, twice
    backward(model, 0, [16])
    reference.zero_grad()
    backward(reference, 0, [16])
    for name, gradient in full_gradients(model).items():
        wanted = reference.get_parameter(name).grad
        wanted = None if wanted is None else 2 * world * wanted
        torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-6)
    return True


# --- memory, checkpoints ------------------------------------------------------------------------


def costs(index, kinds, width, depth):
    """Bytes that live between steps and temporaries of the step's program, by kind."""
    global WIDTH
    WIDTH = width
    rank, world = xr.global_ordinal(), xr.world_size()
    found = []
    for kind in kinds:
        gc.collect()
        before = runtime.client().memory_info(0).bytes_used
        model = wrapped(kind, depth) if kind else network(depth).to("xla")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            step_of(model, optimizer, rank, world)
        torch_xla.sync(wait=True)
        lives = runtime.client().memory_info(0).bytes_used - before
        program = max((p for p in program_figures() if p.runs), key=lambda p: p.arguments)
        found.append((lives, program.temporaries))
        del model, optimizer
        torch_xla.runtime.clear_computation_cache()
    return found


def saves(index, folder):
    """Train, save, train on; load into a new model and train on: the same losses."""
    rank, world = xr.global_ordinal(), xr.world_size()
    model = FSDP(network(2), auto_wrap_policy=POLICY, buffer_dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step_of(model, optimizer, rank, world)
    kept = {"model": model.state_dict(), "shard_metadata": model.get_shard_metadata()}
    xm.save(kept, f"{folder}/rank-{rank}-of-{world}.pth", master_only=False)
    states = {k: v.clone() for k, v in model.state_dict().items()}
    with torch.no_grad():
        x = batch(1)[0].to("xla")
        wanted = model(x).cpu()
        other = FSDP(Net(2), auto_wrap_policy=POLICY, buffer_dtype=torch.bfloat16)
        assert not torch.allclose(other(x).cpu(), wanted)
        assert other.load_state_dict(states).missing_keys == []
        torch.testing.assert_close(other(x).cpu(), wanted, rtol=0, atol=0)
    return wanted.numpy()


# --- a single replica, and what is refused ------------------------------------------------------


class Hidden:
    """Something that nobody looks into."""

    def __init__(self, value):
        self.value = value


class Hides(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return y, Hidden(y * self.weight.sum())


def refusals(index):
    """Errors that name the culprit and the next step."""
    refused(RuntimeError, "ModuleList has no forward", FSDP, nn.ModuleList([nn.Linear(2, 2)]))
    refused(RuntimeError, "already sharded", FSDP, FSDP(nn.Linear(2, 2)))
    refused(TypeError, "0.weight is torch.float64", FSDP, nn.Sequential(nn.Linear(2, 2)).double())
    refused(
        ValueError, "compute_dtype is torch.int8", FSDP, nn.Linear(2, 2), compute_dtype=torch.int8
    )
    refused(ValueError, "sharding_rank", FSDP, nn.Linear(2, 2), sharding_groups=[[0]])
    refused(
        NotImplementedError, "_debug_dummy_all_gather_op: there are no dummy", FSDP, nn.Linear(2, 2),
        _debug_dummy_all_gather_op=True,
    )  # fmt: skip
    pair = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    pair[1].weight = pair[0].weight
    pair[0] = FSDP(pair[0])
    refused(ValueError, "1.weight is also a parameter of a module that is sharded", FSDP, pair)
    model = FSDP(
        nn.Sequential(FSDP(nn.Linear(2, 2))),
        coalesce_all_gather_ops=True,
        sync_on_finalization=True,
    )
    steps = counters.all_counters()["MarkStep"]
    model(torch.ones(1, 2, device="xla")).sum().backward()
    assert counters.all_counters()["MarkStep"] == steps + 1
    refused(RuntimeError, "clip_grad_norm_ is for the outermost", model[0].clip_grad_norm_, 1.0)
    refused(RuntimeError, "meta", lambda: model[0].module.weight + torch.ones(2, 2, device="xla"))
    model = FSDP(Hides(2, 2), disable_reshard_on_root=False)
    hidden = model(torch.ones(1, 2, device="xla", requires_grad=True))[1].value
    refused(RuntimeError, "use reshard_after_forward=False", hidden.sum().backward)
    return True


def single(index):
    """One replica trains; meta modules get values; a recurrent layer finds its weights."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 4), nn.LSTM(4, 5, batch_first=True))
    refused(ValueError, "0.weight is on the meta device", FSDP, nn.Sequential(Bare()))
    torch.manual_seed(3)
    model = FSDP(model)
    torch.manual_seed(3)
    wanted = nn.Sequential(nn.Linear(3, 4), nn.LSTM(4, 5, batch_first=True))
    x = torch.randn(2, 6, 3)
    got, _ = model(x.to("xla"))
    torch.testing.assert_close(got.cpu(), wanted(x)[0], rtol=1e-5, atol=1e-6)
    got.sum().backward()
    wanted(x)[0].sum().backward()
    for name, gradient in full_gradients(model).items():
        torch.testing.assert_close(gradient, wanted.get_parameter(name).grad, rtol=1e-4, atol=1e-5)
    assert "world_size=1, rank=0" in repr(model) and "LSTM(4, 5" in repr(model)
    return True


class Bare(nn.Module):
    """A parameter without a value, and nobody who gives it one."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, device="meta"))

    def forward(self, x):
        return x * self.weight
