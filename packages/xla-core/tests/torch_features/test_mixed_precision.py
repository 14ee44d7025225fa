"""``torch.autocast('xla')``, the sync-free optimizers, number formats and matmul precision."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torch_xla
from torch_xla import amp, backends
from torch_xla.amp import syncfree
from xla_core.api import program_report, stablehlo_text
from xla_core.torch_features import autocast as autocast_module

# -- autocast -------------------------------------------------------------------------------------


@pytest.fixture
def x():
    return torch.randn(2, 3, 8, 8, device="xla")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_run_in_the_chosen_dtype(x, dtype):
    weight = torch.randn(4, 3, 3, 3, device="xla")
    with torch.autocast("xla", dtype=dtype):
        assert F.conv2d(x, weight).dtype == dtype
        assert (x @ x).dtype == dtype
        assert F.linear(x, torch.ones(5, 8, device="xla")).dtype == dtype
        assert torch.einsum("bcij,bcjk->bcik", x, x).dtype == dtype
        assert F.max_pool2d(x, 2).dtype == dtype
        assert F.scaled_dot_product_attention(x, x, x).dtype == dtype


def test_losses_and_decompositions_run_in_float32(x):
    half = x.bfloat16()
    labels = torch.zeros(2, dtype=torch.long, device="xla")
    with torch.autocast("xla"):
        assert half.flatten(1).log_softmax(1).dtype == torch.float32
        assert F.cross_entropy(half.flatten(1), labels).dtype == torch.float32
        assert F.mse_loss(half, half).dtype == torch.float32
        assert half.prod().dtype == torch.float32
        assert nn.BatchNorm2d(3).to("xla")(half).dtype == torch.float32
        assert F.pad(half, (1, 1, 1, 1), "reflect").dtype == torch.float32


def test_the_widest_dtype_wins_and_the_rest_is_left_alone(x):
    half = x.bfloat16()
    with torch.autocast("xla"):
        assert torch.cat([half, x]).dtype == torch.float32
        assert torch.cat([half, half]).dtype == torch.bfloat16
        assert torch.stack([x, half]).dtype == torch.float32
        assert (x + half).dtype == torch.float32
        assert x.exp().dtype == torch.float32
        assert half.exp().dtype == torch.bfloat16
        assert (x.double() @ x.double()).dtype == torch.float64
        with torch.autocast("xla", enabled=False):
            assert (x @ x).dtype == torch.float32
    assert (x @ x).dtype == torch.float32


def test_training_under_autocast_is_close_to_float32():
    torch.manual_seed(0)
    cpu = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    model = copy.deepcopy(cpu).to("xla")
    data, labels = torch.randn(12, 8), torch.arange(12) % 3
    with torch.autocast("xla"):
        output = model(data.to("xla"))
        loss = F.cross_entropy(output, labels.to("xla"))
    assert output.dtype == torch.bfloat16
    loss.backward()
    expected = F.cross_entropy(cpu(data), labels)
    expected.backward()
    torch.testing.assert_close(loss.cpu(), expected, rtol=2e-2, atol=0)  # 8 bits of mantissa
    for p, q in zip(model.parameters(), cpu.parameters(), strict=True):
        assert p.grad.dtype == torch.float32
        torch.testing.assert_close(p.grad.cpu(), q.grad, rtol=0.1, atol=2e-3)


def test_torch_xlas_autocast_takes_a_device(x):
    with amp.autocast(torch_xla.device()):
        assert (x @ x).dtype == torch.bfloat16
    with amp.autocast("xla:0", dtype=torch.float16):
        assert (x @ x).dtype == torch.float16
    with amp.autocast(torch_xla.device(), enabled=False):
        assert (x @ x).dtype == torch.float32
    with pytest.raises(ValueError, match=r"got cpu; use torch\.autocast\('cpu'\)"):
        amp.autocast("cpu")


def test_every_listed_operator_exists():
    names = [
        *autocast_module.LOWER_PRECISION,
        *autocast_module.FLOAT32,
        *autocast_module.WIDEST,
    ]
    assert len(names) == len(set(names))
    missing = {n for n in names if not _overload(n)}
    # torch 2.15 has dropped these two, which torch.linalg has under other names
    assert missing in (set(), {"cholesky", "qr"})


def _overload(name):
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)


# -- optimizers -----------------------------------------------------------------------------------

OPTIMIZERS = {
    "sgd": (syncfree.SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adam": (syncfree.Adam, torch.optim.Adam, {"lr": 0.1, "weight_decay": 0.01}),
    "adamw": (syncfree.AdamW, torch.optim.AdamW, {"lr": 0.1}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_syncfree_optimizers_skip_steps_on_the_device(name):
    ours, theirs, options = OPTIMIZERS[name]
    torch.manual_seed(0)
    cpu = nn.Linear(3, 2)
    model = copy.deepcopy(cpu).to("xla")
    mine, reference = ours(model.parameters(), **options), theirs(cpu.parameters(), **options)
    found = [torch.zeros((), device="xla"), torch.ones((), device="xla")]
    torch_xla.sync()
    for skip in (0, 1, 0, 1, 0):
        for m, device in ((model, "xla"), (cpu, "cpu")):
            m.zero_grad()
            m(torch.ones(1, 3, device=device)).square().sum().backward()
        before = sum(p.runs for p in program_report.program_runs())
        mine.step(found_inf=found[skip])
        assert (
            sum(p.runs for p in program_report.program_runs()) == before
        )  # nothing was waited for
        if not skip:
            reference.step()
    torch.testing.assert_close(model.weight.cpu(), cpu.weight)
    calls = []
    mine.register_step_post_hook(lambda *_: calls.append("hook"))
    assert mine.step(lambda: torch.tensor(5.0)).item() == 5
    assert calls == ["hook"]


def test_a_number_as_found_inf_and_torchs_scaler():
    model = nn.Linear(2, 1).to("xla")
    optimizer = syncfree.SGD(model.parameters(), lr=1.0)
    before = model.weight.tolist()
    model(torch.ones(1, 2, device="xla")).sum().backward()
    optimizer.step(found_inf=1.0)
    assert model.weight.tolist() == before
    scaler = torch.amp.GradScaler("xla", init_scale=8.0)
    optimizer.zero_grad()
    scaler.scale(model(torch.full((1, 2), float("inf"), device="xla")).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert model.weight.tolist() == before
    assert scaler.get_scale() == 4.0
    with pytest.warns(DeprecationWarning, match=r"torch\.amp\.GradScaler\('xla'\)"):
        amp.GradScaler()


# -- number formats -------------------------------------------------------------------------------

FORMATS = """
    import torch, torch_xla
    import torch_xla.core.xla_model as xm

    def kept(value):
        t = torch.tensor([value], device="xla") + 0
        torch_xla.sync()
        return str(t._s.buffer.dtype), t.dtype

    single, double = torch.tensor(1.0), torch.tensor(1.0, dtype=torch.float64)
    floats = torch.full((4,), 1.001, device="xla")
    doubles = torch.full((4,), 1.001, dtype=torch.float64, device="xla")
    longs = torch.full((4,), 3, device="xla") * 2
    halves = torch.ones(4, dtype=torch.float16, device="xla")
    model = torch.nn.Linear(4, 4).to("xla")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loss = model(floats).square().mean()
    loss.backward()
    optimizer.step()
    torch_xla.sync()
    assert (floats.dtype, doubles.dtype, longs.dtype) == (torch.float32, torch.float64, torch.int64)
    assert loss.cpu().dtype == model.weight.cpu().dtype == torch.float32
    assert torch.rand(3, device="xla").cpu().unique().numel() > 1
    print(*[t._s.buffer.dtype for t in (floats, doubles, longs, halves, model.weight)])
    print(floats[0].item(), doubles[0].item(), longs[0].item())
