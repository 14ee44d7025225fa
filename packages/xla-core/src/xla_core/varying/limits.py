"""Up to which lengths programs are made: powers of two and one and a half times them, or what the user says."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from xla_core.support import flags

LEAST: Final = 2
"""Sizes of 0 and 1 mean other things than larger ones (nothing, and broadcasting): they keep their own programs."""
# Lengths below this part of the largest one that was seen share a program: they cost little anyway.
_SMALLEST_PART: Final = 8
# As far as a length is taken to grow at least: what a step of generation pads is small beside its weights.
_GROWN: Final = 256
NEAR: Final = 16
"""Sizes that differ from a length by no more have buffers of one size: a cache, and the cache with one more."""
# A program whose limits are so many times those that the lengths would get is used instead of a new one.
_ENOUGH: Final = 1.5


def rounded(length: int) -> int:
    """The smallest power of two, or one and a half times one, that is not less than ``length``."""
    power = 1 << max(length - 1, 1).bit_length()
    half_more = power // 4 * 3
    return half_more if half_more >= length else power


def wanted(
    lengths: Sequence[int],
    largest: Sequence[int],
    growing: bool = False,
    room: Sequence[int] = (0, 0),
) -> tuple[int, ...] | None:
    """Limits for a program for ``lengths``; ``largest`` are the largest lengths that were seen.

    Where a length is ``growing`` (default: False), one by one, the program is for what comes next, too; with
    ``room``, what buffers have besides, its buffers have a size that other programs' have. None where the
    user's limits (``XLA_VARYING_LIMITS``) are lower than a length.
    """
    chosen = flags.VARYING_LIMITS.get()
    if chosen:
        fitting = [min((c for c in chosen if c >= n), default=None) for n in lengths]
        limits = tuple(limit for limit in fitting if limit is not None)
        return limits if len(limits) == len(fitting) else None
    if growing:
        return tuple(
            rounded(max(_GROWN, 2 * n)) - more for n, more in zip(lengths, room, strict=False)
        )
    return tuple(
        rounded(max(n, -(-most // _SMALLEST_PART)))
        for n, most in zip(lengths, largest, strict=True)
    )


def suffices(limits: Sequence[int], others: Sequence[int]) -> bool:
    """Whether a program with ``limits`` is used where one with ``others`` would be made."""
    product = other = 1
    for limit, wish in zip(limits, others, strict=True):
        product *= limit
        other *= wish
    return product <= _ENOUGH * other


def _halved(ends: Sequence[int]) -> list[int]:
    """The one in the middle, that in the middle of those below, and so on to the first."""
    halves = []
    while ends:
        halves.append(ends[len(ends) // 2])
        ends = ends[: len(ends) // 2]
    return halves


def candidates(
    limits: tuple[int, ...],
    lengths: Sequence[int],
    smallest: Sequence[int],
    sizes: Sequence[int],
    forms: Iterable[tuple[int, int, int]] = (),
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Smallest and largest lengths to try one after the other, the widest first.

    A step that takes the first 5 elements does something else for lengths below that: none was below the
    ``smallest`` that were seen. A table of 300 positions, one of the step's fixed ``sizes``, is no use beyond 300,
    where the limit would be 384; and beyond 299 if the step takes one more than its length. ``forms`` are such
    numbers of the step: which length, what it is multiplied with, and what is added. Of many such limits half are
    passed over each time: which of them holds is only known when a program was tried.
    """
    lower: list[list[int]] = []
    for which, (n, limit) in enumerate(zip(lengths, limits, strict=True)):
        own = {(1, 0), *((factor, more) for number, factor, more in forms if number == which)}
        ends = {(size - more) // factor for factor, more in own for size in set(sizes)}
        lower.append(_halved(sorted(end for end in ends if n <= end < limit)) or [limit])
    least = (LEAST,) * len(limits)
    seen = tuple(smallest)
    tried = [limits]
    for step in range(max(map(len, lower))):
        tried.append(tuple(ends[min(step, len(ends) - 1)] for ends in lower))
    return list(dict.fromkeys((low, high) for high in tried for low in (least, seen)))
