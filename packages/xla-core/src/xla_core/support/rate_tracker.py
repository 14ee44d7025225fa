"""``RateTracker``: how many samples a second a loop gets through."""

from __future__ import annotations

import time
from typing import Final

DEFAULT_SMOOTHING: Final = 0.4


class RateTracker:
    """Counts what is added and says how much that was per second.

    ``smooth_factor`` (0 to 1, default 0.4) is the weight of the former rate in ``rate()``.
    """

    def __init__(self, smooth_factor: float | None = None) -> None:
        self._smoothing = DEFAULT_SMOOTHING if smooth_factor is None else smooth_factor
        self._started = self._last = time.perf_counter()
        self._total = 0.0
        self._since = 0.0
        self._rate: float | None = None

    def add(self, count: float) -> None:
        """Count ``count`` more samples."""
        self._total += count
        self._since += count

    def rate(self) -> float:
        """Samples per second since the last call, smoothed with what that one gave."""
        now = time.perf_counter()
        if now <= self._last:
            return self._rate or 0.0
        current = self._since / (now - self._last)
        if self._rate is not None:
            current = (1 - self._smoothing) * current + self._smoothing * self._rate
        self._rate, self._since, self._last = current, 0.0, now
        return current

    def global_rate(self) -> float:
        """Samples per second since the tracker was made."""
        elapsed = time.perf_counter() - self._started
        return self._total / elapsed if elapsed > 0 else 0.0
