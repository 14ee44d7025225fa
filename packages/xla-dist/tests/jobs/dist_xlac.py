"""The collectives of ``_XLAC`` on one replica of a job."""

from __future__ import annotations

import torch

import torch_xla
from torch_xla import _XLAC


def run_all(ordinal):
    """What every function gives for rows ``10 * ordinal + 0 .. 7``, as numpy arrays."""
    device = "xla:0"
    x = (torch.arange(8.0).reshape(2, 4) + 10 * ordinal).to(device)
    token = _XLAC._get_all_reduce_token(device)
    assert isinstance(token, _XLAC.IrValue)
    found = {}
    found["all_reduce"] = _XLAC._xla_all_reduce("sum", x, 0.5, [], True)
    inplace = [x + 1, x + 2]
    _XLAC._xla_all_reduce_inplace("max", inplace, 1.0, [], True)
    found["inplace"] = torch.cat(inplace)
    found["gather"] = _XLAC._xla_all_gather(x, 0, 2, [[0, 1]], True, None, None)
    out = torch.zeros(4, 4, device=device)
    token = _XLAC._xla_all_gather_out(out, x, token, 0, 2, [], True)
    found["gather_out"] = out
    *both, token = _XLAC._xla_all_gather_coalesced([x, x + 1], token, 1, 2, [], True)
    found["gather_coalesced"] = torch.cat(both)
    outs = [torch.zeros(4, 4, device=device), torch.zeros(4, 4, device=device)]
    token = _XLAC._xla_all_gather_coalesced_out(outs, [x, x + 1], token, 0, 2, [], True)
    found["gather_coalesced_out"] = torch.cat(outs)
    part, token = _XLAC._xla_reduce_scatter("sum", x, token, 1.0, 0, 2, [], True, None, None)
    found["scatter"] = part
    out = torch.zeros(2, 2, device=device)
    token = _XLAC._xla_reduce_scatter_out("sum", out, x, token, 1.0, 1, 2, [], True)
    found["scatter_out"] = out
    *both, token = _XLAC._xla_reduce_scatter_coalesced("sum", [x, x], token, 2.0, 0, 2, [], True)
    found["scatter_coalesced"] = torch.cat(both)
    outs = [torch.zeros(1, 4, device=device), torch.zeros(1, 4, device=device)]
    token = _XLAC._xla_reduce_scatter_coalesced_out(
        "min", outs, [x, x + 1], token, 1.0, 0, 2, [], True
    )
    found["scatter_coalesced_out"] = torch.cat(outs)
    found["all_to_all"], token = _XLAC._xla_all_to_all(x, token, 1, 0, 2, [], True)
    found["permute"], token = _XLAC._xla_collective_permute(x, token, [[0, 1], [1, 0]])
    _XLAC._set_all_reduce_token(device, token)
    torch_xla.sync()
    return {name: value.cpu().numpy() for name, value in found.items()}


def meet(ordinal):
    """Meeting the others twice is meeting them once; another job is refused."""
    _XLAC._ensure_xla_coordinator_initialized(ordinal, 2, "127.0.0.1")
    try:
        _XLAC._ensure_xla_coordinator_initialized(0, 3, "127.0.0.1")
    except RuntimeError as error:
        return str(error)
    return ""
