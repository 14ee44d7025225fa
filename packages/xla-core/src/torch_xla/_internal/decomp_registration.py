"""torch_xla._internal.decomp_registration: nothing is registered, as all its operators have lowering rules here."""

from __future__ import annotations
