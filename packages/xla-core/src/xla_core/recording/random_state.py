"""The random state of each device: one 64-bit number, advanced by every random operator.

Every random operator takes a seed from its device's generator when it is recorded, as a lifted
integer: results differ from call to call and from step to step, and no program depends on
them. The generator is SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number
Generators, OOPSLA 2014).
"""

from __future__ import annotations

import secrets
import threading
from typing import Final

_MASK: Final = 2**64 - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15

_states: dict[int, int] = {}
_common: list[int] = []  # the seed of devices without a state of their own, after seed_all()
_lock = threading.Lock()


def _mix(state: int) -> int:
    z = state
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def next_seed(device_index: int) -> int:
    """A new seed (a signed 64-bit int) from the generator of ``xla:device_index``."""
    with _lock:
        state = (
            _states.get(device_index, 0) if device_index in _states else _fresh(device_index)
        ) + _GOLDEN
        _states[device_index] = state & _MASK
        seed = _signed(_mix(state & _MASK))
    # 0 and 1 stand in step keys as they are; a seed must always be an argument of the program.
    return seed if seed not in (0, 1) else -1


def derived_seed(number: int) -> int:
    """The seed that any int stands for: the same one every time, different ones for different ints."""
    seed = _signed(_mix((number * _GOLDEN) & _MASK))
    return seed if seed not in (0, 1) else -1


def _fresh(device_index: int) -> int:
    state = _common[0] if _common else secrets.randbits(63)
    _states[device_index] = state
    return state


def set_state(seed: int, device_index: int) -> None:
    """Set the generator of ``xla:device_index``. ``seed`` is any int; its low 64 bits count."""
    with _lock:
        _states[device_index] = int(seed) & _MASK


def seed_all(seed: int) -> None:
    """Set the generators of all devices, those not started yet included."""
    with _lock:
        _states.clear()
        _common[:] = [int(seed) & _MASK]


def get_state(device_index: int) -> int:
    """The generator's state: ``set_state`` with it repeats the numbers that follow now."""
    with _lock:
        state = _states.get(device_index)
        if state is None:
            state = _fresh(device_index)
        return _signed(state)
