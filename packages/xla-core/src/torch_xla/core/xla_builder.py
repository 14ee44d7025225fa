"""torch_xla.core.xla_builder: calls of jax functions, and computations built from HLO operations."""

from __future__ import annotations

from xla_core.builder.xla_builder import Op as Op
from xla_core.builder.xla_builder import Shape as Shape
from xla_core.builder.xla_builder import Type as Type
from xla_core.builder.xla_builder import (
    computation_from_module_proto as computation_from_module_proto,
)
from xla_core.builder.xla_builder import create_builder as create_builder
from xla_core.builder.xla_builder import create_computation as create_computation
from xla_core.builder.xla_builder import create_placeholder_tensor as create_placeholder_tensor
from xla_core.builder.xla_builder import get_computation_hlo as get_computation_hlo
from xla_core.builder.xla_builder import mkleaf as mkleaf
from xla_core.builder.xla_builder import mkop as mkop
from xla_core.builder.xla_builder import mkparam as mkparam
from xla_core.builder.xla_builder import mkshape as mkshape
from xla_core.builder.xla_builder import tensor_shape as tensor_shape
from xla_core.builder.xla_builder import xla_computation_as_func as xla_computation_as_func
from xla_core.computations.call_jax import call_jax as call_jax
from xla_core.torch_features.jax_coexistence import jax_env_context as jax_env_context
from xla_core.torch_features.jax_coexistence import jax_import_guard as jax_import_guard
from xla_core.torch_features.jax_coexistence import maybe_get_jax as maybe_get_jax
from xla_core.torch_features.jax_coexistence import maybe_get_torchax as maybe_get_torchax
from xla_core.torch_features.jax_coexistence import requires_jax as requires_jax
