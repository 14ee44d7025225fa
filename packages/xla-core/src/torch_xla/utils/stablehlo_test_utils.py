"""torch_xla.utils.stablehlo_test_utils: compares saved models with the programs that they were made from."""

from __future__ import annotations

from xla_core.export.dynamic_sizes import wrap_func_as_nn_module as wrap_func_as_nn_module
from xla_core.export.reloading import (
    compare_exported_program_and_saved_model_result as compare_exported_program_and_saved_model_result,
)
from xla_core.export.reloading import has_tf_package as has_tf_package
from xla_core.export.reloading import load_save_model_and_inference as load_save_model_and_inference
