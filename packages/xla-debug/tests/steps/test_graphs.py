"""Graph dumps and what a tensor is made of, in torch_xla's formats."""

from __future__ import annotations

import re

import pytest
import torch
from torch import fx, nn

import torch_xla
from torch_xla import _XLAC
from torch_xla._dynamo import dynamo_bridge
from torch_xla.debug import graph_saver
from torch_xla.debug import profiler as xp
from xla_core.contract import events
from xla_core.extension_api import runtime
from xla_core.extension_api.programs import all_programs, module_text
from xla_core.extension_api.source_location import Detail, detail, set_detail
from xla_debug.live import saved_graphs
from xla_debug.steps import graphs


@pytest.fixture(autouse=True)
def fresh():
    torch_xla.sync()


@pytest.fixture
def ab():
    a, b = torch.ones(2, 3).to("xla"), torch.full((2, 3), 4.0).to("xla")
    torch_xla.sync()
    return a, b


def test_text(ab):
    a, b = ab
    text = _XLAC._get_xla_tensors_text([(a + b) * a])
    assert text.split("\n") == [
        "IR {",
        "  %0 = f32[2,3]{1,0} xla::device_data(), xla_shape=f32[2,3]{1,0}",
        "  %1 = f32[2,3]{1,0} xla::device_data(), xla_shape=f32[2,3]{1,0}",
        "  %2 = f32[2,3]{1,0} aten::add(%0, %1), xla_shape=f32[2,3]{1,0}",
        "  %3 = f32[2,3]{1,0} aten::mul(%2, %0), xla_shape=f32[2,3]{1,0}, ROOT=0",
        "}",
        "",
    ]


def test_text_of_several_results_numbers_and_attributes(ab):
    a, _ = ab
    values, indices = (a * 2.5).max(1)
    text = _XLAC._get_xla_tensors_text([indices, values])
    assert "%1 = f32[] xla::device_data(), xla_shape=f32[]" in text
    assert "aten::mul(%0, %1), xla_shape" in text
    (line,) = [line for line in text.split("\n") if "aten::max" in line]
    assert "(f32[2]{0}, s64[2]{0}) aten::max(%2), dim=1" in line
    assert line.endswith("ROOT=0, ROOT=1")
    assert "aten::add(%3.0, %3.1)" in _XLAC._get_xla_tensors_text([values + indices])


def test_hlo_of_a_tensor_has_its_own_inputs_only(ab):
    unrelated = torch.ones(7).to("xla")
    torch_xla.sync()
    unrelated = unrelated * 2.5
    wanted = ab[0] * 3.5 + ab[1] * 4.5
    hlo = _XLAC._get_xla_tensors_hlo([wanted])
    assert "f32[7]" not in hlo and "f32[2,3]" in hlo
    assert wanted.tolist() == [[21.5] * 3] * 2 and unrelated.tolist() == [2.5] * 7


def test_numbers_of_the_program_are_nodes(ab):
    a, _ = ab
    text = _XLAC._get_xla_tensors_text([a**5])
    assert "  %1 = f32[] prim::Constant(), xla_shape=f32[], value=5\n" in text
    assert "aten::pow(%0, %1), xla_shape=f32[2,3]{1,0}, ROOT=0" in text and "f64" not in text
    assert _XLAC._get_graph_hash([a**5]) != _XLAC._get_graph_hash([a**6])


def test_narrow_integers_are_told_as_the_device_keeps_them(ab, monkeypatch):
    monkeypatch.setenv("XLA_USE_32BIT_LONG", "1")
    text = _XLAC._get_xla_tensors_text([ab[0].argmax(1)])
    assert "s32[2]{0} aten::argmax" in text and "s64" not in text


def test_tensors_have_small_numbers(ab):
    texts = [_XLAC._get_xla_tensor_debug_info(t) for t in (*ab, ab[0])]
    first, second, again = (int(t.split("TensorID: ")[1].split("\n")[0]) for t in texts)
    assert 0 < first < second < 100_000 and again == first


