"""torch_xla.experimental.splash_attention: attention that skips what nothing sees."""

from __future__ import annotations

from xla_core.kernels.splash_attention import SplashAttention as SplashAttention
from xla_core.kernels.splash_attention import SplashAttentionConfig as SplashAttentionConfig
from xla_core.kernels.splash_attention import splash_attention as splash_attention
