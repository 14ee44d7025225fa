"""The random state of each device: one 64-bit number, advanced by every random operator.

Every random operator takes a seed from its device's generator when it is recorded, as a lifted
integer: results differ from call to call and from step to step, and no program depends on
them. The generator is SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number
Generators, OOPSLA 2014).
"""

from __future__ import annotations

import secrets
import threading
from typing import Final, TypeVar

import numpy as np

_MASK: Final = 2**64 - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15
_INVERSE: Final = pow(_GOLDEN, -1, 2**64)

_Bits = TypeVar("_Bits", int, np.ndarray)

_states: dict[int, int] = {}
_common: list[int] = []  # the seed of devices without a state of their own, after seed_all()
_lock = threading.Lock()


def _mix(z: _Bits) -> _Bits:
    """SplitMix64's output for a state (int below 2**64), or for an array of them (uint64, which wraps in numpy)."""
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
    # 0 and 1 are constants in step keys, but a seed must always be an argument of the program.
    return seed if seed not in (0, 1) else -1


def derived_seed(number: int) -> int:
    """The seed that belongs to an int: always the same one, and different ones for different ints."""
    seed = _signed(_mix((number * _GOLDEN) & _MASK))
    return seed if seed not in (0, 1) else -1


def _fresh(device_index: int) -> int:
    state = _common[0] if _common else secrets.randbits(63)
    _states[device_index] = state
    return state


def set_state(seed: int, device_index: int) -> None:
    """Set the generator of ``xla:device_index``. ``seed`` is any int, of which the low 64 bits are used."""
    with _lock:
        _states[device_index] = int(seed) & _MASK


def seed_all(seed: int) -> None:
    """Set the generators of all devices, including those that have not started yet."""
    with _lock:
        _states.clear()
        _common[:] = [int(seed) & _MASK]


def get_state(device_index: int) -> int:
    """The generator's state; passing it to ``set_state`` later repeats the numbers that follow now."""
    with _lock:
        state = _states.get(device_index)
        if state is None:
            state = _fresh(device_index)
        return _signed(state)


def distance(before: int, after: int) -> int:
    """The number of seeds drawn between two states, if the state was only changed by drawing."""
    return ((after - before) * _INVERSE) & _MASK


def seeds_after(state: int, places: np.ndarray) -> np.ndarray:
    """The seeds (int64) that ``next_seed`` draws at these places (uint64, 1 is the next one) after ``state``."""
    seeds = _mix(places * _GOLDEN + (state & _MASK)).view(np.int64)
    if ((seeds == 0) | (seeds == 1)).any():
        seeds[(seeds == 0) | (seeds == 1)] = -1
    return seeds


def draw(device_index: int, places: np.ndarray, count: int) -> np.ndarray:
    """The seeds at these places of the device's generator, which advances by ``count``."""
    with _lock:
        state = _states.get(device_index)
        if state is None:
            state = _fresh(device_index)
        _states[device_index] = (state + count * _GOLDEN) & _MASK
    return seeds_after(state, places)
