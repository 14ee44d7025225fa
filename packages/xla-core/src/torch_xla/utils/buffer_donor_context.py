"""torch_xla.utils.buffer_donor_context: a context in which marks of ``_set_buffer_donation`` have an effect."""

from __future__ import annotations

from xla_core.launching.buffer_donation import (
    alias_with_buffer_donor_config as alias_with_buffer_donor_config,
)
