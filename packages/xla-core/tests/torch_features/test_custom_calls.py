"""Calls by name in the lowered program: ``stablehlo_custom_call``, ``place_to_host``."""

from __future__ import annotations

import pytest
import torch
from torch.export import Dim

import torch_xla
import torch_xla.core.xla_model as xm
from torch_xla.experimental.stablehlo_custom_call import (
    place_to_device,
    place_to_host,
    stablehlo_custom_call,
)
from torch_xla.stablehlo import exported_program_to_stablehlo

# Targets that every XLA knows: without partitions a sharding is the value itself.
KNOWN = "Sharding"


class Calls(torch.nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def text_of(tensors):
    return xm.get_stablehlo(list(tensors))


def test_a_call_has_all_that_it_was_given():
    x = torch.randn(2, 3, device="xla")
    torch_xla.sync()
    results = stablehlo_custom_call(
        [x, x], "my.call", [[2, 3], [3]], [torch.float32, torch.int64],
        has_side_effect=True, backend_config="how", api_version=1, frontend_attributes={"k": "v"},
    )  # fmt: skip
    assert [(tuple(r.shape), r.dtype) for r in results] == [
        ((2, 3), torch.float32),
        ((3,), torch.int64),
    ]
    assert (
        "%0:2 = stablehlo.custom_call @my.call(%arg0, %arg0) {"
        'backend_config = "how", has_side_effect = true, mhlo.frontend_attributes = {k = "v"}'
        "} : (tensor<2x3xf32>, tensor<2x3xf32>) -> (tensor<2x3xf32>, tensor<3xi64>)"
    ) in text_of(results)


def test_a_typed_call_without_operands():
    made = torch_xla._XLAC._xla_custom_call(
        [], "my.source", [[4]], [torch.float32], False, "{seed = 1 : i64}", 4, {}
    )
    assert (
        "stablehlo.custom_call @my.source() "
        "{api_version = 4 : i32, backend_config = {seed = 1 : i64}} : () -> tensor<4xf32>"
    ) in text_of(made)


def test_a_call_runs():
    x = torch.randn(2, 3)
    found = stablehlo_custom_call([x.to("xla") * 2], KNOWN, [x.shape], [x.dtype]) + 1
    torch.testing.assert_close(found.cpu(), x * 2 + 1)


def test_calls_in_compiled_graphs_and_exports():
    def function(x):
        return (
            stablehlo_custom_call([x], KNOWN, [x.shape], [x.dtype], frontend_attributes={"k": "v"})
            + 1
        )

    x = torch.randn(2, 3)
    compiled = torch.compile(function, backend="openxla", fullgraph=True)
    torch.testing.assert_close(compiled(x.to("xla")).cpu(), x + 1)
    exported = torch.export.export(Calls(function), (x,), dynamic_shapes=(({0: Dim("n", max=9)},),))
    made = exported_program_to_stablehlo(exported)
    assert 'mhlo.frontend_attributes = {k = "v"}} : (tensor<?x3xf32>)' in made.get_stablehlo_text()


def test_values_are_kept_where_they_are_wanted():
    x = torch.randn(3, device="xla", requires_grad=True)
    text = text_of([place_to_device(place_to_host(x) * 2)])
    placements = ("pinned_host", "device")
    assert all(f'{{_xla_buffer_placement = "{where}"}}' in text for where in placements)
    # XLA's CPU compiler has one memory: the value is as it was
    (place_to_device(place_to_host(x) * 2) ** 2).sum().backward()
    torch.testing.assert_close(x.grad.cpu(), 8 * x.detach().cpu())
    assert place_to_host(None) is None


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: stablehlo_custom_call([torch.ones(2)], "t", [[2]], [torch.int8]), RuntimeError, "tensor on cpu"),
        (lambda: place_to_host(torch.ones(2)), RuntimeError, "place_to_host.*tensor on cpu"),
        (lambda: stablehlo_custom_call([], "t", [[2]], []), ValueError, "1 output shapes and 0"),
    ],
)  # fmt: skip
def test_mistakes_are_named(call, error, text):
    with pytest.raises(error, match=text):
        call()
