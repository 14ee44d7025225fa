"""torch_xla's small helpers: torch_xla.utils.utils, former names, names of devices and of variables."""

from __future__ import annotations

import importlib
import json
import sys
import types
import warnings
from pathlib import Path

import pytest
import torch

import torch_xla
from torch_xla._internal import c10d_registration
from torch_xla._internal import utils as internal_utils
from torch_xla.core import xla_env_vars
from torch_xla.distributed.fsdp import _init_utils as fsdp_init_utils
from torch_xla.experimental import deprecation
from torch_xla.utils import checkpoint
from torch_xla.utils import utils as xu
from torch_xla.utils.checkpoint_tagger import CheckpointTagger


def test_nested_containers():
    assert xu.shape([[1, 2, 3], [4, 5, 6]]) == [2, 3]
    assert xu.shape([]) == [0]
    assert xu.shape(1) == []
    assert xu.flatten_nested_tuple((1, (2, [3, (4,)]), ())) == (1, 2, 3, 4)
    given = [1]
    assert xu.list_copy_append(given, 2) == [1, 2]
    assert given == [1]


def test_printing_for_debugging(capsys, monkeypatch):
    xu.get_print_fn(False)("unseen")
    xu.get_print_fn(True)("seen")
    monkeypatch.setenv("DEBUG", "1")
    xu.get_print_fn()("seen too")
    assert capsys.readouterr().err.split("\n") == ["seen", "seen too", ""]


def test_cleaner_runs_when_it_is_deleted():
    done = []
    cleaner = xu.Cleaner(lambda: done.append(1))
    assert not done
    del cleaner
    assert done == [1]


def test_a_folder_has_its_name():
    folder = xu.TmpFolder()
    with folder as path:
        assert path == folder.name
        assert Path(path).is_dir()
    assert not Path(path).exists()


def test_former_names_work_and_warn():
    module = types.ModuleType("former")

    def new_name(x):
        return x + 1

    deprecation.register_deprecated(module, new_name)
    with pytest.warns(DeprecationWarning, match=r"former\.new_name is deprecated; use"):
        assert module.new_name(1) == 2
    old = deprecation.deprecated(module, new_name, "old_name", "It is gone in 3.0.")
    with pytest.warns(DeprecationWarning, match=r"former\.old_name .* It is gone in 3\.0\."):
        assert old(2) == 3
    with pytest.warns(DeprecationWarning, match="new_name is deprecated"):
        assert deprecation.mark_deprecated(new_name)(3) == 4
    with warnings.catch_warnings(action="error"):
        assert new_name(4) == 5


def test_names_of_devices():
    assert internal_utils.parse_xla_device("TPU:3") == ("TPU", 3)
    with pytest.raises(RuntimeError, match="'TPU' is not the name"):
        internal_utils.parse_xla_device("TPU")


def test_names_of_variables():
    assert xla_env_vars.TPU_WORKER_ID == "TPU_WORKER_ID"
    assert xla_env_vars.TPU_MESH_CTLER_PORT == "TPU_MESH_CONTROLLER_PORT"
    assert "WORLD_SIZE" in dir(xla_env_vars)
    with pytest.raises(AttributeError, match="NO_SUCH"):
        xla_env_vars.NO_SUCH  # noqa: B018


def test_what_needs_the_runtime_in_cpp_says_what_to_use():
    with pytest.raises(NotImplementedError, match=r"use torch\.distributed\.broadcast"):
        c10d_registration.broadcast_xla(torch.ones(1), 0)

    with pytest.raises(NotImplementedError, match="param_init_fn"):
        fsdp_init_utils._materialize_module(
            torch.nn.Linear(1, 1), None, set(), lambda module: False
        )


@pytest.mark.parametrize("name", ["dynamo_set_buffer_donor", "dynamo_mark_sharding"])
def test_modules_that_register_operators_say_that_they_are_not_needed(name):
    if name == "dynamo_mark_sharding":
        pytest.importorskip("xla_spmd")
    sys.modules.pop(f"torch_xla.experimental.{name}", None)
    with pytest.warns(UserWarning, match="leave this import out"):
        importlib.import_module(f"torch_xla.experimental.{name}")
    assert any(hasattr(torch.ops.xla, operator) for operator in (name, f"{name}_"))


def test_a_checkpoint_is_removed_with_its_last_tag():
    removed = []
    tagger = CheckpointTagger(remover=removed.append)
    tagger.tag("best", "a.pt")
    tagger.tag("last", "a.pt")
    tagger.tag("last", "b.pt")
    assert not removed
    tagger.tag("best", "b.pt")
    assert removed == ["a.pt"]
    tagger.tag("best", "b.pt")
    assert removed == ["a.pt"]
    assert json.loads(tagger.save_to_json()) == {"best": "b.pt", "last": "b.pt"}


def test_modules_under_their_short_names():
    assert torch_xla.xm is torch_xla.core.xla_model
    assert (
        torch_xla.distributed.spmd.xla_sharding.__name__
        == "torch_xla.distributed.spmd.xla_sharding"
    )


def test_recomputation_by_its_class_has_torchs_gradients():
    def part(x, w):
        return torch.tanh(x @ w)

    values = [torch.randn(3, 4), torch.randn(4, 2)]
    grads = []
    for device in ("cpu", "xla"):
        x, w = (v.clone().to(device).requires_grad_() for v in values)
        if device == "xla":
            result = checkpoint.CheckpointFunction.apply(part, True, x, w)
        else:
            result = part(x, w)
        result.square().sum().backward()
        grads.append([x.grad.cpu(), w.grad.cpu()])
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-6)


def test_random_states_of_the_arguments_devices():
    x = torch.ones(2, device="xla")
    devices, states = checkpoint.get_device_states({"x": x}, 3)
    assert devices == [x.device]
    first = torch.rand(4, device="xla").cpu()
    checkpoint.set_device_states(devices, states)
    assert torch.equal(torch.rand(4, device="xla").cpu(), first)
