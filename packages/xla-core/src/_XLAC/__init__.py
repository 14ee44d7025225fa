"""torch_xla's C++ module under the name that its wheel has at the top level: ``torch_xla._XLAC``."""

from __future__ import annotations

import sys

from torch_xla import _XLAC

sys.modules[__name__] = _XLAC
