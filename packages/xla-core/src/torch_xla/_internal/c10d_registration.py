"""torch_xla._internal.c10d_registration: its function raises an error that names the collectives to use."""

from __future__ import annotations

from xla_core.api.not_available import broadcast_xla as broadcast_xla
