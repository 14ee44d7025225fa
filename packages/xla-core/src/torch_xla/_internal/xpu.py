"""torch_xla._internal.xpu: Intel GPUs."""

from __future__ import annotations

from xla_core.plugins.xpu import XpuPlugin as XpuPlugin
