"""Modules as text: what is counted in them."""

from __future__ import annotations

import re

import pytest

from xla_plan.compiled import hlo_module, hlo_work
from xla_plan.compiled.collectives import by_kind, collectives

# ruff: noqa: E501
MODULE = """HloModule step_1, is_scheduled=true

FileNames
1 "/home/me/train.py"
2 "/home/me/model.py"

FunctionNames
1 "main"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=0 end_column=0}
2 {file_name_id=2 function_name_id=1 line=31 end_line=31 column=0 end_column=0}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
5 {file_location_id=2 parent_frame_id=1}

%fused (p0: bf16[8,32], p1: bf16[32,16]) -> f32[8,16] {
  %p0 = bf16[8,32]{1,0:T(8,128)(2,1)} parameter(0)
  %p1 = bf16[32,16]{1,0:T(8,128)(2,1)} parameter(1)
  ROOT %convolution.1 = f32[8,16]{1,0:T(8,128)} convolution(%p0, %p1), dim_labels=bf_io->bf
}

%body (values: (u32[], f32[8,16])) -> (u32[], f32[8,16]) {
  %values = (u32[]{:T(128)}, f32[8,16]{1,0}) parameter(0)
  %counter = u32[]{:T(128)} get-tuple-element(%values), index=0
  %one = u32[]{:T(128)} constant(1)
  %next = u32[]{:T(128)} add(%counter, %one)
  %again = u32[]{:T(128)} add(%next, %one)
  %x = f32[8,16]{1,0} get-tuple-element(%values), index=1
  %sent = (f32[8,16]{1,0}, f32[8,16]{1,0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%x), channel_id=3, source_target_pairs={{0,1},{1,0},{2,3},{3,2}}, metadata={op_name="a" stack_frame_id=5}
  %came = f32[8,16]{1,0} collective-permute-done(%sent)
  %y = f32[8,16]{1,0:T(8,128)S(1)} add(%came, %came), backend_config={"window_config":{"estimated_cycles":"100"}}
  ROOT %out = (u32[]{:T(128)}, f32[8,16]{1,0}) tuple(%again, %y)
}

%condition (values.1: (u32[], f32[8,16])) -> pred[] {
  %values.1 = (u32[]{:T(128)}, f32[8,16]{1,0}) parameter(0)
  %count = u32[]{:T(128)} get-tuple-element(%values.1), index=0
  %limit = u32[]{:T(128)} constant(10)
  ROOT %less = pred[]{:T(512)} compare(%count, %limit), direction=LT
}

ENTRY %main (a: bf16[8,32], b: bf16[32,16]) -> f32[8,16] {
  %a = bf16[8,32]{1,0:T(8,128)(2,1)} parameter(0)
  %b = bf16[32,16]{1,0:T(8,128)(2,1)} parameter(1)
  %zero = u32[]{:T(128)} constant(0)
  %product = f32[8,16]{1,0:T(8,128)} fusion(%a, %b), kind=kOutput, calls=%fused, backend_config={"window_config":{"estimated_cycles":"40"}}
  %start = (u32[]{:T(128)}, f32[8,16]{1,0}) tuple(%zero, %product)
  %loop = (u32[]{:T(128)}, f32[8,16]{1,0}) while(%start), condition=%condition, body=%body
  %result = f32[8,16]{1,0} get-tuple-element(%loop), index=1
  ROOT %gathered = f32[32,16]{1,0} all-gather(%result), channel_id=4, replica_groups={{0,1,2,3}}, dimensions={0}, metadata={op_name="b" stack_frame_id=1}
}
"""


@pytest.fixture(scope="module")
def module():
    return hlo_module.parse(MODULE)


def test_products_and_cycles_count_with_each_pass_of_a_loop(module):
    found = hlo_work.work(module)
    assert found.flops == 2 * 8 * 32 * 16
    assert found.cycles == 40 + 5 * 100  # from 0 to 10 by 1 + 1
    assert found.unknown_loops == 0


def test_a_loop_that_ends_at_a_value_counts_once():
    unknown = MODULE.replace(
        "%limit = u32[]{:T(128)} constant(10)", "%limit = u32[]{:T(128)} iota()"
    )
    found = hlo_work.work(hlo_module.parse(unknown))
    assert (found.cycles, found.unknown_loops) == (140, 1)


def test_a_loop_whose_body_ends_with_a_fusion_counts_once():
    text = MODULE.replace("tuple(%again, %y)", "fusion(%again), kind=kLoop, calls=%fused")
    text = text.replace("index=0\n  %limit", "index=1\n  %limit")
    assert hlo_work.work(hlo_module.parse(text)).unknown_loops == 1


def test_what_lies_on_the_chip_is_no_hbm_traffic(module):
    elsewhere = hlo_work.work(hlo_module.parse(MODULE.replace("{1,0:T(8,128)S(1)}", "{1,0}")))
    assert elsewhere.hbm_bytes - hlo_work.work(module).hbm_bytes == 5 * 4 * 8 * 16


