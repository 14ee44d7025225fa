"""Prints recorded steps as text, Graphviz and HLO in torch_xla's formats, and describes single tensors."""

from __future__ import annotations

import contextlib
import itertools
import re
import weakref
from collections.abc import Iterator, Sequence
from typing import Final

import torch

from xla_core.contract.device_protocol import Program
from xla_core.extension_api import programs, runtime, steps
from xla_core.extension_api.operators import schema_of
from xla_core.extension_api.programs import node_text
from xla_core.extension_api.programs import shape_text as layout_text
from xla_core.extension_api.source_location import SourceLocation
from xla_core.extension_api.steps import (
    Entry,
    Input,
    Lift,
    Operation,
    Ref,
    TensorMeta,
    Trace,
    excerpt,
    graph_of,
    is_pending,
    needed_entries,
    tensor_meta,
)
from xla_core.extension_api.tensors import XLATensor, storage_of, view_of
from xla_debug import settings
from xla_debug.steps.hlo_form import torch_xla_form

_LONGEST: Final = 64  # torch_xla cuts values in Graphviz labels to this length
_HLO_NAME: Final = "IrToHlo"


class _IrDebug:
    """The value that ``set_ir_debug`` has set, which overrides XLA_IR_DEBUG; None if it was not called."""

    forced: bool | None = None


def set_ir_debug(on: bool) -> None:
    """Set whether texts of graphs have Python lines, overriding ``XLA_IR_DEBUG``."""
    _IrDebug.forced = on


def ir_debug() -> bool:
    """Whether texts of graphs have Python lines."""
    return settings.IR_DEBUG.get() if _IrDebug.forced is None else _IrDebug.forced


def shape_text(meta: TensorMeta | None) -> str:
    """The shape of a value as ``f32[2,3]{1,0}``; that of a scalar, without a layout, as ``f32[]``."""
    return "()" if meta is None else layout_text(meta).removesuffix("{}")


class _Node:
    """One line of the text: an operation, an input or a lifted number."""

    def __init__(
        self,
        name: str,
        metas: Sequence[TensorMeta | None],
        operands: list[str],
        entry: Entry | None,
    ) -> None:
        self.name = name
        self.shape = (
            shape_text(metas[0]) if len(metas) == 1 else f"({', '.join(map(shape_text, metas))})"
        )
        self.operands = operands
        self.attributes: list[str] = []
        self.values: list[str] = []
        self.where: SourceLocation | None = entry.where if entry is not None else None
        self.roots: list[int] = []

    def tags(self, located: bool) -> Iterator[str]:
        """The texts behind the operands; with ``located``, scope and Python line are among them."""
        yield from self.attributes
        if located and self.where is not None:
            frame = self.where.inner or (self.where.frames[0] if self.where.frames else None)
            if self.where.scope:
                yield f"scope={self.where.scope}"
            if frame is not None:
                yield f"location={frame.function}@{frame.filename.rpartition('/')[2]}:{frame.line}"
        yield f"xla_shape={self.shape}"
        yield from self.values
        yield from (f"ROOT={i}" for i in self.roots)


