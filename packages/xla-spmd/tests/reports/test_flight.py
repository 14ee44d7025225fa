"""What XLA's partitioner puts between devices is in the flight recorder, worked out once for each program."""

from __future__ import annotations

import torch

import torch_xla
import torch_xla.distributed.spmd as xs
from xla_core.support import flight_ring
from xla_spmd.reports import flight_collectives


def test_each_launch_has_the_collectives_of_its_program(mesh, monkeypatch):
    looked = []
    rows_of = flight_collectives.rows_of
    monkeypatch.setattr(
        flight_collectives, "rows_of", lambda hlo: looked.append(hlo) or rows_of(hlo)
    )
    w = xs.mark_sharding(torch.randn(16, 24).to("xla"), mesh, ("model", None)).global_tensor
    for _ in range(3):
        x = xs.mark_sharding(torch.randn(8, 16).to("xla"), mesh, ("data", "model")).global_tensor
        y = x @ w  # each device has a part of the sum
        torch_xla.sync()
    assert y.shape == (8, 24)
    launched = [r for r in flight_ring.records() if r[0] == flight_ring.LAUNCH][-3:]
    (name,) = {record[4] for record in launched}
    (rows,) = flight_ring.programs(launched).values()
    assert list(flight_ring.programs(launched)) == [name]
    # (8, 24) of float32 over 4 rows of devices: (2, 24) on each, summed over the two of a row
    row = next(row for row in rows if row["kind"] == "all-reduce")
    assert (row["count"], row["bytes"]) == (1, 2 * 24 * 4)
    assert row["groups"]
    assert len([hlo for hlo in looked if f"HloModule {name}" in hlo]) == 1


MODULE = """HloModule step_1, num_partitions=4

FileNames
1 "/home/me/train.py"

FunctionNames
1 "f"

FileLocations
1 {file_name_id=1 function_name_id=1 line=8 end_line=8 column=0 end_column=0}

StackFrames
1 {file_location_id=1 parent_frame_id=1}

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
}

ENTRY %main (p: f32[2,8]) -> f32[2,8] {
  %p = f32[2,8]{1,0} parameter(0)
  %ar = f32[2,8]{1,0} all-reduce(%p), channel_id=1, replica_groups={{0,1},{2,3}}, to_apply=%add, metadata={op_name="x" stack_frame_id=1}
  %ar.1 = f32[2,8]{1,0} all-reduce(%ar), channel_id=2, replica_groups={{0,1},{2,3}}, to_apply=%add, metadata={op_name="x" stack_frame_id=1}
  %cp = f32[2,8]{1,0} collective-permute(%ar.1), channel_id=3, source_target_pairs={{0,1},{1,0}}, metadata={op_name="step_1/aten.roll.default/slice"}
  ROOT %ag = f32[8,8]{1,0} all-gather(%cp), channel_id=4, replica_groups=[1,4]<=[4], dimensions={0}, metadata={source_file="a.py" source_line=3}
}
"""  # noqa: E501 - as XLA writes it


def test_equal_ones_are_one_row_with_groups_and_line():
    gathers, reduces, permutes = flight_collectives.rows_of(MODULE)
    assert gathers == {
        "kind": "all-gather", "count": 1, "bytes": 256, "groups": "[1,4]<=[4]", "line": "a.py:3"
    }  # fmt: skip
    assert reduces == {
        "kind": "all-reduce", "count": 2, "bytes": 128, "groups": "{{0,1},{2,3}}",
        "line": "/home/me/train.py:8",
    }  # fmt: skip
    assert permutes == {
        "kind": "collective-permute", "count": 1, "bytes": 64, "groups": "{{0,1},{1,0}}",
        "line": "aten.roll.default",
    }  # fmt: skip
