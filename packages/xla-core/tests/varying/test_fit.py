"""Lengths are found in the numbers of steps, and what is predicted from them is exact or nothing."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from xla_core.varying.fit import fit
from xla_core.varying.limits import candidates, rounded, suffices, wanted


def samples(*rows):
    return [np.array(row) for row in rows]


def test_a_number_may_be_a_multiple_of_a_length_and_more():
    # length, the same times 3, one less, 10 minus it, constant
    found = fit(samples([5, 15, 4, 5, 7], [9, 27, 8, 1, 7]), [0])
    assert found is not None
    assert found.predicted([6]).tolist() == [6, 18, 5, 4, 7]
    assert found.lengths_of(np.array([6, 18, 5, 4, 7])) == (6,)
    assert found.lengths_of(np.array([6, 18, 5, 4, 8])) is None
    assert found.lengths_of(np.array([6, 18, 6, 4, 7])) is None


def test_two_lengths_and_their_product():
    found = fit(samples([2, 5, 10, 7], [3, 5, 15, 8], [3, 9, 27, 12], [7, 4, 28, 11]), [0, 1])
    assert found is not None
    assert found.predicted([4, 6]).tolist() == [4, 6, 24, 10]
    assert found.lengths_of(np.array([4, 6, 24, 10])) == (4, 6)


def test_three_lengths_and_their_products():
    # height, width, boxes, all places, places of all boxes
    lengths = [(6, 11, 2), (15, 6, 5), (10, 15, 3), (12, 16, 3), (14, 11, 4), (9, 13, 4)]
    rows = samples(*([h, w, k, 5 * h * w + 1, 5 * h * w * k] for h, w, k in lengths))
    assert fit(rows[:4], [0, 1, 2]) is None
    found = fit(rows[:5], [0, 1, 2])
    assert found is not None and set(found.lengths) == {0, 1, 2}
    assert found.lengths_of(rows[5]) is not None
    assert found.lengths_of(rows[5] + [0, 0, 0, 0, 1]) is None


def test_three_steps_are_too_few_for_two_lengths_and_their_product():
    rows = samples([8, 20, 152], [6, 33, 192], [8, 41, 320], [3, 29, 84])  # the last: L * (M - 1)
    assert fit(rows[:3], [0, 1]) is None
    assert fit(rows, [0, 1]).predicted([5, 40]).tolist() == [5, 40, 195]


def test_a_number_may_be_made_of_a_square():
    rows = samples([4, 48, 21], [7, 147, 57], [9, 243, 91], [5, 75, 31])
    assert (
        fit(rows[:3], [0]) is None
    )  # of three numbers each is something of a length and its square
    assert fit([row[:2] for row in rows[:3]], [0]).predicted([6]).tolist() == [6, 108]
    assert fit(rows, [0]).predicted([6]).tolist() == [6, 108, 43]


def test_two_lengths_that_were_equal_by_chance_are_told_apart_later():
    rows = samples([5, 5], [9, 9], [7, 8])
    assert fit(rows[:2], [0, 1]).lengths_of(rows[2]) is None
    assert fit(rows, [0, 1]).lengths_of(np.array([3, 4])) == (3, 4)


@pytest.mark.parametrize(
    "rows", [([4, 2], [7, 3], [9, 3]), ([4, 64], [7, 343], [9, 729]), ([4, 1], [7, 2], [8, 9])]
)
def test_what_is_no_whole_multiple_is_not_fitted(rows):
    assert fit(samples(*rows), [0]) is None


def test_only_sizes_are_lengths():
    assert fit(samples([4, 8], [7, 14]), []) is None


def test_limits_are_powers_of_two_and_half_more():
    assert [rounded(n) for n in (2, 3, 4, 5, 7, 12, 13, 17, 25, 384, 385)] == [
        2, 3, 4, 6, 8, 12, 16, 24, 32, 384, 512,
    ]  # fmt: skip


def test_short_lengths_share_a_program():
    assert wanted([9], [512]) == wanted([60], [512]) == (64,)
    assert suffices((96,), (64,)) and not suffices((128,), (64,))


def test_a_length_that_grows_gets_room():
    room = [wanted([n], [n], growing=True) for n in (4, 60, 66, 129)]
    assert room == [(256,), (256,), (256,), (384,)]
    # the buffers have the size of other programs' where results are longer by one
    assert wanted([4], [4], growing=True, room=(1,)) == (255,)


def test_fixed_sizes_of_the_step_may_limit_a_length():
    tried = candidates((384,), (290,), (17,), [300, 64])
    assert tried == [((2,), (384,)), ((17,), (384,)), ((2,), (300,)), ((17,), (300,))]
    # the step takes one more than its length, and twice as many
    tried = candidates((384,), (140,), (17,), [300], [(0, 1, 1), (0, 2, 0)])
    assert [high for _, (high,) in tried[::2]] == [384, 299, 150]


def numbers_of(length, batch):
    half, quarter = (length + 1) // 2, ((length + 1) // 2) // 2
    return np.array(
        [batch, 3, length, 7, half, quarter, quarter * quarter * 5, batch * quarter, length + 2]
    )


def test_a_fit_finds_parts_of_parts():
    lengths = (17, 24, 21, 30, 33)
    fitted = fit([numbers_of(length, 4) for length in lengths[:4]], [0, 2, 4, 5])
    assert fitted is not None and fitted.lengths == (2,)
    assert len(fitted.floors) == 2
    for length in (*lengths, 100, 37):
        assert fitted.lengths_of(numbers_of(length, 4)) == (length,)
    wrong = numbers_of(33, 4)
    wrong[5] += 1
    assert fitted.lengths_of(wrong) is None
    assert fitted.at_most({5: 6}, (64,)) == (26,)


def test_a_fit_of_a_batch_and_parts_of_a_length():
    steps = [(17, 4), (24, 3), (21, 6), (30, 5), (26, 8)]
    fitted = fit([numbers_of(*step) for step in steps], [0, 2, 4, 5])
    assert fitted is not None
    assert fitted.lengths_of(numbers_of(39, 2)) == (2, 39)


def pyramid_of(height, width, boxes):
    """Numbers of a step of a detector whose levels have strides of 2, 4 and 8, and 9 anchors for each place."""
    levels = [(-(-height // stride), -(-width // stride)) for stride in (2, 4, 8)]
    places = [h * w for h, w in levels]
    total = sum(places)
    numbers = [*itertools.chain(*levels), *places, *(9 * n for n in places), total, 9 * total]
    ends = [places[0], places[0] + places[1], total - 1]
    return np.array([height, width, *numbers, boxes, total * boxes, *ends])


def test_a_fit_of_a_pyramid_and_boxes():
    steps = [(53, 80, 3), (97, 64, 5), (71, 91, 2), (60, 103, 7), (85, 58, 4)]
    samples = [pyramid_of(*step) for step in steps]
    sizes = range(17)
    # without boxes four steps are enough
    fitted = fit([sample[:16] for sample in samples[:4]], sizes[:16])
    assert fitted is not None
    assert fitted.lengths_of(pyramid_of(121, 47, 6)[:16]) == (121, 47)
    fitted = fit(samples, sizes)
    assert fitted is not None
    assert fitted.lengths_of(pyramid_of(121, 47, 6)) == (121, 47, 6)
    wrong = pyramid_of(121, 47, 6)
    wrong[14] += 1
    assert fitted.lengths_of(wrong) is None


def test_three_steps_do_not_tell_a_part_from_another_length():
    assert fit([numbers_of(length, 4) for length in (17, 24, 21)], [0, 2, 4, 5]) is None