class _Graph:
    """The nodes that ``outputs`` need, in program order."""

    def __init__(self, entries: Sequence[Entry], outputs: Sequence[int]) -> None:
        self.nodes: list[_Node] = []
        self.names: dict[int, str] = {}
        needed = {e.first for e in needed_entries(entries, outputs)}
        read: set[int] = set(outputs)
        for entry in needed_entries(entries, outputs):
            read.update(ref.vid for ref in entry.references())
        for entry in entries:
            if entry.first in needed and (isinstance(entry, Operation) or entry.first in read):
                self._add(entry)
        for position, vid in enumerate(outputs):
            self.nodes[int(self.names[vid].partition(".")[0][1:])].roots.append(position)

    def _add(self, entry: Entry) -> None:
        operands: list[str] = []
        attributes: list[str] = []
        name = "xla::device_data"
        if isinstance(entry, Operation):
            name = str(schema_of(entry.plan.overload).name)
            schema = schema_of(entry.plan.overload).arguments
            names = [a.name for a in schema]
            numbers = {a.name for a in schema if str(a.type) == "number"}
            scalar = _scalar_meta(entry)
            positional = [
                (names[i] if i < len(names) else f"argument{i}", value)
                for i, value in enumerate(entry.args)
            ]
            for label, value in (*positional, *entry.kwargs.items()):
                if label in numbers and isinstance(value, (int, float)):
                    operands.append(self._constant(value, scalar))
                else:
                    self._argument(label, value, operands, attributes, scalar)
        number = len(self.nodes)
        node = _Node(name, entry.metas, operands, entry)
        node.attributes = attributes
        self.nodes.append(node)
        for i in range(len(entry.metas)):
            self.names[entry.first + i] = f"%{number}" + (f".{i}" if len(entry.metas) > 1 else "")

    def _argument(
        self,
        label: str,
        value: object,
        operands: list[str],
        attributes: list[str],
        scalar: TensorMeta,
    ) -> None:
        if isinstance(value, Ref):
            operands.append(self.names[value.vid])
        elif isinstance(value, Lift):
            operands.append(self._number(value, scalar))
        elif isinstance(value, (list, tuple)) and any(isinstance(v, (Ref, Lift)) for v in value):
            for item in value:
                self._argument(label, item, operands, attributes, scalar)
        elif value is not None:
            shown = list(value) if isinstance(value, tuple) else value
            attributes.append(f"{label}={shown}")

    def _constant(self, value: float, scalar: TensorMeta) -> str:
        """Add a node for a number that is compiled into the program, and return its name."""
        node = _Node("prim::Constant", (scalar,), [], None)
        node.values = [f"value={value}"]
        self.nodes.append(node)
        return f"%{len(self.nodes) - 1}"

    def _number(self, lift: Lift, scalar: TensorMeta) -> str:
        """Add a node for a lifted number, and return its name."""
        meta = lift.example
        if not isinstance(meta, TensorMeta):
            fits = scalar.dtype.is_floating_point or not lift.is_float
            meta = scalar if fits else tensor_meta((), torch.float64)
        self.nodes.append(_Node("xla::device_data", (meta,), [], None))
        return f"%{len(self.nodes) - 1}"


def _scalar_meta(entry: Entry) -> TensorMeta:
    """The meta of a number among an operation's operands: a scalar of the result's dtype."""
    dtype = next((m.dtype for m in entry.metas if m is not None), torch.float32)
    return tensor_meta((), torch.int64 if dtype is torch.bool else dtype)


def graph_as_text(
    entries: Sequence[Entry], outputs: Sequence[int], lines: bool | None = None
) -> str:
    """The operations that compute ``outputs``, as torch_xla's text ``IR { ... }``.

    ``lines`` says whether Python lines are added (default: as ``ir_debug()`` says).
    """
    located = ir_debug() if lines is None else lines
    rows = ["IR {"]
    for number, node in enumerate(_Graph(entries, outputs).nodes):
        tags = ", ".join(node.tags(located))
        rows.append(f"  %{number} = {node.shape} {node.name}({', '.join(node.operands)}), {tags}")
    return "\n".join([*rows, "}", ""])


def graph_as_dot(entries: Sequence[Entry], outputs: Sequence[int]) -> str:
    """The operations that compute ``outputs``, as a Graphviz digraph."""
    nodes = _Graph(entries, outputs).nodes
    lines = ["digraph G {"]
    for number, node in enumerate(nodes):
        parts = [node.name, node.shape, *(t[:_LONGEST] for t in node.tags(ir_debug()))]
        label = "\\n".join(part.replace('"', '\\"') for part in parts)
        lines.append(f'  node{number} [label="{label}"]')
    for number, node in enumerate(nodes):
        for index, operand in enumerate(node.operands):
            source, _, output = operand[1:].partition(".")
            notes = [f"i={index}"] if len(node.operands) > 1 else []
            notes += [f"o={output}"] if output else []
            label = f' [label="{",".join(notes)}"]' if notes else ""
            lines.append(f"  node{source} -> node{number}{label}")
    return "\n".join([*lines, "}", ""])


