"""Settings of this package's tests: one CPU device."""

from __future__ import annotations

import os

for name in [name for name in os.environ if name.startswith("XLA_")]:
    del os.environ[name]
os.environ["PJRT_DEVICE"] = "CPU"
