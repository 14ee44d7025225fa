"""torch_xla.experimental.splash_attention: attention that skips blocks in which all positions are masked."""

from __future__ import annotations

from torch_xla._packages import lazy_names
from xla_core.computations.call_jax import call_jax as call_jax
from xla_core.kernels.splash_attention import SplashAttention as SplashAttention
from xla_core.kernels.splash_attention import SplashAttentionConfig as SplashAttentionConfig
from xla_core.kernels.splash_attention import splash_attention as splash_attention
from xla_core.torch_features.jax_coexistence import requires_jax as requires_jax

__getattr__, __dir__ = lazy_names(__name__, {"Mesh": "xla_spmd.sharding.mesh"})
