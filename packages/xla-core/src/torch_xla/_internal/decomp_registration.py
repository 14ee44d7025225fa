"""torch_xla._internal.decomp_registration: registers nothing, as all its operators have lowering rules here."""

from __future__ import annotations
