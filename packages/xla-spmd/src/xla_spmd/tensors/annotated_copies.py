"""Copies of annotated tensors are annotated too, as in torch_xla: ``clone()``, ``copy.deepcopy``."""

from __future__ import annotations

from typing import Final

import torch

from xla_core.extension_api.operators import (
    NamedOperands,
    Operand,
    Operands,
    handler_of,
    set_handler,
)
from xla_core.extension_api.tensors import XLATensor, storage_of
from xla_core.support.once import Once
from xla_spmd.sharding.annotation import annotation_of
from xla_spmd.tensors.marking import set_annotation

_installed: Final = Once()


def keep_annotations() -> None:
    """From now on, let ``clone`` give its result the annotation of its operand. Later calls do nothing."""
    if not _installed.begin():
        return
    plain = handler_of(torch.ops.aten.clone.default)

    def clone(args: Operands, kwargs: NamedOperands | None) -> Operand:
        copy = plain(args, kwargs)
        source = args[0]
        annotation = annotation_of(source) if isinstance(source, XLATensor) else None
        # inside the body of a computation, XLA propagates the operands' shardings
        if annotation is not None and storage_of(source).trace.body_recorder is None:
            set_annotation(copy, annotation)
        return copy

    set_handler(torch.ops.aten.clone.default, clone)
