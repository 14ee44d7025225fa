"""Models as StableHLO (``torch_xla.stablehlo``): what is saved, loaded and run is what PyTorch computes."""

from __future__ import annotations

import functools
import json

import numpy as np
import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import torch_xla
from torch_xla import stablehlo
from torch_xla.experimental.stablehlo_custom_call import stablehlo_custom_call
from torch_xla.stablehlo import (
    InputLocation,
    StableHLOExportOptions,
    StableHLOGraphModule,
    VariableType,
    exported_program_to_stablehlo,
    save_as_stablehlo,
    save_torch_model_as_stablehlo,
)
from xla_core.operators.run_rule import LoweringError

# torch.export warns of the list of weights that nn.LSTM keeps beside its parameters
pytestmark = pytest.mark.filterwarnings("ignore:The tensor attributes? .*_flat_weights:UserWarning")


# In torch 2.11 run_decompositions() itself gives the state of an LSTM a dimension too many.
lstm = functools.partial(
    pytest.param,
    id="lstm",
    marks=pytest.mark.skipif(
        torch.__version__.startswith("2.11."), reason="PyTorch's own results differ"
    ),
)


def test_a_model_saved_without_text_leaves_none_of_the_former_model(tmp_path):
    exported = torch.export.export(nn.Linear(2, 2), (torch.ones(1, 2),))
    save_as_stablehlo(exported, tmp_path)
    save_as_stablehlo(exported, tmp_path, StableHLOExportOptions(include_human_readable_text=False))
    assert StableHLOGraphModule.load(tmp_path).get_stablehlo_text() is None


class ResNet(nn.Module):
    """A stem, one block that keeps the size and one that halves it, a head."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8))
        self.first, self.second = self.block(8, 8, 1), self.block(8, 16, 2)
        self.shortcut = nn.Conv2d(8, 16, 1, 2, bias=False)
        self.head = nn.Linear(16, 5)

    def block(self, into, out, stride):
        return nn.Sequential(
            nn.Conv2d(into, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU(),
            nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.stem(x)), 3, 2, 1)
        x = F.relu(self.first(x) + x)
        x = F.relu(self.second(x) + self.shortcut(x))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class GPT(nn.Module):
    """Embeddings, two causal blocks, a head."""

    def __init__(self, width=16, heads=2):
        super().__init__()
        self.heads = heads
        self.tokens, self.places = nn.Embedding(30, width), nn.Embedding(64, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "before": nn.LayerNorm(width), "mix": nn.Linear(width, 3 * width),
                    "after": nn.LayerNorm(width), "up": nn.Linear(width, 4 * width),
                    "down": nn.Linear(4 * width, width),
                }
            )
            for _ in range(2)
        )  # fmt: skip
        self.head = nn.Linear(width, 30, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            b, t, d = x.shape
            parts = block["mix"](block["before"](x)).split(d, -1)
            q, k, v = [p.view(b, t, self.heads, -1).transpose(1, 2) for p in parts]
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + attended.transpose(1, 2).reshape(b, t, d)
            x = x + block["down"](F.gelu(block["up"](block["after"](x))))
        return self.head(x)


class Recurrent(nn.Module):
    """Two bidirectional LSTM layers, of which outputs and state are returned."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(5, 6, 2, batch_first=True, bidirectional=True)

    def forward(self, x):
        out, (hidden, cell) = self.lstm(x)
        return {"out": out, "state": (hidden, cell)}