def graph_as_hlo(stablehlo: bytes) -> str:
    """A lowered program as HLO text; with ``XLA_HLO_DEBUG``, each operation has its Python line."""
    return torch_xla_form(inline_lines(programs.hlo_text(stablehlo, tupled=True)))


_TABLE: Final = re.compile(
    r"\n(?:FileNames|FunctionNames|FileLocations|StackFrames)\n(?:\d+ .*\n)*", re.M
)
_FILE: Final = re.compile(r'^(\d+) "(.*)"$', re.M)
_LOCATION: Final = re.compile(r"^(\d+) \{file_name_id=(\d+) function_name_id=\d+ line=(\d+)", re.M)
_FRAME: Final = re.compile(r"^(\d+) \{file_location_id=(\d+)", re.M)
_METADATA: Final = re.compile(r'metadata=\{op_name="([^"]*)"(?: stack_frame_id=(\d+))?\}')
_OPERATOR: Final = re.compile(r"([a-z]\w*)\.(\w+)\.\w+$")


def inline_lines(hlo: str) -> str:
    """HLO text with files and lines in the metadata of each operation, instead of tables that it refers to.

    ``metadata={op_type="aten__mm" op_name="Net/fc/aten__mm" source_file="train.py" source_line=7}`` is the form
    that HLO had before it got the tables, and that scripts search.
    """
    sections = {t.strip().partition("\n")[0]: t for t in _TABLE.findall(hlo)}
    files = dict(_FILE.findall(sections.get("FileNames", "")))
    places = {i: (files.get(f, ""), n) for i, f, n in _LOCATION.findall(hlo)}
    lines = {i: places[place] for i, place in _FRAME.findall(hlo) if place in places}

    def written(match: re.Match[str]) -> str:
        scope, operator = _split_name(match[1])
        parts = [f'op_type="{operator}"', f'op_name="{scope}{operator}"']
        if match[2] in lines:
            filename, line = lines[match[2]]
            parts += [f'source_file="{filename}"', f"source_line={line}"]
        return "metadata={" + " ".join(parts) + "}"

    return _METADATA.sub(written, _TABLE.sub("", hlo))


def _split_name(name: str) -> tuple[str, str]:
    """Scope and operator of an operation's name ``program/Net/fc/aten.mm.default/dot_general``."""
    parts = name.split("/")
    for index in range(len(parts) - 1, -1, -1):
        match = _OPERATOR.match(parts[index])
        if match:
            scope = "/".join(parts[1:index])
            return (f"{scope}/" if scope else ""), f"{match[1]}__{match[2]}"
    return "", parts[-1]


# -- graphs and descriptions of tensors ---------------------------------------------------------


def tensors_text(tensors: Sequence[torch.Tensor]) -> str:
    """The pending operations that compute ``tensors``, as text. Runs nothing and does not change the step."""
    with graph_of(tensors) as (_, entries, outputs):
        return graph_as_text(entries, outputs)


def tensors_dot(tensors: Sequence[torch.Tensor]) -> str:
    """The pending operations that compute ``tensors``, as a Graphviz digraph."""
    with graph_of(tensors) as (_, entries, outputs):
        return graph_as_dot(entries, outputs)


def tensors_hlo(tensors: Sequence[torch.Tensor]) -> str:
    """The pending operations that compute ``tensors``, as HLO before any compiler pass.

    With ``XLA_DUMP_POST_OPTIMIZATIONS`` it is the compiled program of one device, after the compiler's passes. That
    of a program over a mesh contains the collectives.
    """
    if not settings.DUMP_POST_OPTIMIZATIONS.get():
        return graph_as_hlo(tensors_stablehlo(tensors))
    with _lowered(tensors) as (trace, program):
        return programs.compile_program(trace.backend.client, program).optimized_hlo()


def tensors_stablehlo(tensors: Sequence[torch.Tensor]) -> bytes:
    """The pending operations that compute ``tensors``, as StableHLO bytecode."""
    with _lowered(tensors) as (_, program):
        return program.stablehlo