def test_each_value_has_its_own_number():
    """A buffer of a later step may lie where one of an earlier step did."""
    t = torch.rand(64).to("xla")
    before, handles = len(graphs._numbers), []
    for _ in range(8):
        t.mul_(1.5)
        torch_xla.sync()
        t.sum().item()
        handles += re.findall(r"Data Handle: (\d+)", _XLAC._get_xla_tensor_debug_info(t))
    assert len(set(handles)) == len(handles) == 8
    assert len(graphs._numbers) <= before + 3  # of the tensor, its storage and its value


def test_looking_does_not_change_the_step(ab):
    a, b = ab
    z = b[0]
    torch_xla.sync()

    def step(look):
        y = a.t() @ b
        if look:
            assert "aten::mm" in _XLAC._get_xla_tensors_text([y])
            assert "aten::select" in _XLAC._get_xla_tensors_text([z])
            assert _XLAC._get_graph_hash([y])
        w = y.exp()
        trace = runtime.trace_of(None)
        before = trace.cur
        torch_xla.sync()
        return before, w

    first, one = step(False)
    second, two = step(True)
    third, three = step(False)
    assert first is second is third
    assert one.tolist() == two.tolist() == three.tolist()


def test_dot(ab):
    a, b = ab
    dot = _XLAC._get_xla_tensors_dot([(a + b).relu()])
    assert dot.startswith("digraph G {\n") and dot.endswith("}\n")
    assert 'node2 [label="aten::add\\nf32[2,3]{1,0}\\nxla_shape=f32[2,3]{1,0}"]' in dot
    assert '  node0 -> node2 [label="i=0"]\n  node1 -> node2 [label="i=1"]' in dot
    assert "  node2 -> node3\n" in dot and "ROOT=0" in dot


def test_hlo_without_and_with_lines(ab, monkeypatch):
    a, b = ab
    hlo = _XLAC._get_xla_tensors_hlo([a.t() @ b])
    assert hlo.startswith("HloModule IrToHlo") and "ENTRY %" in hlo
    assert re.search(
        r"= f32\[3,3\]\{1,0\} dot\(f32\[3,2\]\S* %\S+, f32\[2,3\]\{1,0\} %p1\.\d+\)", hlo
    )
    assert re.search(r"ROOT %tuple\S* = \(f32\[3,3\]\{1,0\}\) tuple\(f32\[3,3\]\{1,0\} %\S+\)", hlo)
    former = detail()
    set_detail(Detail.LINES)
    try:
        layer = nn.Linear(3, 2).to("xla")
        out = layer(a)
        hlo = _XLAC._get_xla_tensors_hlo([out])
    finally:
        set_detail(former)
    (line,) = [line for line in hlo.split("\n") if " dot(" in line]
    number = test_hlo_without_and_with_lines.__code__.co_firstlineno + 12
    assert (
        'metadata={op_type="aten__linear" op_name="Linear/aten__linear" '
        f'source_file="{__file__}" source_line={number}}}' in line
    )
    assert "stack_frame_id" not in hlo and "FileNames" not in hlo


def test_ir_debug_names_the_line(ab):
    layer = nn.Linear(3, 2).to("xla")
    out = layer(ab[0])
    plain = _XLAC._get_xla_tensors_text([out])
    assert "location=" not in plain
    _XLAC._set_ir_debug(True)
    try:
        assert _XLAC._get_ir_debug()
        text = _XLAC._get_xla_tensors_text([out])
    finally:
        _XLAC._set_ir_debug(False)
    assert re.search(
        r"aten::linear\(.*\), scope=Linear, location=forward@linear\.py:\d+, xla_shape", text
    )


def test_hashes_are_of_the_graph(ab):
    a, b = ab
    assert _XLAC._get_graph_hash([a + b]) == _XLAC._get_graph_hash([a + b])
    assert _XLAC._get_graph_hash([a + b]) != _XLAC._get_graph_hash([a - b])
    assert len(_XLAC._get_graph_hash([a])) == 16


