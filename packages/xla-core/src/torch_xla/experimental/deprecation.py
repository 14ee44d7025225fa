"""torch_xla.experimental.deprecation: former names that work and warn."""

from __future__ import annotations

from xla_core.api.deprecated import deprecated as deprecated
from xla_core.api.deprecated import mark_deprecated as mark_deprecated
from xla_core.api.deprecated import register_deprecated as register_deprecated