IN_PIECES = """HloModule step_2, is_scheduled=true

%begun (from.1: bf16[8,32]) -> (bf16[8,32], bf16[32,32]) {
  %from.1 = bf16[8,32]{1,0:T(8,128)(2,1)} parameter(0)
  %gathered.1 = bf16[32,32]{1,0:T(8,128)(2,1)} all-gather(%from.1), channel_id=9, replica_groups={{0,1,2,3}}, dimensions={0}
  ROOT %both.1 = (bf16[8,32]{1,0}, bf16[32,32]{1,0}) tuple(%from.1, %gathered.1)
}

%async_collective_fusion.2 (from.2: bf16[8,32], to.2: bf16[32,32], x.2: bf16[16,16]) -> (bf16[16,16], bf16[8,32], bf16[32,32]) {
  %from.2 = bf16[8,32]{1,0:T(8,128)(2,1)} parameter(0)
  %to.2 = bf16[32,32]{1,0:T(8,128)(2,1)} parameter(1)
  %x.2 = bf16[16,16]{1,0:T(8,128)(2,1)} parameter(2)
  %gathered.2 = bf16[32,32]{1,0:T(8,128)(2,1)} all-gather(%from.2), channel_id=9, replica_groups={{0,1,2,3}}, dimensions={0}
  %y.2 = bf16[16,16]{1,0:T(8,128)(2,1)} multiply(%x.2, %x.2)
  ROOT %all.2 = (bf16[16,16]{1,0}, bf16[8,32]{1,0}, bf16[32,32]{1,0}) tuple(%y.2, %from.2, %gathered.2)
}

ENTRY %main (a: bf16[8,32], x: bf16[16,16]) -> (bf16[16,16], bf16[32,32]) {
  %a = bf16[8,32]{1,0:T(8,128)(2,1)} parameter(0)
  %x = bf16[16,16]{1,0:T(8,128)(2,1)} parameter(1)
  %async-collective-start = (bf16[8,32]{1,0:T(8,128)(2,1)}, bf16[32,32]{1,0:T(8,128)(2,1)}) fusion(%a), kind=kCustom, output_to_operand_aliasing={{0}: (0, {})}, calls=%begun
  %from = bf16[8,32]{1,0:T(8,128)(2,1)} get-tuple-element(%async-collective-start), index=0
  %to = bf16[32,32]{1,0:T(8,128)(2,1)} get-tuple-element(%async-collective-start), index=1
  %fusion.2 = (bf16[16,16]{1,0:T(8,128)(2,1)}, bf16[8,32]{1,0:T(8,128)(2,1)}, bf16[32,32]{1,0:T(8,128)(2,1)}) fusion(%from, %to, %x), kind=kOutput, output_to_operand_aliasing={{1}: (0, {}), {2}: (1, {})}, calls=%async_collective_fusion.2
  %y = bf16[16,16]{1,0:T(8,128)(2,1)} get-tuple-element(%fusion.2), index=0
  %all = bf16[32,32]{1,0:T(8,128)(2,1)} get-tuple-element(%fusion.2), index=2
  ROOT %out = (bf16[16,16]{1,0}, bf16[32,32]{1,0}) tuple(%y, %all)
}
"""
"""A gather in two pieces, the second beside a product: both fusions hand on its buffers."""


def test_a_gather_in_pieces_is_read_and_written_once():
    module = hlo_module.parse(IN_PIECES)
    gathered, beside = 2 * (8 * 32 + 32 * 32), 2 * (16 * 16 + 16 * 16)
    assert hlo_work.work(module).hbm_bytes == gathered + beside
    (gather,) = collectives(module)
    assert (gather.kind, gather.bytes, gather.times, gather.overlapped) == (
        "all-gather",
        2 * 32 * 32,
        1,
        True,
    )


def test_collectives_have_kind_size_and_line(module):
    permute, gather = sorted(collectives(module), key=lambda c: c.kind, reverse=True)
    assert (permute.kind, permute.bytes, permute.group, permute.times) == (
        "collective-permute",
        512,
        2,
        5,
    )
    assert permute.overlapped and permute.sent == 512 and permute.line == "model.py:31"
    assert (gather.kind, gather.bytes, gather.group, gather.times) == ("all-gather", 2048, 4, 1)
    assert not gather.overlapped and gather.sent == 1536 and gather.line == "train.py:7"
    rows = by_kind([permute, gather])
    assert [(r["kind"], r["count"], r["sent"]) for r in rows] == [
        ("collective-permute", 5, 2560),
        ("all-gather", 1, 1536),
    ]


