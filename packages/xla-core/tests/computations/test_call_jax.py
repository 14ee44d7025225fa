"""``call_jax``: jax functions on ``xla`` tensors inside the step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import torch_xla
from torch_xla.core.xla_builder import call_jax


def test_a_function_of_jax_is_part_of_the_step(compile_count):
    def f(a, b):
        return a + jnp.sin(b)

    host = torch.randn(3, 4)
    before = compile_count()
    for _ in range(3):
        a = host.to("xla")
        result = (call_jax(f, (a, a * 2)) * 3).cpu()
        torch.testing.assert_close(result, (host + torch.sin(host * 2)) * 3)
    assert compile_count() == before + 1


def test_a_function_that_is_defined_again_compiles_nothing_new(compile_count):
    a = torch.ones(3, 3, device="xla")
    torch_xla.sync()
    before = compile_count()
    for _ in range(3):
        call_jax(lambda x: jax.nn.relu(x) @ x, (a,)).cpu()
    assert compile_count() == before + 1


def test_constants_that_differ_are_different_functions():
    a = torch.ones(2, device="xla")
    results = [call_jax(lambda x, by: x * by, (a,), {"by": by}).cpu() for by in (2, 2.5, True)]
    assert [r.tolist() for r in results] == [[2.0, 2.0], [2.5, 2.5], [1.0, 1.0]]
    whole = torch.arange(2, device="xla", dtype=torch.int32)
    numbers = (np.int32(1), np.float32(1), np.float16(1))
    multiplied, divided = (lambda x, by: x * by), (lambda x, by: x / by)
    results = [call_jax(multiplied, (whole, by)).dtype for by in numbers]
    assert results == [torch.int32, torch.float32, torch.float16]
    zeros = (np.float32(0.0), np.float32(-0.0))
    results = [call_jax(divided, (a, by)).tolist() for by in zeros]
    assert results == [[float("inf")] * 2, [-float("inf")] * 2]
    table = np.array([1.0, 2.0], np.float32)
    assert call_jax(lambda x, t: x * t, (a, table)).tolist() == [1.0, 2.0]
    assert call_jax(lambda x, t: x * t, (a, table * 2)).tolist() == [2.0, 4.0]


def test_arguments_and_results_nest_as_pytrees_do():
    def f(inputs, scale, *, dtype):
        return {"sum": inputs["x"].sum() * scale, "rest": (inputs["y"].astype(dtype), None)}

    given = {"x": torch.arange(3.0, device="xla"), "y": torch.ones(2, 2, device="xla")}
    found = call_jax(f, (given, 2.0), {"dtype": torch.bfloat16})
    assert found["sum"].item() == 6.0
    assert found["rest"][0].dtype == torch.bfloat16
    assert found["rest"][1] is None


def test_types_are_as_the_users_configuration_of_jax_says():
    def f(x, places):
        return x + jnp.zeros(2), places + 1

    x, places = torch.ones(2, device="xla"), torch.tensor([3, 4], device="xla")
    assert [r.dtype for r in call_jax(f, (x, places))] == [torch.float32, torch.int32]
    with jax.enable_x64(True):
        results = call_jax(f, (x, places))
    assert [r.dtype for r in results] == [torch.float64, torch.int64]
    assert results[1].tolist() == [4, 5]


@pytest.mark.parametrize(
    ("function", "error", "text"),
    [
        (lambda x: jax.debug.print("{}", x), ValueError, "side effects"),
        (lambda x: jax.random.key(0), TypeError, "PyTorch does not have"),
    ],
)
def test_what_a_program_cannot_hold_is_named(function, error, text):
    with pytest.raises(error, match=text):
        call_jax(function, (torch.ones(2, device="xla"),))


def test_tensors_of_other_devices_are_refused():
    with pytest.raises(TypeError, match=r"argument 1 .* is on cpu"):
        call_jax(lambda a, b: a + b, (torch.ones(2, device="xla"), torch.ones(2)))
