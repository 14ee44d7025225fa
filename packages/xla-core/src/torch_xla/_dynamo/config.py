"""torch_xla._dynamo.config: settings; this module is the one that the code reads."""

from __future__ import annotations

import sys

from xla_core.dynamo import settings

sys.modules[__name__] = settings
