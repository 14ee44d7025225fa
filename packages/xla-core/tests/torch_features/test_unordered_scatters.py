"""A device that adds in any order refuses those operators among deterministic algorithms, as PyTorch's GPUs do."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from xla_core.contract.device_protocol import Capabilities
from xla_core.execution import runtime
from xla_core.recording import xla_tensor
from xla_core.torch_features import unordered_scatters


@pytest.fixture
def unordered():
    """This process's device, as if it said so when it started."""
    torch.zeros(1, device="xla")
    tables = xla_tensor._chosen, xla_tensor._plain, xla_tensor.handlers
    former = [dict(table) for table in tables]
    unordered_scatters.attend(runtime.client())
    assert list(tables) == former  # this one adds in order
    client = SimpleNamespace(capabilities=Capabilities(unordered_scatter=True))
    unordered_scatters.attend(client)
    yield
    torch.use_deterministic_algorithms(False)
    for table, entries in zip(tables, former, strict=True):
        table.clear()
        table.update(entries)


def _ids(*values):
    return torch.tensor(values).to("xla")


def _leaf(*shape):
    return torch.ones(shape).to("xla").requires_grad_()


REFUSED = {
    "index_add": lambda: _leaf(5).index_add(0, _ids(0, 0), _leaf(2)),
    "scatter_add_": lambda: torch.ones(5, device="xla").scatter_add_(
        0, _ids(0, 0), _leaf(2).detach()
    ),
    "index_put_": lambda: torch.ones(5, device="xla").index_put_(
        (_ids(0, 0),), torch.ones(2, device="xla"), accumulate=True
    ),
    "scatter_reduce": lambda: _leaf(5).scatter_reduce(0, _ids(0, 0), _leaf(2), "mean"),
    "bincount": lambda: torch.bincount(_ids(0, 0), torch.ones(2, device="xla")),
    "embedding_dense_backward": lambda: (
        torch.nn.functional.embedding(_ids(0, 0), _leaf(3, 2)).sum().backward()
    ),
}
ALLOWED = {
    "index_put_": lambda: torch.ones(5, device="xla").index_put_(
        (_ids(0, 1),), torch.ones(2, device="xla")
    ),
    "scatter_reduce": lambda: (
        _leaf(5).detach().scatter_reduce(0, _ids(0, 0), _leaf(2).detach(), "amax")
    ),
    "bincount": lambda: torch.bincount(_ids(0, 0)),
    "cumsum": lambda: _leaf(5).cumsum(0),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_adds_in_any_order_is_refused(unordered, name):
    REFUSED[name]()  # nobody asks
    torch.use_deterministic_algorithms(True)
    with pytest.raises(RuntimeError, match=f"^{name} does not have a deterministic implementation"):
        REFUSED[name]()
    torch.use_deterministic_algorithms(True, warn_only=True)
    with pytest.warns(UserWarning, match=f"^{name} does not have a deterministic implementation"):
        REFUSED[name]()


@pytest.mark.parametrize("name", ALLOWED)
def test_what_adds_nothing_is_not(unordered, name):
    torch.use_deterministic_algorithms(True)
    ALLOWED[name]().cpu()
