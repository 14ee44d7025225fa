"""torch_xla._dynamo.config: the module of settings that the code reads, under torch_xla's name."""

from __future__ import annotations

import sys

from xla_core.dynamo import settings

sys.modules[__name__] = settings
