"""torch_xla.stablehlo: exports models of torch.export as StableHLO programs with weights."""

from __future__ import annotations

from xla_core.export.bundle import InputLocation as InputLocation
from xla_core.export.bundle import StableHLOFunc as StableHLOFunc
from xla_core.export.bundle import StableHLOFunctionMeta as StableHLOFunctionMeta
from xla_core.export.bundle import StableHLOJSONSerializer as StableHLOJSONSerializer
from xla_core.export.bundle import StableHLOModelBundle as StableHLOModelBundle
from xla_core.export.bundle import VariableSignature as VariableSignature
from xla_core.export.bundle import VariableType as VariableType
from xla_core.export.bundle import stablehlo_obj_hook as stablehlo_obj_hook
from xla_core.export.dynamic_sizes import (
    exported_program_has_symbolic_input_shape as exported_program_has_symbolic_input_shape,
)
from xla_core.export.dynamic_sizes import (
    extract_custom_call_outputs_shape_dtype as extract_custom_call_outputs_shape_dtype,
)
from xla_core.export.dynamic_sizes import (
    process_exported_program_with_symbolic_input as process_exported_program_with_symbolic_input,
)
from xla_core.export.module import StableHLOGraphModule as StableHLOGraphModule
from xla_core.export.module import exported_program_to_stablehlo as exported_program_to_stablehlo
from xla_core.export.module import save_as_stablehlo as save_as_stablehlo
from xla_core.export.module import save_torch_model_as_stablehlo as save_torch_model_as_stablehlo
from xla_core.export.options import StableHLOExportOptions as StableHLOExportOptions
from xla_core.torch_features.custom_calls import stablehlo_custom_call as stablehlo_custom_call
