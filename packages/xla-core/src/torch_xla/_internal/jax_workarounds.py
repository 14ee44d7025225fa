"""torch_xla._internal.jax_workarounds: using jax beside ``xla`` tensors."""

from __future__ import annotations

from xla_core.jax_guard import jax_env_context as jax_env_context
from xla_core.jax_guard import jax_import_guard as jax_import_guard
from xla_core.jax_guard import maybe_get_jax as maybe_get_jax
from xla_core.jax_guard import requires_jax as requires_jax
