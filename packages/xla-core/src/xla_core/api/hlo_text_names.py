"""Shapes and operations as torch_xla prints them."""

from __future__ import annotations

from typing import Final

import torch

from xla_core.operators.tensor_meta import TensorMeta
from xla_core.recording.entry import Entry, Operation
from xla_core.support import flags

_NAMES: Final = {
    torch.bool: "pred", torch.uint8: "u8", torch.uint16: "u16", torch.uint32: "u32",
    torch.uint64: "u64", torch.int8: "s8", torch.int16: "s16", torch.int32: "s32",
    torch.int64: "s64", torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32",
    torch.float64: "f64", torch.complex64: "c64", torch.complex128: "c128",
    torch.float8_e4m3fn: "f8e4m3fn", torch.float8_e5m2: "f8e5m2",
}  # fmt: skip

_NARROW: Final = {"s64": "s32", "u64": "u32"}


def shape_text(meta: TensorMeta) -> str:
    """A shape as HLO prints it: ``f32[2,3]{1,0}``. With ``XLA_USE_32BIT_LONG`` 64-bit integers are 32-bit ones."""
    sizes = ",".join(map(str, meta.shape))
    layout = ",".join(str(i) for i in reversed(range(len(meta.shape))))
    name = _NAMES[meta.dtype]
    if flags.USE_32BIT_LONG.get():
        name = _NARROW.get(name, name)
    return f"{name}[{sizes}]{{{layout}}}"


def node_text(entry: Entry) -> str:
    """An operation as torch_xla prints a node: ``[] aten::mul, xla_shape=f32[3,3]{1,0}, ...``."""
    name = "xla::device_data"
    if isinstance(entry, Operation):
        name = str(entry.plan.overload._schema.name)
    shapes = [shape_text(meta) for meta in entry.metas if meta is not None]
    text = shapes[0] if len(shapes) == 1 else f"({', '.join(shapes)})"
    return f"[] {name}, xla_shape={text}, dynamic_dims: ()"
