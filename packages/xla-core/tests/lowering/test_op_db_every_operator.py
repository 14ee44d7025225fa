"""One sample of every operator of PyTorch's database in float32, forward and backward, many in one program.

The sweep in tests/sweeps has more samples and dtypes, tools/op_db_report.py has all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import torch_xla
from xla_core.testing import op_db as compare
from xla_core.testing.against_cpu import attempt, fallbacks, forget_pending, gradients

pytest.importorskip("expecttest", reason="torch's operator database imports it")

from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

pytestmark = pytest.mark.filterwarnings("ignore")  # the database calls deprecated forms on purpose

# Neighbours in the database are alike: each group has some of everything.
GROUPS = 32
ABOUT_COMPRESSED_TENSORS = {"sparse.mm.reduce", "sparse.sampled_addmm"}
ON_THE_CPU = {
    "aten::linalg_ldl_factor_ex",
    "aten::linalg_ldl_solve",
    "aten::special_airy_ai",
}


# The first that an operator has; a few attention kernels of other devices have none of them.
DTYPES = (torch.float32, torch.int64, torch.bool, torch.complex64)


def has_gradients(op: OpInfo, dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and op.supports_autograd and op.name not in compare.NO_GRADIENTS


def sample_of(op: OpInfo) -> tuple[SampleInput, torch.dtype]:
    """The second sample, as the first often has no dimensions."""
    dtype = next(d for d in DTYPES if d in op.dtypes)
    torch.manual_seed(0)
    return compare.all_samples(op, dtype, has_gradients(op, dtype), most=2)[-1], dtype


def both_ways(op: OpInfo, sample: SampleInput, device: str) -> tuple[Any, list[Any]]:
    """The operator's results, and the gradients by the operands that require one."""
    given = compare.operands(op, sample, device)
    leaves = torch.utils._pytree.tree_leaves(given)
    wanted = [t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad]
    source, args, kwargs = given
    result = op(source, *args, **kwargs)
    processed = result
    if sample.output_process_fn_grad is not None:
        processed = sample.output_process_fn_grad(result)
    return result, gradients(processed, wanted) if wanted else []


def check(operators: Sequence[OpInfo]) -> None:
    cases = [(op, *sample_of(op)) for op in operators]
    expected = [attempt(lambda o=op, s=sample: both_ways(o, s, "cpu")) for op, sample, _ in cases]
    with fallbacks() as ran_on_cpu:
        got = [attempt(lambda o=op, s=sample: both_ways(o, s, "xla")) for op, sample, _ in cases]
        torch_xla.sync()
    for (op, sample, dtype), e, g in zip(cases, expected, got, strict=True):
        if e.error is not None:
            continue  # PyTorch itself has no gradient, or no kernel for the CPU
        if g.error is not None:
            raise AssertionError(compare.name_of(op)) from g.error
        difference = attempt(
            lambda o=op, s=sample, d=dtype, e=e, g=g: (
                compare.assert_agrees(o, s, d, e.value[0], g.value[0]),
                compare.assert_gradients_agree(o, s, d, e.value[1], g.value[1]),
            )
        ).error
        if difference is not None:
            raise AssertionError(compare.name_of(op)) from difference
    assert ran_on_cpu.keys() <= ON_THE_CPU


@pytest.mark.parametrize("group", range(GROUPS))
def test_values_and_gradients(group: int) -> None:
    computed = [op for op in op_db if any(d in op.dtypes for d in DTYPES)]
    dense = [op for op in computed if compare.name_of(op) not in ABOUT_COMPRESSED_TENSORS]
    try:
        check(dense[group::GROUPS])
    finally:
        forget_pending()


@pytest.mark.parametrize("name", sorted(ABOUT_COMPRESSED_TENSORS))
def test_compressed_sparse_tensors_are_refused(name: str) -> None:
    op = next(op for op in op_db if compare.name_of(op) == name)
    sample, _ = sample_of(op)
    with pytest.raises(NotImplementedError):
        compare.call(op, sample, "xla")
