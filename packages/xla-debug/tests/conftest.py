"""Settings of this package's tests: one CPU device."""

from __future__ import annotations

import os

os.environ["PJRT_DEVICE"] = "CPU"
os.environ.pop("XLA_PERSISTENT_CACHE_PATH", None)
