"""Every operator of PyTorch's own operator database, on ``xla`` against the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_xla
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

from xla_core.testing.against_cpu import assert_same, attempt, copy_to, fallbacks, gradients

pytestmark = [
    pytest.mark.sweep,
    # The database itself calls deprecated forms, and fallbacks warn; both are checked otherwise.
    pytest.mark.filterwarnings("ignore"),
]

DTYPES = (torch.float32, torch.int64, torch.bool, torch.bfloat16)
# Programs are compiled for each operator: few samples, spread over the database's list of them.
SAMPLES = {torch.float32: 8}
SAMPLES_OTHERWISE = 4


def name_of(op: OpInfo) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def chosen(op: OpInfo, dtype: torch.dtype, requires_grad: bool = False) -> list[SampleInput]:
    torch.manual_seed(0)
    found = list(op.sample_inputs("cpu", dtype, requires_grad=requires_grad))
    limit = SAMPLES.get(dtype, SAMPLES_OTHERWISE)
    step = max(1, -(-len(found) // limit))
    return found[::step]


def call(op: OpInfo, sample: SampleInput, device: str) -> Any:
    source, args, kwargs = copy_to((sample.input, sample.args, sample.kwargs), device)
    return op(source, *args, **kwargs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", op_db, ids=name_of)
def test_values(op: OpInfo, dtype: torch.dtype) -> None:
    if dtype not in op.dtypes:
        pytest.skip("the CPU has no such kernel")
    samples = chosen(op, dtype)
    with fallbacks() as ran_on_cpu:
        expected = [attempt(lambda s=s: call(op, s, "cpu")) for s in samples]
        got = [attempt(lambda s=s: call(op, s, "xla")) for s in samples]
        torch_xla.sync()
    for sample, e, g in zip(samples, expected, got, strict=True):
        if e.error is not None:
            assert g.error is not None, f"{sample}: CPU raised {e.error!r}"
            continue
        if g.error is not None:
            raise g.error
        assert_same(g.value, e.value)
    assert not ran_on_cpu, f"FB {ran_on_cpu}"


@pytest.mark.parametrize("op", op_db, ids=name_of)
def test_gradients(op: OpInfo) -> None:
    if torch.float32 not in op.dtypes or not op.supports_autograd:
        pytest.skip("not differentiable")
    samples = chosen(op, torch.float32, requires_grad=True)
    pairs = []
    with fallbacks() as ran_on_cpu:
        for sample in samples:
            pair = []
            for device in ("cpu", "xla"):
                source, args, kwargs = copy_to((sample.input, sample.args, sample.kwargs), device)
                inputs = [t for t in torch.utils._pytree.tree_leaves((source, args, kwargs)) if isinstance(t, torch.Tensor) and t.requires_grad]

                def backward():
                    out = op(source, *args, **kwargs)
                    if sample.output_process_fn_grad is not None:
                        out = sample.output_process_fn_grad(out)
                    return gradients(out, inputs)

                pair.append(attempt(backward))
            pairs.append((sample, *pair))
        torch_xla.sync()
    for sample, e, g in pairs:
        if e.error is not None:
            assert g.error is not None, f"{sample}: CPU raised {e.error!r}"
            continue
        if g.error is not None:
            raise g.error
        assert [x is None for x in g.value] == [x is None for x in e.value]
        assert_same(g.value, e.value)
    assert not ran_on_cpu, f"FB {ran_on_cpu}"


@pytest.mark.parametrize("op", [o for o in op_db if o.error_inputs_func is not None], ids=name_of)
def test_errors(op: OpInfo) -> None:
    torch.manual_seed(0)
    for error in op.error_inputs("cpu"):
        sample = error.sample_input
        expected = attempt(lambda s=sample: call(op, s, "cpu")).error
        if expected is None:
            continue
        def run(s=sample):
            out = call(op, s, "xla")
            torch_xla.sync()
            return out
        got = attempt(run).error
        assert got is not None, f"no error; CPU: {expected!r}"
        assert isinstance(got, type(expected)), f"{got!r}; CPU: {expected!r}"
