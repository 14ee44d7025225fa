"""The optimizer with split state against PyTorch's own, which has the whole batch and all parameters."""

from __future__ import annotations

import dist_zero
import pytest

_ACCUMULATED = {"use_grad_acc_hook": True, "higher_cc_precision": True}
_BUCKETS = {"bucket_cap_mb_all_gather": 1, "bucket_cap_mb_reduce_scatter": 1}


@pytest.mark.parametrize(
    ("processes", "kind", "options"),
    [
        (2, "AdamW", {"max_norm": 0.3}),
        (4, "AdamW", {"grad_clipping": False, **_BUCKETS}),
        (2, "SGD", {"max_norm": 0.5, **_ACCUMULATED}),
        (4, "Adam", {"max_norm": 100.0}),
    ],
)
def test_it_equals_the_optimizer_that_has_everything(launch, processes, kind, options):
    for found in launch(processes, dist_zero.equals_the_whole_optimizer, kind, options).join():
        assert found["difference"] < 2e-6  # float32 rounding over four steps of size 0.05
        assert found["lr"] == [0.0125, 0.0125]
        if options.get("grad_clipping", True):
            assert found["norm"] == pytest.approx(found["expected_norm"], rel=1e-5)
        else:
            assert found["norm"] is None
        # 35 + 7 + 1 + 7 + 7 + 21 + 3 + 6 elements; rows padded to a multiple of the processes
        rows = {2: 20 + 4 + 1 + 4 + 4 + 14 + 2, 4: 10 + 2 + 1 + 2 + 2 + 7 + 1}[processes]
        steps = 7  # AdamW counts steps per parameter; the unused one has no state
        assert found["elements"] == (rows if kind == "SGD" else 2 * rows + steps)


def test_groups_split_within_themselves(launch):
    found = launch(4, dist_zero.splits_within_groups).join()
    for (least, most, shape), mean in zip(found, [0.5, 0.5, 2.5, 2.5], strict=True):
        assert (least, most) == pytest.approx((mean, mean), rel=1e-5)
        assert tuple(shape) == (4, 5)


@pytest.mark.parametrize(("options", "dtype"), [({}, "float32"), (_BUCKETS, "bfloat16")])
def test_a_saved_state_goes_on_where_it_was(launch, options, dtype):
    for equal, names in launch(2, dist_zero.resumes, options, dtype).join():
        assert equal
        assert names == [
            "base_state", "param_groups", "shape_info", "sharded_master_weights", "state",
        ]  # fmt: skip


def test_mistakes_are_named(launch):
    for texts in launch(2, dist_zero.is_misused).join():
        device, group, early, shapes = texts
        assert "on one xla device, got ['cpu']" in device
        assert "in none of sharding_groups" in group
        assert "call init_zero() before step()" in early
        assert "parameter 0 has shape (), but the state has shape (2, 2)" in shapes
