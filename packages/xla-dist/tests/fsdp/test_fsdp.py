"""``torch_xla.distributed.fsdp``: sharded training is training, in less memory."""

from __future__ import annotations

import functools

import dist_fsdp
import numpy as np
import pytest
import torch
from torch import nn

from torch_xla.distributed import fsdp
from torch_xla.distributed.fsdp import wrap
from xla_dist.fsdp import consolidate
from xla_dist.fsdp.layouts import Layout

STEPS = 3


@pytest.mark.parametrize(
    ("world", "kinds"),
    [
        (2, ["nested", "together", "recomputed", "recomputed outside", "half"]),
        (4, ["flat", "rows"]),
    ],
)
def test_sharded_training_is_that_of_one_process(launch, world, kinds):
    losses, state = dist_fsdp.alone(STEPS)
    assert losses[-1] < losses[0]
    found = launch(world, dist_fsdp.trains, kinds, STEPS).join()
    for number, kind in enumerate(kinds):
        replicas = [replica[number] for replica in found]
        half = kind == "half"
        for mine, _, _ in replicas:
            assert mine == replicas[0][0]
            # bfloat16 has 8 bits; the others sum in another order
            np.testing.assert_allclose(mine, losses, rtol=2e-2 if half else 2e-5, err_msg=kind)
        states = [{k: torch.from_numpy(v) for k, v in s.items()} for _, s, _ in replicas]
        whole = fsdp.consolidate_sharded_state_dicts(states, replicas[0][2])
        dist_fsdp.network().load_state_dict(whole)
        for name, value in whole.items():
            close = {"rtol": 2e-2, "atol": 1e-2} if half else {"rtol": 1e-4, "atol": 1e-6}
            torch.testing.assert_close(value, state[name], msg=f"{kind}: {name}", **close)


def test_gradients_add_up_and_are_clipped_over_all_replicas(launch):
    assert launch(2, dist_fsdp.gradients).join() == [True, True]


def test_memory_falls_as_documented(launch):
    kinds = [None, "whole", "nested"]
    for found in launch(2, dist_fsdp.costs, kinds, 128, 4).join():
        lives, temporaries = ([figures[i] for figures in found] for i in (0, 1))
        # parameters and gradients; some parts are padded, the batch and the loss live, too
        assert all(each < 0.55 * lives[0] for each in lives[1:])
        # one block at a time, forward and backward, instead of all of them
        assert temporaries[2] < 0.5 * temporaries[1]


def test_checkpoints_are_put_together(launch, tmp_path, capsys):
    found = launch(2, dist_fsdp.saves, str(tmp_path)).join()
    prefix = f"{tmp_path}/rank-"
    consolidate.main(["--ckpt_prefix", prefix])
    assert f"to {prefix}_consolidated.pth" in capsys.readouterr().out
    model = dist_fsdp.network()
    model.load_state_dict(torch.load(f"{prefix}_consolidated.pth")["model"])
    assert model.shift.dtype == torch.float32
    with torch.no_grad():
        wanted = model(dist_fsdp.batch(1)[0])
    for outputs in found:  # their buffer is a bfloat16
        np.testing.assert_allclose(outputs, wanted, rtol=1e-3, atol=1e-3)
    whole, path = fsdp.consolidate_sharded_model_checkpoints(prefix, "*-of-2.pth", save_model=False)
    assert path is None and set(whole) == set(model.state_dict())
    (tmp_path / "rank-1-of-2.pth").unlink()
    with pytest.raises(ValueError, match="sharded over 2 replicas, but there are 1 state dicts"):
        fsdp.consolidate_sharded_model_checkpoints(prefix, "*-of-2.pth")
    with pytest.raises(FileNotFoundError, match="no file matches"):
        fsdp.consolidate_sharded_model_checkpoints(prefix, "*.none")


@pytest.mark.parametrize("check", [dist_fsdp.refusals, dist_fsdp.single])
def test_a_single_replica(launch, check):
    assert launch(1, check).join() == [True]


@pytest.mark.parametrize("by_rows", [False, True])
def test_parts_make_the_whole(by_rows):
    tensor = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    layouts = [Layout(tensor.size(), 4, rank, 2, by_rows) for rank in range(4)]
    parts = [layout.part(tensor) for layout in layouts]
    assert {tuple(p.shape) for p in parts} == ({(2, 3)} if by_rows else {(4,)})
    assert torch.equal(layouts[0].full(torch.cat(parts)), tensor)


class Wrapper(nn.Sequential):
    """What recursive_wrap wraps with here."""

    def __init__(self, module, label=""):
        super().__init__(module)
        self.label = label


def wrapped_names(model):
    return {name for name, part in model.named_modules() if isinstance(part, Wrapper)}


def test_policies_choose_what_is_wrapped():
    def model():
        return nn.Sequential(nn.Linear(4, 4), nn.ModuleList([nn.Linear(8, 8), nn.ReLU()]))

    size = functools.partial(wrap.size_based_auto_wrap_policy, min_num_params=30)
    whole, count = wrap.recursive_wrap(model(), size, Wrapper)
    assert wrapped_names(whole) == {"1.0"} and count == 72  # 20 are left, and a list has no forward
    layers = functools.partial(wrap.transformer_auto_wrap_policy, transformer_layer_cls={nn.Linear})
    whole, count = wrap.recursive_wrap(model(), layers, Wrapper, only_wrap_children=True, label="x")
    assert wrapped_names(whole) == {"0", "1.0"} and count == 92 and whole[0].label == "x"
    chosen = functools.partial(wrap.lambda_auto_wrap_policy, lambda_fn=lambda m: m is relu[0])
    relu = nn.Sequential(nn.ReLU())
    assert wrapped_names(wrap.recursive_wrap(relu, chosen, Wrapper)[0]) == {"0"}
    whole, _ = wrap.recursive_wrap(nn.Sequential(nn.ReLU()), wrap.always_wrap_policy, Wrapper)
    assert wrapped_names(whole) == {"", "0.0"}
    with pytest.raises(ValueError, match="recursive_wrap: the module is already a Wrapper"):
        wrap.recursive_wrap(whole, wrap.always_wrap_policy, Wrapper)
