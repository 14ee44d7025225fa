"""torch_xla._internal.jax_workarounds: helpers for code that uses jax beside ``xla`` tensors."""

from __future__ import annotations

from xla_core.torch_features.jax_coexistence import jax_env_context as jax_env_context
from xla_core.torch_features.jax_coexistence import jax_import_guard as jax_import_guard
from xla_core.torch_features.jax_coexistence import maybe_get_jax as maybe_get_jax
from xla_core.torch_features.jax_coexistence import maybe_get_torchax as maybe_get_torchax
from xla_core.torch_features.jax_coexistence import requires_jax as requires_jax
