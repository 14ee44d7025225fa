"""Comparisons of sizes whose answer jax does not know are found, others are not; quotients have one form."""

from __future__ import annotations

import random
import threading

import jax
import numpy as np

from xla_core.jax_bridge import symbolic_sizes


def two():
    return symbolic_sizes.symbols(["L", "M"], ["L >= 2", "L <= 64", "M >= 2", "M <= 8"])


def differences(found):
    """What the differences are for 9 and 4."""
    return sorted(int(symbolic_sizes.evaluate(size, {"L": 9, "M": 4})) for size in found)


def test_an_equality_that_is_not_known_is_found():
    length, other = two()
    with symbolic_sizes.watching_comparisons() as found:
        assert length not in (7,)
        assert length != other
        assert length % 2 != 0
    assert differences(found) == [1, 2, 5]


def test_an_equality_that_is_known_is_not_found():
    length, other = two()
    with symbolic_sizes.watching_comparisons() as found:
        assert length != 1
        assert length != 65
        assert other + 1 != 1
        assert length == length + 0
        assert length != "L"
    assert not found


def test_sizes_in_tuples_and_lists_count_too():
    length, _ = two()
    with symbolic_sizes.watching_comparisons() as found:
        assert 7 not in (length, 8)
        assert (length, 3) != (5, 3)
    assert differences(found) == [2, 4]


def test_other_threads_and_times_are_not_watched():
    length, _ = two()

    def compare():
        assert length != 9

    with symbolic_sizes.watching_comparisons() as found:
        thread = threading.Thread(target=compare)
        thread.start()
        thread.join()
    assert length != 9
    assert not found


def test_bounds_and_values():
    length, other = two()
    assert symbolic_sizes.bounds(3 * length - 1) == (5, 191)
    assert int(symbolic_sizes.evaluate(length * other + 1, {"L": 5, "M": 3})) == 16
    assert symbolic_sizes.evaluate(4, {}) == 4


def test_random_words_are_those_of_the_number():

    key = jax.random.key(5, impl="threefry2x32")
    wanted = np.asarray(jax.random.bits(key, (3, 5), np.uint32))
    numbers = np.arange(15, dtype=np.uint64).reshape(3, 5)
    with jax.enable_x64(True):
        high, low = symbolic_sizes.threefry(jax.random.key_data(key), jax.numpy.asarray(numbers))
    assert (np.asarray(high ^ low) == wanted).all()


def test_quotients_of_sizes_have_one_form():
    length, other = symbolic_sizes.symbols(("L0", "L1"), ["L0 >= 2", "L1 >= 2"])
    floored = symbolic_sizes.floored
    assert floored(length - 1, 2) + 1 == floored(length + 1, 2)
    assert floored(floored(length + 1, 2) + 1, 2) == floored(length + 3, 4)
    assert floored(2 * length + 1, 2) == length
    assert -floored(-length, 3) == floored(length + 2, 3)
    assert floored(length, 1) is length and floored(9, 2) == 4
    draw = random.Random(0)
    for _ in range(300):
        size = draw.choice((length, other, length * other, floored(length + other, 3)))
        size = (
            size * draw.choice((-3, -1, 2, 5)) + draw.randint(-9, 9) * other + draw.randint(-7, 7)
        )
        divisor = draw.randint(1, 9)
        known = {"L0": draw.randint(2, 60), "L1": draw.randint(2, 60)}
        exact = symbolic_sizes.evaluate(size, known) // divisor
        assert symbolic_sizes.evaluate(floored(size, divisor), known) == exact
