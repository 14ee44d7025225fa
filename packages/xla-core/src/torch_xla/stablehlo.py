"""torch_xla.stablehlo: models of torch.export as StableHLO programs, with their weights."""

from __future__ import annotations

from xla_core.export.bundle import InputLocation as InputLocation
from xla_core.export.bundle import StableHLOFunc as StableHLOFunc
from xla_core.export.bundle import StableHLOFunctionMeta as StableHLOFunctionMeta
from xla_core.export.bundle import StableHLOModelBundle as StableHLOModelBundle
from xla_core.export.bundle import VariableSignature as VariableSignature
from xla_core.export.bundle import VariableType as VariableType
from xla_core.export.module import StableHLOGraphModule as StableHLOGraphModule
from xla_core.export.module import exported_program_to_stablehlo as exported_program_to_stablehlo
from xla_core.export.module import save_as_stablehlo as save_as_stablehlo
from xla_core.export.module import save_torch_model_as_stablehlo as save_torch_model_as_stablehlo
from xla_core.export.options import StableHLOExportOptions as StableHLOExportOptions
