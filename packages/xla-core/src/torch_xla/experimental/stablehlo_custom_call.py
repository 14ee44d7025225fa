"""torch_xla.experimental.stablehlo_custom_call: custom calls in the lowered program."""

from __future__ import annotations

from xla_core.export.dynamic_sizes import (
    extract_custom_call_outputs_shape_dtype as extract_custom_call_outputs_shape_dtype,
)
from xla_core.torch_features.custom_calls import place_to_device as place_to_device
from xla_core.torch_features.custom_calls import place_to_host as place_to_host
from xla_core.torch_features.custom_calls import stablehlo_custom_call as stablehlo_custom_call
from xla_core.torch_features.custom_calls import to_device_backward as to_device_backward
from xla_core.torch_features.custom_calls import to_host_backward as to_host_backward