class Counting(nn.Module):
    """Writes to a buffer, takes a keyword, returns several tensors and None."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("shift", torch.arange(3.0), persistent=False)

    def forward(self, x, *, scale):
        self.calls.add_(1)
        return {"y": self.linear(x) * self.calls * 2.5, "rest": (scale + self.shift, None)}


class Calls(nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def images(count):
    return (torch.randn(count, 3, 16, 16),)


def sentences(count, length):
    return (torch.randint(0, 30, (count, length)),)


def sequences(count):
    return (torch.randn(count, 4, 5),)


def export(model, args, kwargs=None, dynamic_shapes=None, **options):
    exported = torch.export.export(model.eval(), args, kwargs, dynamic_shapes=dynamic_shapes)
    return exported_program_to_stablehlo(exported, StableHLOExportOptions(**options))


def assert_same(got, wanted):
    assert pytree.tree_structure(got) == pytree.tree_structure(wanted)
    for g, w in zip(pytree.tree_leaves(got), pytree.tree_leaves(wanted), strict=True):
        if isinstance(w, torch.Tensor):
            assert g.device.type == "xla"
            # the CPU sums in another order
            torch.testing.assert_close(g.cpu(), w, rtol=1e-4, atol=1e-5)
        else:
            assert g == w


@pytest.mark.parametrize(
    ("model", "args"),
    [
        pytest.param(ResNet(), images(2), id="resnet"),
        pytest.param(GPT(), sentences(2, 8), id="gpt"),
        lstm(Recurrent(), sequences(3)),
    ],
)
def test_a_saved_model_computes_what_pytorch_does(tmp_path, model, args):
    model.eval()
    save_torch_model_as_stablehlo(model, args, tmp_path / "model")
    loaded = StableHLOGraphModule.load(tmp_path / "model")
    with torch.no_grad():
        assert_same(loaded(*args), model(*args))


BATCH = Dim("batch", max=32)
LENGTH = Dim("length", min=2, max=60)


@pytest.mark.parametrize(
    ("model", "make", "dynamic", "sizes"),
    [
        pytest.param(ResNet(), images, ({0: BATCH},), [(2,), (1,), (5,)], id="resnet"),
        pytest.param(GPT(), sentences, ({0: BATCH, 1: LENGTH},), [(2, 8), (3, 11)], id="gpt"),
        lstm(Recurrent(), sequences, ({0: BATCH},), [(3,), (4,)]),
    ],
)
def test_one_program_serves_dynamic_sizes(tmp_path, model, make, dynamic, sizes):
    made = export(model, make(*sizes[0]), dynamic_shapes=dynamic)
    made.save(tmp_path)
    loaded = StableHLOGraphModule.load(tmp_path)
    assert "tensor<?x" in loaded.get_stablehlo_text()
    for size in sizes:
        args = make(*size)
        with torch.no_grad():
            assert_same(loaded(*args), model(*args))


SYMBOLIC = {
    "slice": lambda x: x[1:-1],
    "mean": lambda x: (x.mean(0), x.std(), x.var(0)),
    "scaled": lambda x: x / x.shape[0] ** 0.5,
    "arange": lambda x: torch.arange(x.shape[0]) + x.shape[0] // 2,
    "chunk": lambda x: x.chunk(2, 1),
    "topk": lambda x: tuple(x.topk(2, 1)),
    "sort": lambda x: x.argsort(0),
    "roll": lambda x: x.roll(1, 0),  # its lowering calls one function with several symbolic numbers
    "gram": lambda x: torch.tril(x @ x.t()),
    "index_add": lambda x: torch.zeros_like(x).index_add(0, torch.arange(x.shape[0]), x),
    "cross_entropy": lambda x: F.cross_entropy(x, x.argmax(1)),
    "size": lambda x: (x + 1, x.shape[0] * 2),
    "flat": lambda x: x.flatten().reshape(-1, 2, 2),
}


@pytest.mark.parametrize("name", SYMBOLIC)
def test_operators_with_symbolic_sizes(name):
    model = Calls(SYMBOLIC[name])
    made = export(model, (torch.randn(6, 4),), dynamic_shapes=(({0: Dim("n", min=4, max=99)},),))
    for size in (6, 9):
        x = torch.randn(size, 4)
        # numbers come back as tensors
        wanted = pytree.tree_map_only(int, torch.tensor, model(x))
        assert_same(made(x), wanted)


def test_sizes_that_the_export_excludes_are_refused():
    made = export(nn.Linear(4, 3), (torch.randn(2, 4),), dynamic_shapes=({0: Dim("n", max=8)},))
    with pytest.raises(ValueError, match=r"do not fit what the program was exported for.* <= 8"):
        made(torch.randn(9, 4))
    with pytest.raises(TypeError, match=r"argument 0 is float32\[2, 5\].*float32\[\?, 4\]"):
        made(torch.randn(2, 5))


def test_keywords_buffers_and_none_among_results():
    model = Counting()
    x, scale = torch.randn(2, 4), torch.randn(3)
    made = export(model, (x,), {"scale": scale})
    for _ in range(2):  # each call begins with the buffer as it was saved
        model.calls.zero_()
        with torch.no_grad():
            assert_same(made(x, scale=scale), model(x, scale=scale))
    with pytest.raises(TypeError, match=r"keyword arguments \['scale'\], got \['size'\]"):
        made(x, size=scale)
    with pytest.raises(TypeError, match=r"exported with 2 arguments .* got 3"):
        made(x, x, scale=scale)


def test_new_values_of_buffers_are_results_if_wanted(tmp_path):
    x, scale = torch.randn(2, 4), torch.randn(3)
    made = export(Counting(), (x,), {"scale": scale}, return_mutations=True)
    made.save(tmp_path)
    result, written = StableHLOGraphModule.load(tmp_path)(x, scale=scale)
    assert result["rest"][1] is None
    assert {name: float(value) for name, value in written.items()} == {"calls": 1.0}


def test_the_directory_is_torch_xlas(tmp_path):
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    exported = torch.export.export(model, (torch.randn(2, 4),))
    save_as_stablehlo(exported, tmp_path, StableHLOExportOptions(inline_all_constant=False))
    files = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}
    weights = {f"data/{name}" for name in model.state_dict()}
    assert files == weights | {f"functions/forward.{e}" for e in ("meta", "bytecode", "mlir")}
    np.testing.assert_array_equal(np.load(tmp_path / "data/1.bias"), model[1].bias.detach())
    meta = json.loads((tmp_path / "functions/forward.meta").read_text())
    # exactly these: torch_xla recognises the objects by their sets of names
    assert set(meta) == {
        "name", "stablehlo_version", "input_signature", "output_signature", "input_locations",
        "unused_inputs", "input_pytree_spec", "output_pytree_spec",
    }  # fmt: skip
    assert meta["input_locations"][0] == {"type_": "parameter", "position": -1, "name": "0.weight"}
    assert meta["input_locations"][-1] == {"type_": "input_arg", "position": 0, "name": ""}
    assert meta["output_signature"] == [{"shape": [2, 2], "dtype": "float32", "dynamic_dims": []}]
    portable = f"StableHLO_v{meta['stablehlo_version']}\0".encode()
    assert portable in (tmp_path / "functions/forward.bytecode").read_bytes()[:32]


def test_a_model_can_be_exported_without_its_weights(tmp_path):
    model = nn.Linear(4, 3)
    x = torch.randn(2, 4)
    bare = export(model, (x,), export_weights=False, include_human_readable_text=False)
    assert bare._bundle.state_dict == {}
    assert bare.get_stablehlo_text() is None
    export(model, (x,)).save(tmp_path, StableHLOExportOptions(save_weights=False))
    loaded = StableHLOGraphModule.load(tmp_path)
    with pytest.raises(ValueError, match="weight 'weight' is not in this bundle"):
        loaded(x)
    loaded._bundle.state_dict.update({k: v.numpy() for k, v in model.state_dict().items()})
    assert_same(loaded(x), model(x).detach())


def test_constants_become_arguments_if_wanted(tmp_path):
    made = export(Calls(lambda x: (x + 1) * 2.5), (torch.ones(3),), inline_all_constant=False)
    (function,) = made._bundle.stablehlo_funcs
    assert function.meta.input_locations[-1] == InputLocation.constant(0)
    assert [float(a) for a in made._bundle.additional_constants] == [2.5]
    made.save(tmp_path)
    np.save(tmp_path / "constants/0", np.float64(4.0))
    (tmp_path / "constants/0.npy").rename(tmp_path / "constants/0")
    assert_same(StableHLOGraphModule.load(tmp_path)(torch.ones(3)), torch.full((3,), 8.0))


def test_random_numbers_are_drawn_when_the_model_is_exported():
    exported = torch.export.export(Calls(lambda x: F.dropout(x, 0.5, True)), (torch.ones(1000),))
    first, second = (exported_program_to_stablehlo(exported) for _ in range(2))
    kept = first(torch.ones(1000)).cpu()
    assert torch.equal(kept, first(torch.ones(1000)).cpu())
    assert not torch.equal(kept, second(torch.ones(1000)).cpu())
    assert set(kept.unique().tolist()) == {0.0, 2.0}
    seeded = exported_program_to_stablehlo(
        exported, StableHLOExportOptions(inline_all_constant=False)
    )
    assert seeded._bundle.additional_constants[-1].dtype == np.int64
    assert set(seeded(torch.ones(1000)).cpu().unique().tolist()) == {0.0, 2.0}


def test_operators_of_ones_own_are_exported_as_what_their_function_calls():
    with torch.library._scoped_library("exported_function", "FRAGMENT") as library:
        library.define("mix(Tensor a) -> Tensor")
        library.impl("mix", lambda a: a.sum(0) * 3, "CompositeExplicitAutograd")
        library.impl("mix", lambda a: torch.empty_like(a[0]), "Meta")
        model = Calls(lambda a: torch.ops.exported_function.mix(a) + 1)
        made = export(model, (torch.randn(2, 3),))
        assert "custom_call" not in made.get_stablehlo_text()
        x = torch.arange(6.0).reshape(2, 3)
        assert_same(made(x), model(x))


def test_operators_of_ones_own_for_the_cpu_become_custom_calls():
    with torch.library._scoped_library("exported_test", "FRAGMENT") as library:
        library.define("mix(Tensor a, Tensor b) -> (Tensor, Tensor)")
        library.impl("mix", lambda a, b: (a + b, a.sum(0)), "CPU")
        library.impl("mix", lambda a, b: (torch.empty_like(a), torch.empty_like(a[0])), "Meta")
        model = Calls(lambda a: torch.ops.exported_test.mix(a, a * 2)[1] + 1)
        with pytest.raises(RuntimeError, match=r"no lowering for exported_test\.mix\.default"):
            export(model, (torch.randn(2, 3),))
        allowed = {"exported_test"}
        made = export(model, (torch.randn(2, 3),), custom_ops_allowed_in_graph=allowed)
    assert "stablehlo.custom_call @exported_test.mix.default(" in made.get_stablehlo_text()
    assert "-> (tensor<2x3xf32>, tensor<3xf32>)" in made.get_stablehlo_text()


def test_kernels_that_are_registered_for_xla_tensors_are_followed():
    with torch.library._scoped_library("exported_kernels", "FRAGMENT") as library:
        library.define("scale(Tensor x, float s) -> Tensor")

        @torch.library.impl(library, "scale", "XLA")
        def scale(x, s):
            called = stablehlo_custom_call(
                [x.abs()], "acme.scale", [x.shape], [x.dtype], backend_config=str(s)
            )
            return called + 1

        library.impl("scale", lambda x, s: torch.empty_like(x), "Meta")
        model = Calls(lambda x: torch.ops.exported_kernels.scale(x * 2, 3.5) - 1)
        made = export(model, (torch.randn(2, 3),)).get_stablehlo_text()
        allowed = {"exported_kernels"}
        whole = export(model, (torch.randn(2, 3),), custom_ops_allowed_in_graph=allowed)
    call = made.index("stablehlo.custom_call @acme.scale(")
    assert 'backend_config = "3.5"' in made[call : call + 200]
    assert made.index("stablehlo.abs") < call < made.index("stablehlo.add")
    assert "@exported_kernels.scale.default(" in whole.get_stablehlo_text()


def test_operations_can_carry_where_they_come_from():
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    plain = export(model, (torch.randn(2, 4),)).get_stablehlo_text()
    located = export(model, (torch.randn(2, 4),), export_node_metadata=True)
    assert "nn_module_stack" not in plain
    assert "torch.nn.modules.activation.ReLU" in located.get_stablehlo_text()
    assert b"torch.nn.modules.activation.ReLU" in located.get_stablehlo_bytecode()
    assert __file__.encode() not in export(model, (torch.randn(2, 4),)).get_stablehlo_bytecode()


def test_tracing_arguments_give_the_sizes_in_signatures():
    exported = torch.export.export(
        nn.Linear(4, 3), (torch.randn(2, 4),), dynamic_shapes=({0: Dim("n")},)
    )

    def signature(*args):
        options = StableHLOExportOptions(override_tracing_arguments=args)
        made = exported_program_to_stablehlo(exported, options)
        return made._bundle.stablehlo_funcs[0].meta.input_signature[-1]

    assert (signature(torch.randn(7, 4)).shape, signature(torch.randn(7, 4)).dynamic_dims) == (
        [7, 4],
        [0],
    )
    with pytest.raises(TypeError, match=r"argument 0 is float32\[7, 5\]"):
        signature(torch.randn(7, 5))


def test_unused_arguments_and_numbers_keep_their_places():
    made = export(Calls(lambda a, n, b, unused: a * n + b), (torch.ones(2), 3, torch.ones(2), None))
    meta = made._bundle.stablehlo_funcs[0].meta
    assert [place.position for place in meta.input_locations] == [0, 2]
    assert [(p.position, s.dtype) for p, s in meta.unused_inputs] == [(1, "int"), (3, "NoneType")]
    assert_same(made(torch.ones(2), 3, torch.ones(2), None), torch.full((2,), 4.0))


def test_bfloat16_weights_come_back(tmp_path):
    model = nn.Linear(4, 3).to(torch.bfloat16)
    x = torch.randn(2, 4).to(torch.bfloat16)
    export(model, (x,)).save(tmp_path)
    got = StableHLOGraphModule.load(tmp_path)(x)
    assert got.dtype == torch.bfloat16
    # one rounding of bfloat16 to eight bits
    torch.testing.assert_close(got.cpu(), model(x).detach(), rtol=2**-7, atol=2**-7)


def test_graphs_inside_graphs():
    def choose(x):
        with torch.no_grad():
            y = x * 2
        return torch.cond(x.sum() > 0, lambda t: t + 1, lambda t: t - 1, (y,))

    made = export(Calls(choose), (torch.ones(3),))
    for x in (torch.ones(3), -torch.ones(3)):
        assert_same(made(x), choose(x))


def test_arguments_on_the_device_and_views_of_them():
    made = export(Calls(lambda a, b: a - b), (torch.ones(2, 3), torch.ones(2, 3)))
    pending = torch.arange(6.0, device="xla").reshape(3, 2)
    got = made(pending.t(), torch.empty(2, 3, device="xla").zero_())
    assert_same(got, torch.arange(6.0).reshape(3, 2).t())


@pytest.mark.parametrize(
    ("function", "error", "text"),
    [
        (torch.nonzero, RuntimeError, r"no lowering for aten\.nonzero\.default"),
        (lambda x: x * x[0, 0].to(torch.int64).item(), ValueError, "depends on a tensor's values"),
        (torch.linalg.eigh, NotImplementedError, "'eigh'.*runs in a library of the device"),
    ],
)
def test_what_cannot_be_exported_is_named(function, error, text):
    with pytest.raises(error, match=text):
        export(Calls(function), (torch.eye(3),))


def test_sizes_that_a_lowering_must_know_are_named():
    model = Calls(lambda x: torch.fft.fft(x, dim=0).abs())
    with pytest.raises((LoweringError, ValueError), match=r"_fft_r2c.*symbolic|fixed sizes"):
        export(model, (torch.randn(6, 4),), dynamic_shapes=(({0: Dim("n", min=5, max=99)},),))


def test_what_is_no_exported_model_is_refused(tmp_path):
    with pytest.raises(TypeError, match=r"takes the result of torch.export.export\(\), got Linear"):
        exported_program_to_stablehlo(nn.Linear(2, 2))
    with pytest.raises(FileNotFoundError, match="holds no exported model"):
        StableHLOGraphModule.load(tmp_path)
    made = export(nn.Linear(4, 3), (torch.randn(2, 4),))
    with pytest.raises(KeyError, match="no function 'backward'; this model has forward"):
        made.evaluate("backward", ())
    made._bundle.stablehlo_funcs[0].bytecode = b"nothing"
    with pytest.raises(ValueError, match="not a StableHLO program that jaxlib"):
        made(torch.randn(2, 4))
    made.save(tmp_path)
    (tmp_path / "functions/forward.meta").write_text("{}")
    with pytest.raises(ValueError, match="does not describe an exported function"):
        StableHLOGraphModule.load(tmp_path)


def test_names_in_torch_xla():
    assert torch_xla.save_as_stablehlo is stablehlo.save_as_stablehlo
    assert torch_xla.save_torch_model_as_stablehlo is stablehlo.save_torch_model_as_stablehlo
    assert [kind.value for kind in VariableType] == ["input_arg", "parameter", "constant"]


def test_an_export_needs_no_device(run_python):
    code = """
        import torch, torch_xla, sys
        assert "xla_core.export.module" not in sys.modules
        model = torch.nn.Linear(4, 3)
        torch_xla.save_torch_model_as_stablehlo(model, (torch.randn(2, 4),), "model")
        from xla_core.jax_bridge import jax_private
        from xla_core.execution import runtime
        print(runtime.started(), jax_private.backends_started())
    """
    assert run_python(code, PJRT_DEVICE="NONE").split("\n")[0] == "False ()"
