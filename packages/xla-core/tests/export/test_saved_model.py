"""Exported models as TensorFlow SavedModels; what needs TensorFlow is skipped without it."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch
from torch import nn
from torch.export import Dim

from torch_xla import tf_saved_model_integration as integration
from torch_xla.stablehlo import exported_program_to_stablehlo, save_torch_model_as_stablehlo

# TensorFlow is a gigabyte that nothing else here needs, and no package depends on it.
with_tensorflow = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"
)


class Model(nn.Module):
    """Weights, a constant that the code makes, several results."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x, scale, unused):
        y = torch.nn.functional.gelu(self.linear(x))
        return y * scale + torch.arange(3.0), y.argmax(1)


EXAMPLES = (torch.randn(2, 4), torch.randn(3), torch.zeros(1))


def same(got, wanted):
    for g, w in zip(got, wanted, strict=True):
        torch.testing.assert_close(torch.from_numpy(g.numpy()), w, rtol=1e-4, atol=1e-5)


def test_without_tensorflow_the_error_names_it(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    text = "save_torch_module_as_tf_saved_model needs TensorFlow.*pip install tensorflow"
    with pytest.raises(ImportError, match=text):
        integration.save_torch_module_as_tf_saved_model(Model(), EXAMPLES, tmp_path)
    program = exported_program_to_stablehlo(torch.export.export(Model(), EXAMPLES))
    with pytest.raises(ImportError, match="make_tf_function needs TensorFlow"):
        integration.make_tf_function(program)


@with_tensorflow
def test_a_program_is_a_function_of_tensorflow():
    import tensorflow as tf

    model = Model()
    program = exported_program_to_stablehlo(torch.export.export(model, EXAMPLES))
    function = integration.make_tf_function(program)
    same(function(*[tf.constant(a.numpy()) for a in EXAMPLES]), model(*EXAMPLES))


@with_tensorflow
def test_a_saved_model_takes_any_batch(tmp_path):
    import tensorflow as tf

    model = Model()
    integration.save_torch_module_as_tf_saved_model(
        model, EXAMPLES, tmp_path, dynamic_shapes=({0: Dim("n", max=9)}, None, None),
        serving_key="serve", function_alias="model",
    )  # fmt: skip
    loaded = tf.saved_model.load(str(tmp_path))
    assert {v.name.split(":")[0] for v in loaded.held} >= {"linear.weight", "linear.bias"}
    for rows in (2, 5):
        args = (torch.randn(rows, 4), *EXAMPLES[1:])
        given = {f"args_{i}": tf.constant(a.numpy()) for i, a in enumerate(args)}
        results = loaded.signatures["serve"](**given)
        same([results[name] for name in sorted(results)], model(*args))


@with_tensorflow
def test_the_command_converts_a_directory(tmp_path):
    import tensorflow as tf

    model = Model()
    save_torch_model_as_stablehlo(model, EXAMPLES, tmp_path / "exported")
    assert integration.main([str(tmp_path / "exported"), str(tmp_path / "saved")]) == 0
    loaded = tf.saved_model.load(str(tmp_path / "saved"))
    same(loaded.f(*[tf.constant(a.numpy()) for a in EXAMPLES]), model(*EXAMPLES))
