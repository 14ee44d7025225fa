"""What docs/determinism.md promises of a job: run again, it gives the same bits, in every process."""

from __future__ import annotations

import dist_vitals


def test_a_job_gives_the_same_bits_again(launch):
    first, second = (launch(3, dist_vitals.trains_a_model).join() for _ in range(2))
    assert first == second
    assert first[0] == first[1] == first[2]  # the replicas have one model
