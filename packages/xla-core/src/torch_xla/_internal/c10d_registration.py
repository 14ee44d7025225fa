"""torch_xla._internal.c10d_registration: where torch_xla's C++ runtime registers collectives with c10d."""

from __future__ import annotations

from xla_core.api.not_available import broadcast_xla as broadcast_xla
