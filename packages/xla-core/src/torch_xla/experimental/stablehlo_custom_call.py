"""torch_xla.experimental.stablehlo_custom_call: calls by name in the lowered program."""

from __future__ import annotations

from xla_core.torch_features.custom_calls import place_to_device as place_to_device
from xla_core.torch_features.custom_calls import place_to_host as place_to_host
from xla_core.torch_features.custom_calls import stablehlo_custom_call as stablehlo_custom_call