def test_debug_info(ab):
    a, b = ab
    info = _XLAC._get_xla_tensor_debug_info(a)
    assert re.fullmatch(
        r"XLATensor \{\nTensorID: \d+\nAliasID: \d+\nDevice: CPU:0\nXLA Shape: f32\[2,3\]\n"
        r"ShardingSpec: None\nIR: None\nXLAData: \n  Data Device: CPU:0\n  Data Shape: f32\[2,3\]\n"
        r"  Data Handle: \d+\nTensor on host: None\n\}\n",
        info,
    )
    info = _XLAC._get_xla_tensor_debug_info((a + b).relu())
    assert "IR: [] aten::relu, xla_shape=f32[2,3]{1,0}, dynamic_dims: ()" in info
    assert "XLAData: None" in info
    assert _XLAC._get_xla_tensor_debug_info(torch.ones(2)) == "Not a XLATensor\n"


def test_other_tensors_are_refused():
    with pytest.raises(TypeError, match="xla device, got one on cpu"):
        _XLAC._get_xla_tensors_text([torch.ones(2)])


@pytest.mark.parametrize(
    ("form", "suffix"), [("text", "txt"), ("dot", "dot"), ("hlo", "hlo"), ("stablehlo", "mlir")]
)
def test_graph_saver(form, suffix, ab, tmp_path, monkeypatch):
    monkeypatch.setenv("SAVE_GRAPH_FMT", form)
    path = graph_saver.save_tensors_graph(str(tmp_path / "new"), "step", [ab[0] + 1])
    assert path == tmp_path / "new" / f"step.{suffix}"
    beginnings = {
        "text": "aten::add",
        "dot": "digraph",
        "hlo": "HloModule",
        "stablehlo": "stablehlo.add",
    }
    assert beginnings[form] in path.read_text()


@pytest.mark.parametrize(
    ("form", "sign"),
    [("text", "aten::erf"), ("dot", "aten::erf"), ("hlo", "erf"), ("stablehlo", "chlo.erf")],
)
def test_a_graph_of_torch_compile_is_saved(form, sign, tmp_path, monkeypatch):
    """Its own graph, and not the pending step, of which it is no part."""
    monkeypatch.setenv("XLA_SAVE_TENSORS_FILE", str(tmp_path / "graphs"))
    monkeypatch.setenv("XLA_SAVE_TENSORS_FMT", form)
    x = torch.rand(2, 7).to("xla")
    torch_xla.sync()
    unsubscribe = [
        events.subscribe(events.ProgramMissing, saved_graphs.on_missing),
        events.subscribe(events.ProgramExecuted, saved_graphs.on_executed),
    ]
    try:
        module = fx.symbolic_trace(lambda t: t.erf() * 2.5)
        graph = dynamo_bridge.extract_compiled_graph(module, [x])
        pending = x.cosh() + 1
        graph(x)
    finally:
        for undo in unsubscribe:
            undo()
    *_, saved = (tmp_path / "graphs.0").read_text().split("## BEGIN_GRAPH")
    assert sign in saved and "cosh" not in saved
    assert pending.shape == (2, 7)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(12)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_functions_of_repeats_are_named_after_their_modules():
    model = Deep().to("xla")
    optimizer = torch.optim.AdamW(model.parameters())
    with xp.Trace("/train/größe"):  # no name of a function
        model(torch.randn(4, 8).to("xla")).pow(2).sum().backward()
    optimizer.step()
    torch_xla.sync()
    step = max(all_programs(), key=lambda program: program.operations)
    text = module_text(step.program.stablehlo)
    names = set(re.findall(r"call @xla_repeat_\d+_(\w+)_\d+_operations\(", text))
    modules = ("train_gr_e_Deep_blocks_", "backward_train_gr_e_Deep_blocks_", "optimizer_")
    assert {m for m in modules if any(name.startswith(m) for name in names)} == set(modules), names


def test_hlo_after_the_compilers_passes(ab, monkeypatch):
    a, b = ab
    pending = (a + b) * (a - b)
    before = _XLAC._get_xla_tensors_hlo([pending])
    monkeypatch.setenv("XLA_DUMP_POST_OPTIMIZATIONS", "1")
    after = _XLAC._get_xla_tensors_hlo([pending])
    assert "fusion(" not in before and "is_scheduled=true" not in before
    assert "is_scheduled=true" in after and "fusion(" in after
    assert torch.equal(pending.cpu(), (a.cpu() + b.cpu()) * (a.cpu() - b.cpu()))
