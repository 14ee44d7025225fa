"""A part of PyTorch's operator database that always runs: one sample of each core ATen operator, all mistakes.

The sweep in tests/sweeps compares all operators, more dtypes and gradients.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torch_xla
from xla_core.testing import op_db as compare
from xla_core.testing.against_cpu import assert_same, attempt, copy_to, fallbacks

pytest.importorskip("expecttest", reason="torch's operator database imports it")

from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo

pytestmark = pytest.mark.filterwarnings("ignore")  # the database calls deprecated forms on purpose

# Of every family of lowering rules the operators that training reaches; one program for each family.
FAMILIES = {
    "arithmetic": "add sub mul div pow sqrt rsqrt reciprocal neg abs sign clamp maximum minimum",
    "functions": "exp log log1p expm1 sin cos tanh sigmoid erf floor ceil round trunc where lerp",
    "comparison": "eq ne lt le gt ge isnan isfinite logical_and logical_not bitwise_or isclose",
    "reductions": "sum mean prod amax amin argmax argmin any all var std logsumexp cumsum norm",
    "products": "mm bmm addmm matmul baddbmm einsum dot outer mv tensordot",
    "indexing": "gather scatter scatter_add index_select index_add masked_fill take_along_dim tril",
    "shapes": "cat stack split chunk unbind permute transpose reshape squeeze unsqueeze expand flip "
    "roll narrow select movedim repeat tile",
    "ordering": "sort topk searchsorted bucketize cummax",
    "nn": "nn.functional.conv2d nn.functional.linear nn.functional.layer_norm nn.functional.gelu "
    "nn.functional.group_norm nn.functional.max_pool2d nn.functional.avg_pool2d softmax "
    "nn.functional.cross_entropy nn.functional.embedding nn.functional.silu nn.functional.pad "
    "nn.functional.interpolate nn.functional.mse_loss log_softmax nn.functional.batch_norm",
    "linalg": "linalg.cholesky linalg.inv linalg.det linalg.solve_triangular linalg.matrix_norm",
}


def operators(names: str) -> list[OpInfo]:
    wanted = set(names.split())
    found = [op for op in op_db if op.name in wanted and not op.variant_test_name]
    assert len(found) > 0.7 * len(wanted)  # the database names some of them by variants only
    return found


def call(op: OpInfo, given: tuple[Any, Any, Any], device: str) -> Any:
    source, args, kwargs = copy_to(given, device)
    return op(source, *args, **kwargs)


@pytest.mark.parametrize("family", FAMILIES)
def test_family(family: str) -> None:
    torch.manual_seed(0)
    cases = []
    for op in operators(FAMILIES[family]):
        dtype = torch.float32 if torch.float32 in op.dtypes else torch.int64
        samples = compare.all_samples(op, dtype)
        # Not the first one, which often has no dimensions.
        sample = samples[len(samples) // 2]
        cases.append((op, (sample.input, sample.args, sample.kwargs)))
    with fallbacks() as ran_on_cpu:
        results = [attempt(lambda o=op, g=given: call(o, g, "xla")) for op, given in cases]
        torch_xla.sync()
    for (op, given), result in zip(cases, results, strict=True):
        if result.error is not None:
            raise AssertionError(op.name) from result.error
        assert_same(result.value, call(op, given, "cpu"))
    assert not ran_on_cpu


VALUES_UNSEEN = "whether it is a mistake depends on values, which are not there when it is recorded"
# Operators one of whose mistakes is not refused when it is recorded.
TAKEN = {
    "gather": VALUES_UNSEEN,
    "multinomial": VALUES_UNSEEN,
    "scatter": VALUES_UNSEEN,
    "scatter_add": VALUES_UNSEEN,
}


@pytest.mark.parametrize(
    "op", [o for o in op_db if o.error_inputs_func is not None], ids=compare.name_of
)
def test_mistakes_raise_what_the_cpu_raises_when_they_are_recorded(op: OpInfo) -> None:
    torch.manual_seed(0)
    _, difference = compare.errors_compared(op)
    assert not difference or compare.name_of(op) in TAKEN, difference
