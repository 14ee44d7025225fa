"""The collectives of ``_XLAC`` with their tokens, against numpy; and how its processes meet."""

from __future__ import annotations

import textwrap

import dist_xlac
import numpy as np


def test_collectives_with_tokens(launch):
    found = launch(2, dist_xlac.run_all).join()
    x = [np.arange(8.0, dtype=np.float32).reshape(2, 4) + 10 * r for r in range(2)]
    total, low = x[0] + x[1], x[0]
    whole = np.concatenate(x)
    for rank, got in enumerate(found):
        expected = {
            "all_reduce": total / 2,
            "inplace": np.concatenate([x[1] + 1, x[1] + 2]),
            "gather": whole,
            "gather_out": whole,
            "gather_coalesced": np.concatenate([np.hstack(x), np.hstack(x) + 1]),
            "gather_coalesced_out": np.concatenate([whole, whole + 1]),
            "scatter": total[rank : rank + 1],
            "scatter_out": total[:, 2 * rank : 2 * rank + 2],
            "scatter_coalesced": np.concatenate([2 * total[rank : rank + 1]] * 2),
            "scatter_coalesced_out": np.concatenate(
                [low[rank : rank + 1], low[rank : rank + 1] + 1]
            ),
            "all_to_all": np.concatenate([v[:, 2 * rank : 2 * rank + 2] for v in x]),
            "permute": x[1 - rank],
        }
        assert got.keys() == expected.keys()
        for name, wanted in expected.items():
            np.testing.assert_array_equal(got[name], wanted, err_msg=f"{name} on {rank}")


def test_processes_that_have_met_belong_to_one_job(launch):
    found = launch(2, dist_xlac.meet).join()
    for rank, text in enumerate(found):
        assert f"already number {rank} of 2" in text and "got 0 of 3" in text


ALONE = """
    import torch, torch_xla
    from torch_xla import _XLAC
    _XLAC._ensure_xla_coordinator_initialized(0, 1, "127.0.0.1")
    x = torch.ones(2).to("xla")
    token = _XLAC._get_all_reduce_token("xla:0")
    result, token = _XLAC._xla_reduce_scatter("sum", x, token, 3.0, 0, 1, [], True, None, None)
    assert result.tolist() == [3.0, 3.0]
    for name, call in {
        "collective_permute": lambda: _XLAC._xla_send(x, token, 1),
        "xm.collective_permute": lambda: _XLAC._xla_recv(x, token, 1),
        "before you create the first xla tensor": lambda: _XLAC._ensure_xla_coordinator_initialized(0, 2, "h"),
        "2": lambda: _XLAC._xla_all_gather(x, 0, 2, [], True, None, None),
    }.items():
        try:
            call()
        except (NotImplementedError, RuntimeError, ValueError) as error:
            assert name in str(error), error
        else:
            raise AssertionError(name)
    print("done")
"""


def test_a_process_that_is_alone(run_script):
    ended = run_script(textwrap.dedent(ALONE), 1)
    assert ended.returncode == 0 and "done" in ended.stdout, ended.stderr
