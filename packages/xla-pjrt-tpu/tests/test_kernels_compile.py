"""Kernels for TPUs compiled with the real compiler, on a machine that has none."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from xla_core.contract.device_protocol import ArraySpec, Topology
from xla_core.support import counters
from xla_core.testing.internals import (
    flash_attention,
    grouped_matmul,
    lowering_for,
    paged_attention,
    target_of,
)
from xla_core.testing.internals import splash_attention as splash
from xla_core.testing.jax_state import backends_started
from xla_core.testing.programs import make_program
from xla_pjrt_tpu import create_client, libtpu

pytestmark = pytest.mark.skipif(
    libtpu.find_library({}) is None,
    reason="libtpu is not installed: its wheels are for Linux on x86-64 and CPython 3.11 to 3.14",
)
TOPOLOGIES = ("v5e:2x2", "v5p:2x2x2")
F32, BF16, I32, I64 = (np.dtype(d) for d in (np.float32, jnp.bfloat16, np.int32, np.int64))
BLOCKS = list(flash_attention.FlashAttention.DEFAULT_BLOCK_SIZES.values())
SPLASH = splash.SplashAttentionConfig()


def flash(q, k, v, ids, other):
    """Forward and backward of 300 positions, which are no whole blocks."""
    numbers = (True, 0.1, BLOCKS)
    o, logs = flash_attention.forward(q, k, v, None, ids, other, *numbers)
    operands = (o, q, k, v, None, ids, other, o, logs)
    return o, *flash_attention.backward(*operands, *numbers, False)[:3]


def flash_with_bias(q, k, v, ab):
    numbers = (False, 1.0, BLOCKS)
    o, logs = flash_attention.forward(q, k, v, ab, None, None, *numbers)
    operands = (o, q, k, v, ab, None, None, o, logs)
    return o, *flash_attention.backward(*operands, *numbers, True)


def splash_both(config):
    def both(q, k, v, ids):
        rest = (ids, config.to_json(), True, 30.0)
        o = splash.forward(q, k, v, *rest)
        return o, *splash.backward(o, q, k, v, *rest)

    return both


def products(lhs, rhs, right, sizes):
    by_rows = grouped_matmul.lower_gmm(lhs, rhs, sizes)
    return by_rows, grouped_matmul.lower_tgmm(lhs.T, right, sizes, (512, 512, 512), jnp.int32(1), 2)


def heads(length, dtype, size=128, count=4):
    return ArraySpec((2, count, length, size), np.dtype(dtype))


def ids(length):
    return ArraySpec((2, length), I64)


def arrays(*described):
    return [ArraySpec(shape, dtype) for shape, dtype in described]


# what is compiled, with which operands, and how many kernels there are in it
CASES = {
    "flash": (flash, [heads(300, F32, 64), *[heads(512, F32, 64)] * 2, ids(300), ids(512)], 3),
    "flash bf16": (flash_with_bias, [*[heads(1024, BF16)] * 3, ArraySpec((2, 4, 1024, 1024), BF16)], 3),
    # its backward pass computes the forward again
    "splash": (splash_both(SPLASH), [*[heads(300, F32)] * 3, ids(300)], 3),
    "splash window": (
        splash_both(splash.SplashAttentionConfig(
            sa_use_fused_bwd_kernel=False, attentiontype_local_sliding=True, slide_window_size=100,
            sa_block_q_dkv=512, sa_block_kv_dkv=512,  # 1024 need more fast memory than a kernel gets
        )),
        [*[heads(1024, BF16)] * 3, ids(1024)],
        4,
    ),
    "paged": (
        lambda *operands: paged_attention.lower_paged(*operands, 4, None, 30.0),
        arrays(((4, 8, 128), F32), *[((2, 64, 16, 128), F32)] * 2, ((4,), I64), ((4, 16), I64)),
        1,
    ),
    "ragged": (
        paged_attention.lower_ragged,
        arrays(
            ((100, 8, 128), BF16), ((64, 16, 4, 128), BF16),
            ((8,), I64), ((8, 8), I64), ((9,), I64), ((1,), I64),
        ),
        1,
    ),
    "grouped": (
        products,
        arrays(((500, 256), BF16), ((4, 256, 384), BF16), ((500, 384), BF16), ((4,), I64)),
        2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("case", CASES)
def test_kernels_compile(case, topology):
    function, operands, kernels = CASES[case]
    client = create_client(Topology(), {"XLA_AOT_TOPOLOGY": topology})
    before = backends_started()
    with lowering_for(target_of(client.local_devices()[0])):
        program = make_program(client, function, operands)
    hlo = client.compile(program).optimized_hlo()
    assert hlo.count('custom_call_target="tpu_custom_call"') == kernels
    # jax's own client would take the chips
    assert backends_started() == before


def test_shapes_that_no_kernel_takes_compile_too():
    client = create_client(Topology(), {"XLA_AOT_TOPOLOGY": TOPOLOGIES[0]})
    operands = [heads(100, np.float16), *[heads(100, np.float16)] * 2]
    numbers = (None, None, None, True, 0.1, BLOCKS)
    before = counters.all_counters().get("PlainKernel::flash_attention", 0)
    with lowering_for(target_of(client.local_devices()[0])):
        program = make_program(
            client, lambda *given: flash_attention.forward(*given, *numbers), operands
        )
    assert "tpu_custom_call" not in client.compile(program).optimized_hlo()
    assert counters.all_counters()["PlainKernel::flash_attention"] > before


SCRIPT = """
import jax, torch, torch_xla
from jax.experimental import pallas as pl
from torch_xla import _XLAC
from torch_xla.experimental import custom_kernel as ck
from xla_core.testing.jax_state import backends_started
from xla_core.extension_api.programs import all_programs

