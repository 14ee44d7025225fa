"""A user's own Pallas kernels: interpreted here, compiled to a form for TPUs that needs none."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import pytest
import torch
from jax.experimental import pallas as pl

from torch_xla import _XLAC
from torch_xla.experimental import custom_kernel as ck
from xla_core.support import counters


def add(x, y):
    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = x_ref[...] + y_ref[...]

    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x, y)


def scaled_rows(x, factor, *, block):
    """Two results of blocks of rows: the rows by a factor, and their sums."""

    def kernel(x_ref, scaled_ref, sums_ref):
        scaled_ref[...] = x_ref[...] * factor
        sums_ref[...] = x_ref[...].sum(axis=1, keepdims=True)

    rows, columns = x.shape
    return pl.pallas_call(
        kernel,
        grid=(rows // block,),
        in_specs=[pl.BlockSpec((block, columns), lambda i: (i, 0))],
        out_specs=[
            pl.BlockSpec((block, columns), lambda i: (i, 0)),
            pl.BlockSpec((block, 1), lambda i: (i, 0)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct((rows, 1), x.dtype),
        ],
    )(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.int64])
def test_kernel_is_an_operation(dtype, compile_count):
    kernel = ck.make_kernel_from_pallas(add, lambda x, y: [(x.shape, x.dtype)])
    x = torch.arange(8).to(dtype)
    before = compile_count()
    for step in range(3):
        found = kernel(x.to("xla"), (x + step).to("xla")) * 2
        assert found.dtype is dtype
        torch.testing.assert_close(found.cpu(), (x + x + step) * 2)
    assert compile_count() == before + 1


def test_kernel_with_constants_and_several_results():
    kernel = ck.make_kernel_from_pallas(
        scaled_rows, lambda x, factor: [(x.shape, x.dtype), ((x.shape[0], 1), torch.float64)]
    )
    x = torch.randn(8, 16)
    scaled, sums = kernel(x.to("xla"), 3.0, block=4, static_argnames=["block"])
    torch.testing.assert_close(scaled.cpu(), x * 3)
    # promised as float64; 16 terms in another order
    torch.testing.assert_close(sums.cpu(), x.sum(1, keepdim=True).double(), rtol=1e-5, atol=1e-5)


def test_results_have_to_be_as_promised():
    x = torch.ones(8, device="xla")
    with pytest.raises(
        ValueError, match=r"kernel add returns arrays of shapes \[\(8,\)\], .* \[\(4,\)\]"
    ):
        ck.make_kernel_from_pallas(add, lambda x, y: [((4,), x.dtype)])(x, x)
    with pytest.raises(ValueError, match=r"must return a list of \(shape, dtype\)"):
        ck.make_kernel_from_pallas(add, lambda x, y: (x.shape, x.dtype))(x, x)


def test_kernel_is_compiled_for_a_tpu_that_is_not_here():
    x = torch.ones(8, 128, device="xla")
    payload, tensors = ck.trace_pallas(add, x, x, use_cache=True)
    assert tensors[0] is x and tensors[1] is x
    assert json.loads(payload)["custom_call_config"]["body"]
    before = counters.all_counters().get("trace_pallas_cache_hit", 0)
    assert ck.trace_pallas(add, x, x, use_cache=True)[0] is payload
    assert counters.all_counters()["trace_pallas_cache_hit"] == before + 1
    with pytest.raises(RuntimeError, match="runs on TPUs only, and this device is cpu"):
        _XLAC._xla_tpu_custom_call([x, x], payload, [x.shape], [x.dtype])


def test_payloads_are_kept_for_their_constants_and_places_of_tensors():
    def kernel(x, y, by=1.0):
        def write(x_ref, o_ref):
            o_ref[...] = x_ref[...] * by if y is None else x_ref[...] + by

        one = y if x is None else x
        return pl.pallas_call(write, out_shape=jax.ShapeDtypeStruct(one.shape, one.dtype))(one)

    x = torch.ones(8, 128, dtype=torch.int32)
    calls = [((x, None), 1), ((None, x), 1), ((x, 0), 1), ((x, None), True), ((x, None), 2)]
    for _ in range(2):
        kept = [ck.trace_pallas(kernel, *args, by=by, use_cache=True)[0] for args, by in calls]
        assert kept == [ck.trace_pallas(kernel, *args, by=by)[0] for args, by in calls]
    assert len(set(kept)) > 2


def test_function_without_a_kernel_has_no_compiled_form():
    with pytest.raises(ValueError, match="no_kernel calls no Pallas kernel"):
        ck.trace_pallas(no_kernel, torch.ones(8, device="xla"))


def no_kernel(x):
    return x + 1


def test_dtypes_of_jax():
    assert ck.convert_torch_dtype_to_jax(torch.bfloat16) is jnp.bfloat16
    assert ck.convert_torch_dtype_to_jax(torch.bool) is jnp.bool_
    assert ck.convert_torch_dtype_to_jax(torch.float8_e5m2) is jnp.float8_e5m2
    with pytest.raises(ValueError, match=r"Unsupported dtype: torch\.complex32"):
        ck.convert_torch_dtype_to_jax(torch.complex32)
