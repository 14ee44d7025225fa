"""Marked parts of a computation are ``stablehlo.composite`` operations, and compute what they did."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.export import Dim

import torch_xla
import torch_xla.core.xla_model as xm
from torch_xla.experimental.mark_pattern_utils import StableHLOCompositeBuilder
from torch_xla.stablehlo import StableHLOGraphModule, exported_program_to_stablehlo

ATTRIBUTES = {"scale": 0.25, "name": "a", "n": 3, "on": True, "sizes": [1, 2], "parts": [0.5, 1.0]}
WRITTEN = (
    'composite_attributes = {n = 3 : i64, name = "a", on = true, parts = dense<[5.000000e-01, '
    "1.000000e+00]> : tensor<2xf32>, scale = 2.500000e-01 : f32, sizes = dense<[1, 2]> : tensor<2xi64>}"
)


class Attention(nn.Module):
    """Two composites in a row, the second of which reads weights, and a marked value used after it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, y):
        first = StableHLOCompositeBuilder("test.attend", ATTRIBUTES)
        x, y = first.mark_inputs(x, y)
        z = (x + y * 0.25).softmax(-1)
        z, w = first.mark_outputs(z, z * 2)
        second = StableHLOCompositeBuilder("test.project")
        z = second.mark_inputs(z)
        z = second.mark_outputs(self.linear(z) + w)
        return z + x


def arguments(rows=4):
    return torch.randn(rows, 4), torch.randn(rows, 4)


def composites(text):
    """The composites of a module's ``main``: name, and how many operands each has."""
    found = re.findall(r'stablehlo\.composite "([\w.]+)" ((?:%[\w#]+(?:, )?)+)', text)
    return [(name, len(operands.split(", "))) for name, operands in found]


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_model_holds_its_composites(tmp_path, strict):
    model = Attention()
    args = arguments()
    made = exported_program_to_stablehlo(torch.export.export(model, args, strict=strict))
    text = made.get_stablehlo_text()
    # the weight and the bias, and the result of the first composite that was not marked
    assert composites(text) == [("test.attend", 2), ("test.project", 4)]
    assert WRITTEN in text
    main = text[text.index("@main") : text.index("func.func private")]
    assert "xla_mark_tensor" not in text
    assert re.findall(r"stablehlo\.(\w+)", main) == ["composite", "composite", "add"]
    made.save(tmp_path)
    got = StableHLOGraphModule.load(tmp_path)(*args)
    torch.testing.assert_close(got.cpu(), model(*args).detach())


def test_composites_in_a_program_of_dynamic_sizes():
    dynamic = ({0: Dim("n", max=9)}, {0: Dim("n", max=9)})
    model = Attention()
    exported = torch.export.export(model, arguments(), dynamic_shapes=dynamic)
    made = exported_program_to_stablehlo(exported)
    assert [name for name, _ in composites(made.get_stablehlo_text())] == [
        "test.attend", "test.project",
    ]  # fmt: skip
    args = arguments(6)
    torch.testing.assert_close(made(*args).cpu(), model(*args).detach())


def test_a_training_step_holds_them_and_compiles_once(compile_count):
    model, device = Attention(), torch_xla.device()
    args = arguments()
    wanted = model(*args).detach()
    model.to(device)
    args = [a.to(device) for a in args]
    assert composites(xm.get_stablehlo([model(*args)]))[0][0] == "test.attend"
    counts = []
    for _ in range(3):
        model.zero_grad()
        found = model(*args)
        found.sum().backward()
        torch_xla.sync()
        counts.append(compile_count())
    torch.testing.assert_close(found.detach().cpu(), wanted)
    assert model.linear.bias.grad.tolist() == [4.0] * 4
    assert counts[1] == counts[2]


def test_one_inside_another():
    def outer(x):
        around = StableHLOCompositeBuilder("test.outer")
        x = around.mark_inputs(x)
        inside = StableHLOCompositeBuilder("test.inner")
        y = inside.mark_outputs(inside.mark_inputs(x + 1).exp())
        return around.mark_outputs(y * 2)

    x = torch.randn(3, device="xla")
    text = xm.get_stablehlo([outer(x)])
    main, outer_body = text.split("func.func private")[0], text.split("@test.outer.impl(")[-1]
    assert composites(main) == [("test.outer", 2)]  # the number 2 is the step's argument
    assert composites(outer_body) == [("test.inner", 1)]
    torch.testing.assert_close(outer(x).cpu(), (x.cpu() + 1).exp() * 2)


def test_control_flow_and_reductions_inside():
    def cumulate(x):
        builder = StableHLOCompositeBuilder("test.cumulate")
        x = builder.mark_inputs(x)
        return builder.mark_outputs(x.cumsum(0).sort(0)[0], x.argmax(0))

    x = torch.randn(5, 3)
    values, index = cumulate(x.to("xla"))
    wanted = cumulate(x)
    torch.testing.assert_close(values.cpu(), wanted[0])
    assert torch.equal(index.cpu(), wanted[1])


def test_marks_that_are_apart_are_no_composite():
    x = torch.randn(3, device="xla")
    builder = StableHLOCompositeBuilder("test.apart")
    marked = builder.mark_inputs(x)
    torch_xla.sync()
    found = builder.mark_outputs(marked + 1)
    assert "composite" not in xm.get_stablehlo([found])
    with torch_xla.experimental.eager_mode_context(True):
        one_by_one = builder.mark_outputs(builder.mark_inputs(x) + 1)
    assert torch.equal(one_by_one.cpu(), found.cpu())


def test_composites_that_overlap_are_refused():
    x = torch.randn(3, device="xla")
    a, b = StableHLOCompositeBuilder("test.a"), StableHLOCompositeBuilder("test.b")
    first = a.mark_inputs(x)
    second = b.mark_inputs(first + 1)
    third = a.mark_outputs(second * 3)
    with pytest.raises(ValueError, match=r"composites 'test.a', 'test.b' cannot be separated"):
        xm.get_stablehlo([b.mark_outputs(third - 1)])


def test_a_compiled_graph_holds_them():
    device = torch_xla.device()
    model = Attention().to(device)
    args = [a.to(device) for a in arguments()]
    compiled = torch.compile(model, backend="openxla", fullgraph=True)
    torch.testing.assert_close(compiled(*args).cpu(), model(*args).cpu())


@pytest.mark.parametrize("attributes", [{"a": None}, {1: 2}, {"a": [1, 2.0]}, {"a": []}, [1]])
def test_attributes_that_stablehlo_does_not_have(attributes):
    with pytest.raises(ValueError, match=r"composite 'test.x': attributes are a dict from str to"):
        StableHLOCompositeBuilder("test.x", attributes)


def test_a_name_has_a_namespace():
    with pytest.raises(ValueError, match="'attention' is not a valid name for a composite"):
        StableHLOCompositeBuilder("attention")


def test_only_tensors_are_marked():
    with pytest.raises(ValueError, match="only torch tensors can be marked"):
        StableHLOCompositeBuilder("test.x").mark_inputs(1.0)
