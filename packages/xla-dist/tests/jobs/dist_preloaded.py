"""What the fork server imports last: collections of the job processes do not walk over what it imported before."""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