@contextlib.contextmanager
def _lowered(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[Trace, Program]]:
    """The trace in which ``tensors`` are pending, and a program that computes only them."""
    with graph_of(tensors) as (trace, entries, outputs):
        if trace.backend.virtual_name is None and not trace.backend.replicas:
            entries, outputs = excerpt(entries, outputs)
        distinct = tuple(dict.fromkeys(outputs))
        layout = trace.backend.layout(trace, entries, distinct, ())
        yield trace, programs.lower_step(trace, entries, distinct, layout, _HLO_NAME)


def tensors_report(nodes_threshold: int = 100, device: str = "") -> str:
    """The pending tensors of ``device`` (default: the current one) that have large graphs, with their graphs.

    These are the graphs with at least ``nodes_threshold`` nodes (default: 100), largest first. A graph that grows
    from step to step keeps values that are not needed.
    """
    trace = runtime.trace_of(device or None)
    real = runtime.real_name(trace.device)
    with trace.lock:
        pending_storages = steps.wanted(trace)[0]
        entries = trace.cur.path()
    large = []
    for storage in pending_storages:
        count = len(_Graph(entries, (storage.vid,)).nodes)
        if count >= nodes_threshold:
            large.append((count, storage))
    blocks = []
    for count, storage in sorted(large, key=lambda pair: -pair[0]):
        shape = shape_text(storage.meta)
        head = f"Tensor: id={id(storage)}, shape={shape}, device={real}, ir_nodes={count}"
        blocks.append(f"{head}\n{graph_as_text(entries, (storage.vid,))}")
    return "\n".join(blocks)


def tensor_debug_info(tensor: object) -> str:
    """The current state of a tensor as text: its device, shape, sharding, pending operation and data."""
    if not isinstance(tensor, XLATensor):
        return "Not a XLATensor\n"
    storage, view = storage_of(tensor), view_of(tensor)
    backend = storage.trace.backend
    device = backend.virtual_name or runtime.real_name(storage.trace.device)
    sharding = backend.sharding_text(storage) if view is None else None
    shape = shape_text(storage.meta if view is None else view.meta).partition("{")[0]
    lines = [
        "XLATensor {",
        f"TensorID: {_number(tensor)}",
        f"AliasID: {_number(storage)}",
        f"Device: {device}",
        f"XLA Shape: {shape}",
        f"ShardingSpec: {sharding}",
        f"IR: {_pending_text(tensor, device)}",
    ]
    if storage.buffer is None or is_pending(tensor):
        lines.append("XLAData: None")
    else:
        lines += [
            "XLAData: " if sharding is None else "XLAShardedData: ",
            f"  Data Device: {device}",
            f"  Data Shape: {shape_text(storage.meta).partition('{')[0]}",
            f"  Data Handle: {_number(storage.buffer)}",
        ]
        if sharding is not None:
            lines += [f"  OpSharding: {sharding}", f"  NumShards: {backend.shard_count()}"]
    return "\n".join([*lines, "Tensor on host: None", "}", ""])


# The numbers of tensors, storages and buffers in texts, by their ids. An entry is removed with its object.
_numbers: dict[int, tuple[weakref.ref[object], int]] = {}
_next_number: Final = itertools.count(1)


def _number(described: object) -> int:
    """A small number of a tensor, storage or buffer, which no other object ever gets."""
    key = id(described)
    entry = _numbers.get(key)
    if entry is None:
        removal = weakref.ref(described, lambda _: _numbers.pop(key, None))
        entry = _numbers[key] = removal, next(_next_number)
    return entry[1]


def _pending_text(tensor: XLATensor, device: str) -> str:
    if not is_pending(tensor) and view_of(tensor) is None:
        return "None"
    with graph_of([tensor]) as (_, entries, (vid,)):
        maker = next(e for e in reversed(entries) if e.first <= vid < e.end)
        return node_text(maker) + (f", device={device}" if isinstance(maker, Input) else "")
