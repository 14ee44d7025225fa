"""What the tests of the optimizer with split state run; each process trains the reference, too."""

from __future__ import annotations

import copy

import torch
from torch import nn

import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch_xla.distributed.zero_redundancy_optimizer import ZeroRedundancyOptimizer

BATCH = 4
STEPS = 4


class Model(nn.Module):
    """Rows that no number of replicas divides, a scalar, and a parameter without gradient."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.norm = nn.LayerNorm(7)
        self.last = nn.Linear(7, 3)
        self.unused = nn.Parameter(torch.ones(3, 2))

    def forward(self, x):
        return self.last(self.norm(torch.tanh(self.first(x))) * self.scale)


def batches(world):
    generator = torch.Generator().manual_seed(1)
    shape = (STEPS, world * BATCH)
    return torch.randn(*shape, 5, generator=generator), torch.randn(*shape, 3, generator=generator)


def train(model, optimizer, inputs, targets, before_step=lambda: None):
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    for x, y in zip(inputs, targets, strict=True):
        optimizer.zero_grad(set_to_none=True)
        nn.functional.mse_loss(model(x), y).backward()
        before_step()
        optimizer.step()
        schedule.step()
        torch_xla.sync()


def groups_of(model):
    """Two groups with options of their own."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": others}]


def own(tensor, dim=1):
    return tensor.chunk(xr.world_size(), dim)[xr.global_ordinal()].to("xla")


def equals_the_whole_optimizer(_index, kind, options):
    """The largest difference to the unsplit optimizer with the whole batch, and the two norms."""
    torch.manual_seed(0)
    whole = Model()
    model = copy.deepcopy(whole).to("xla")
    inputs, targets = batches(xr.world_size())
    norms = []

    def clip():
        if options.get("grad_clipping", True):
            limit = options.get("max_norm", 1.0)
            norms.append(nn.utils.clip_grad_norm_(whole.parameters(), limit).item())

    cls = getattr(torch.optim, kind)
    arguments = {"lr": 0.05, **({"momentum": 0.9} if kind == "SGD" else {})}
    train(whole, cls(groups_of(whole), **arguments), inputs, targets, clip)
    options = {"max_norm": 1.0, **options}
    optimizer = ZeroRedundancyOptimizer(groups_of(model), cls, **options, **arguments)
    train(model, optimizer, own(inputs), own(targets))
    pairs = zip(model.parameters(), whole.parameters(), strict=True)
    state = [v.shape for s in optimizer.base_optimizer.state.values() for v in s.values()]
    norm = optimizer.grad_norm
    return {
        "difference": max((a.cpu() - b).abs().max().item() for a, b in pairs),
        "norm": norm if norm is None else norm.item(),
        "expected_norm": norms[-1] if norms else None,
        "lr": [group["lr"] for group in optimizer.param_groups],
        "elements": sum(shape.numel() for shape in state),
    }


def splits_within_groups(_index):
    """Two groups of two hold the same halves; gradients are the mean over each group."""
    torch.manual_seed(0)
    model = Model().to("xla")
    groups = [[0, 1], [2, 3]]
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, sharding_groups=groups, grad_clipping=False, lr=0.1
    )
    before = model.first.weight.detach().cpu()
    model.first.weight.grad = torch.full((7, 5), float(xm.get_ordinal())).to("xla")
    optimizer.step()
    change = (before - model.first.weight.detach().cpu()) / 0.1
    return (
        change.min().item(),
        change.max().item(),
        optimizer.base_optimizer.param_groups[0]["params"][2].shape,
    )


def resumes(_index, options, dtype):
    """The parameters after training on, and after training on from saved state."""
    torch.manual_seed(0)
    model = Model().to("xla", getattr(torch, dtype))
    inputs, targets = (own(t).to(getattr(torch, dtype)) for t in batches(xr.world_size()))
    made = {"lr": 0.05, "save_master_weights": True, **options}
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **made)
    train(model, optimizer, inputs, targets)
    saved = copy.deepcopy((xm._maybe_convert_to_cpu(optimizer.state_dict()), model))
    train(model, optimizer, inputs, targets)
    other = saved[1]
    resumed = ZeroRedundancyOptimizer(other.parameters(), torch.optim.AdamW, **made)
    resumed.load_state_dict(saved[0])
    train(other, resumed, inputs, targets)
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a.cpu(), b.cpu()) for a, b in pairs), sorted(saved[0])


def is_misused(_index):
    """What goes wrong says so."""
    found = []
    model = Model()
    for params, options in (
        (model.parameters(), {}),
        (Model().to("xla").parameters(), {"sharding_groups": [[1 - xr.global_ordinal()]]}),
    ):
        try:
            ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.1, **options)
        except ValueError as error:
            found.append(str(error))
    late = ZeroRedundancyOptimizer(
        Model().to("xla").parameters(), torch.optim.SGD, lr=0.1, lazy_init=True
    )
    state = {"shape_info": {0: (2, 2)}}
    for call in (late.step, lambda: late.load_state_dict(state)):
        try:
            call()
        except (RuntimeError, ValueError) as error:
            found.append(str(error))
    return found