def add(x, y):
    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = x_ref[...] + y_ref[...]
    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x, y)

def kernels():
    torch_xla.sync()
    return all_programs()[-1].executable.optimized_hlo().count('"tpu_custom_call"')

qkv = torch.nn.Linear(128, 3 * 128).to("xla")
x = torch.randn(2, 256, 128).to("xla")
q, k, v = (p.unflatten(2, (2, 64)).transpose(1, 2) for p in qkv(x).chunk(3, dim=2))
ck.flash_attention(q, k, v, causal=True).sum().backward()
print("flash", kernels())
y = ck.make_kernel_from_pallas(add, lambda x, y: [(x.shape, x.dtype)])(x, x)
print("own", kernels())
payload, tensors = ck.trace_pallas(add, x, x)
z = _XLAC._xla_tpu_custom_call(tensors, payload, [x.shape], [x.dtype])
print("payload", kernels(), z[0].shape == x.shape)
print("jax", backends_started())
"""


SPLIT = """
import numpy as np, torch, torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch_xla.experimental.custom_kernel import flash_attention
from xla_core.extension_api.programs import all_programs
xr.use_spmd()
mesh = xs.Mesh(np.arange(4), (2, 2), ("data", "model"))
q, k, v = (torch.randn(4, 4, 256, 64).to("xla").requires_grad_() for _ in range(3))
spec = ("data", "model", None, None)
for t in (q, k, v):
    xs.mark_sharding(t, mesh, spec)

for partition_spec in (spec, None):
    flash_attention(q, k, v, causal=True, partition_spec=partition_spec, mesh=mesh).sum().backward()
    torch_xla.sync()
    hlo = all_programs()[-1].executable.optimized_hlo()
    calls = [line for line in hlo.splitlines() if 'custom_call_target="tpu_custom_call"' in line]
    shape = "f32[2,2,256,64]" if partition_spec else "f32[4,4,256,64]"
    print(len(calls), all(shape in line for line in calls))
"""


@pytest.fixture
def printed(run_on_tpu):
    """The lines that a script printed, run for the topology."""

    def run(script):
        done = run_on_tpu(script, XLA_AOT_TOPOLOGY=TOPOLOGIES[0])
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return run


def test_kernels_in_a_script(printed):
    assert printed(SCRIPT) == ["flash 3", "own 1", "payload 1 True", "jax ()"]


def test_kernels_over_a_mesh(printed):
    """With a partition spec each chip has its batches and heads, without it all of them."""
    assert printed(SPLIT) == ["3 True", "3 True"]