"""

DOUBLES = {"float64": "1.001", "float32": "1.0010000467300415", "bfloat16": "1.0"}
BF16_1001 = "1.0"  # the nearest bfloat16 to 1.001


@pytest.mark.parametrize(
    ("environment", "dtypes", "values"),
    [
        ({}, "float32 float64 int64", "1.00100"),
        ({"XLA_USE_BF16": "1"}, "bfloat16 bfloat16 int64", BF16_1001),
        ({"LTC_USE_BF16": "1"}, "bfloat16 bfloat16 int64", BF16_1001),
        ({"XLA_DOWNCAST_BF16": "1"}, "bfloat16 float32 int64", BF16_1001),
        ({"XLA_USE_32BIT_LONG": "1"}, "float32 float64 int32", "1.00100"),
    ],
)
def test_number_formats(run_python, environment, dtypes, values):
    kept, read = run_python(FORMATS, **environment).splitlines()
    assert kept == f"{dtypes} float16 {dtypes.split()[0]}"
    single, double, whole = read.split()
    assert single.startswith(values)
    kept = {"float64": "1.001", "float32": "1.0010000467300415", "bfloat16": "1.0"}
    assert double == kept[dtypes.split()[1]]
    assert whole == "6"


def test_a_wrong_format_is_refused(run_python):
    code = "import torch, torch_xla; torch.ones(1, device='xla').tolist()"
    error = run_python(code, fails=True, XLA_USE_BF16="perhaps")
    assert "XLA_USE_BF16='perhaps' in the environment: expected one of 1, true" in error


# -- precision of matrix products -----------------------------------------------------------------


def test_matmul_precision_is_in_the_program():
    x = torch.ones(4, 4, device="xla")
    assert backends.get_mat_mul_precision() == "default"
    assert "precision = [DEFAULT, DEFAULT]" in stablehlo_text.stablehlo_text([x @ x])
    try:
        backends.set_mat_mul_precision("highest")
        assert backends.get_mat_mul_precision() == "highest"
        assert "precision = [HIGHEST, HIGHEST]" in stablehlo_text.stablehlo_text([x @ x])
    finally:
        backends.set_mat_mul_precision("default")
    with pytest.raises(
        ValueError, match=r"Invalid precision: best\. Must be one of default, high, highest\."
    ):
        backends.set_mat_mul_precision("best")


def test_another_precision_is_another_program(compile_count):
    x = torch.ones(5, 5, device="xla")
    torch_xla.sync()
    (x @ x).tolist()
    before = compile_count()
    try:
        backends.set_mat_mul_precision("high")
        (x @ x).tolist()
        assert compile_count() == before + 1
    finally:
        backends.set_mat_mul_precision("default")
    (x @ x).tolist()
    assert compile_count() == before + 1
