"""torch_xla.experimental.unbounded_dynamism_export: exported programs with dynamic sizes."""

from __future__ import annotations

from xla_core.export.dynamic_sizes import (
    exported_program_has_symbolic_input_shape as exported_program_has_symbolic_input_shape,
)
from xla_core.export.dynamic_sizes import (
    process_exported_program_with_symbolic_input as process_exported_program_with_symbolic_input,
)
from xla_core.export.dynamic_sizes import wrap_func_as_nn_module as wrap_func_as_nn_module
