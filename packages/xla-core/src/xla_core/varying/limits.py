"""The largest lengths of programs: powers of two and one and a half times these, or the user's own limits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from xla_core.support import flags

LEAST: Final = 2
"""Sizes of 0 and 1 mean other things than larger ones (nothing, and broadcasting): they keep their own programs."""
# Lengths below this fraction of the largest one seen share a program, since they cost little anyway.
_SMALLEST_PART: Final = 8
# A growing length is expected to reach at least this. The padding of a generation step is small beside its weights.
_GROWN: Final = 256
NEAR: Final = 16
"""Sizes this close to a length get buffers of one size, such as a cache and the cache with one more token."""
# An existing program is used instead of a new one if it is at most this many times as large.
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

    If a length is ``growing`` by one each time (default: False), the program also serves what comes next. ``room``
    is the number of places that buffers have in addition; with it, they get the size of other programs' buffers.
    None if a length exceeds the user's limits (``XLA_VARYING_LIMITS``).
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
    """The middle one, then the middle one of those below it, and so on down to the first."""
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
    """Pairs of smallest and largest lengths to try in this order, the widest first.

    A step that takes the first 5 elements behaves differently below that length, so the ``smallest`` lengths seen
    are tried as well. With a table of 300 positions (one of the step's fixed ``sizes``) lengths end at 300, even if
    the limit would be 384, and at 299 if the step takes one position more than its length. ``forms`` are such
    numbers of the step: which length, its factor, and what is added. Each try halves the number of remaining
    limits, because only a try tells which of them holds.
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
