"""torch_xla.experimental.deprecation: aliases for former names that warn when they are used."""

from __future__ import annotations

from xla_core.api.deprecated import deprecated as deprecated
from xla_core.api.deprecated import mark_deprecated as mark_deprecated
from xla_core.api.deprecated import register_deprecated as register_deprecated