@pytest.mark.parametrize(
    ("shapes", "operation", "size"),
    [
        ("(f32[8,16], f32[4,16])", "all-reduce-start(%x, %w)", 512 + 256),
        ("f32[8,16]", "all-reduce-start(%x)", 512),
        ("(f32[8,16], f32[16,16])", "all-gather-start(%x)", 1024),
    ],
)
def test_results_of_a_collective_that_only_starts(shapes, operation, size):
    line = f"{shapes} {operation}, channel_id=3, replica_groups={{{{0,1}}}}, metadata={{"
    text = re.sub(r"\(f32.* collective-permute-start.*metadata=\{", line, MODULE)
    (started,) = [one for one in collectives(hlo_module.parse(text)) if one.overlapped]
    assert started.bytes == size


def test_collectives_that_leave_a_slice(module):
    assert [c.crosses for c in collectives(module, 4)] == [False, False]
    assert {c.kind: c.crosses for c in collectives(module, 2)} == {
        "collective-permute": False,
        "all-gather": True,
    }


@pytest.mark.parametrize(
    ("groups", "size", "crosses"),
    [
        ("[2,2]<=[4]", 2, False),
        ("[2,2]<=[2,2]T(1,0)", 2, True),
        ("mesh['x'=2,'y'=2] {'y'}", 2, False),
        ("mesh['x'=2,'y'=2] {'x'}", 2, True),
        ("mesh['x'=2,'y'=2] {'x','y'}", 4, True),
    ],
)
def test_groups_in_all_their_spellings(groups, size, crosses):
    text = MODULE.replace("replica_groups={{0,1,2,3}}", f"replica_groups={groups}")
    (gather,) = (c for c in collectives(hlo_module.parse(text), 2) if c.kind == "all-gather")
    assert (gather.group, gather.crosses) == (size, crosses)


def test_a_collective_in_pieces_counts_once():
    pieces = MODULE.replace(
        "  ROOT %convolution.1",
        "  %piece = f32[32,16]{1,0} all-gather(%p0), channel_id=4, replica_groups={{0,1,2,3}}\n"
        "  ROOT %convolution.1",
    )
    found = [c for c in collectives(hlo_module.parse(pieces)) if c.kind == "all-gather"]
    assert len(found) == 1 and found[0].overlapped


@pytest.mark.parametrize(
    ("left", "right", "result", "attributes", "flops"),
    [
        # a product with two slices of a matrix at a time, as a TPU's compiler writes it
        ("8,1,32", "32,2,16", "8,2,16", "window={size=2 pad=1_1 rhs_reversal=1}, dim_labels=b0f_i0o->b0f",
         2 * 8 * 32 * 16 * 2),
        # an image convolution with padding: 3 x 3 windows, of which borders see less
        ("1,4,4,8", "3,3,8,16", "1,4,4,16", "window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f",
         2 * 8 * 16 * 10 * 10),
    ],
)  # fmt: skip
def test_convolutions(left, right, result, attributes, flops):
    text = f"""HloModule m

ENTRY %main (a: f32[{left}], b: f32[{right}]) -> f32[{result}] {{
  %a = f32[{left}]{{0}} parameter(0)
  %b = f32[{right}]{{0}} parameter(1)
  ROOT %c = f32[{result}]{{0}} convolution(%a, %b), {attributes}
}}
"""
    assert hlo_work.work(hlo_module.parse(text)).flops == flops


def test_what_is_no_module():
    with pytest.raises(ValueError, match="not a compiled HLO module"):
        hlo_module.parse("HloModule m\n")


@pytest.mark.parametrize(
    ("kind", "slices", "given", "size", "sent"),
    [
        ("ALL_REDUCE", "1,2", "f32[32,8,128]", 131072, 131072),
        ("ALL_GATHER", "1,2", "bf16[32,512]", 65536, 32768),
        ("REDUCE_SCATTER", "1:4", "f32[8,128]", 1024, 3072),
        ("ALL_TO_ALL", "1,3:4", "f32[6,128]", 3072, 2048),
        ("ONE_TO_ONE", "1,2", "f32[6,128]", 3072, 3072),
    ],
)
def test_what_goes_to_other_slices_is_sent_to_the_host(kind, slices, given, size, sent):
    """In the form of libtpu 0.0.42."""
    text = f"""HloModule step_1

ENTRY %main (a: {given}) -> {given} {{
  %a = {given}{{1,0}} parameter(0)
  %token = token[] after-all()
  %send = ({given}{{1,0:T(8,128)}}, u32[], token[]) send(%a, %token), channel_id=2, is_host_transfer=true, frontend_attributes={{_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_host_transfer_rendezvous="all-reduce.3_0",_xla_megascale_target="{{{slices}}}x{{0:3}}",_xla_megascale_transfer_type="{kind}"}}
  %done = token[] send-done(%send), channel_id=2, is_host_transfer=true
  ROOT %copy = {given}{{1,0}} copy(%a)
}}
"""
    (one,) = collectives(hlo_module.parse(text), chips_per_slice=4)
    assert one.crosses and (one.bytes, one.sent) == (size, sent)
    assert one.kind == kind.lower().replace("_", "-").replace("one-to-one", "collective-permute")
