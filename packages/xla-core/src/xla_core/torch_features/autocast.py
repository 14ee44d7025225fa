"""``torch.autocast('xla')``: which operators compute in lower precision, and which never do.

The lists hold the operators that torch_xla 2.9 registers, and further ones of the same kind: the other overloads of
``pow``, and decompositions that have no kernel for short formats. The casts happen at the dispatch key
``AutocastXLA``, above autograd, so that a gradient has the dtype that its tensor had before the cast. An operator
that PyTorch composes of listed ones (``softmin``, overloads with names of dimensions) needs no entry; a listed
operator needs one entry for each overload.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch._ops import OpOverload

from xla_core.torch_bridge import torch_private
from xla_core.torch_bridge.operands import Operand

# Matrix products, convolutions, and what usually follows them run in the dtype of the autocast region.
LOWER_PRECISION: Final = (
    "matmul", "mm", "bmm", "addmm", "addmv", "addr", "addbmm", "baddbmm", "linear", "linalg_vecdot",
    "conv1d", "conv1d.padding", "conv2d", "conv2d.padding", "conv3d", "conv3d.padding",
    "_convolution", "_convolution.deprecated", "convolution", "conv_tbc", "conv_transpose1d",
    "conv_transpose2d.input", "conv_transpose3d.input", "prelu", "relu", "max_pool2d", "einsum",
    "scaled_dot_product_attention",
)  # fmt: skip

# These lose too much accuracy in a short format: normalization, powers, losses, products, decompositions.
FLOAT32: Final = (
    "batch_norm", "_softmax", "softmax.int", "_log_softmax", "log_softmax.int", "pow.Tensor_Scalar",
    "pow.Tensor_Tensor", "pow.Scalar", "binary_cross_entropy", "binary_cross_entropy_with_logits",
    "prod", "prod.dim_int", "cdist", "trace", "cholesky", "cholesky_inverse", "cholesky_solve",
    "inverse", "linalg_inv", "linalg_inv_ex", "pinverse",
    "reflection_pad1d", "reflection_pad2d", "reflection_pad3d", "replication_pad1d",
    "replication_pad2d", "replication_pad3d", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss",
    "kl_div", "poisson_nll_loss", "cosine_embedding_loss", "hinge_embedding_loss", "nll_loss",
    "nll_loss_nd", "nll_loss2d", "cross_entropy_loss", "margin_ranking_loss", "multi_margin_loss",
    "multilabel_margin_loss", "multilabel_margin_loss_forward", "soft_margin_loss",
    "triplet_margin_loss", "ctc_loss.Tensor", "ctc_loss.IntList", "qr", "linalg_qr", "svd",
    "linalg_svd", "linalg_svdvals", "linalg_eigh", "linalg_eigvalsh", "linalg_cholesky",
    "triangular_solve",
)  # fmt: skip

# Operators whose operands must have one dtype: they are cast to the widest of their dtypes.
WIDEST: Final = ("cat", "stack", "index_copy")

_FLOATS: Final = frozenset({torch.float32, torch.float16, torch.bfloat16})


def _cast(a: Operand, dtype: torch.dtype) -> Operand:
    if isinstance(a, torch.Tensor):
        # float64 stays as it is, as in autocast on PyTorch's other devices
        return a.to(dtype) if a.dtype in _FLOATS and a.dtype != dtype and _is_xla(a) else a
    if isinstance(a, (list, tuple)):
        return type(a)(_cast(item, dtype) for item in a)
    return a


def _is_xla(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "xla"


def _lower(args: Operand) -> torch.dtype:
    del args
    return torch.get_autocast_dtype("xla")


def _float32(args: Operand) -> torch.dtype:
    del args
    return torch.float32


def _widest(args: Operand) -> torch.dtype:
    return torch.float32 if _holds_float32(args) else torch.get_autocast_dtype("xla")


def _holds_float32(a: Operand) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == torch.float32
    return isinstance(a, (list, tuple)) and any(map(_holds_float32, a))


def _kernel(
    overload: OpOverload, choose: Callable[[Operand], torch.dtype]
) -> Callable[..., Operand]:
    def call(*args: Operand, **kwargs: Operand) -> Operand:
        with torch_private.without_autocast():
            dtype = choose((args, list(kwargs.values())))
            named = {name: _cast(value, dtype) for name, value in kwargs.items()}
            return overload(*(_cast(a, dtype) for a in args), **named)

    return call


def install() -> None:
    """Register the casts with PyTorch, once per process."""
    kernels = {}
    for names, choose in ((LOWER_PRECISION, _lower), (FLOAT32, _float32), (WIDEST, _widest)):
        for name in names:
            packet, _, overload_name = name.partition(".")
            operator = getattr(torch.ops.aten, packet, None)
            overload = getattr(operator, overload_name or "default", None)
            if overload is not None:  # this version of torch may lack an operator
                kernels[overload] = _kernel(overload, choose)
    torch_private.register_autocast(kernels)


class autocast(torch.autocast):
    """``torch.autocast`` for an ``xla`` device: ``with torch_xla.amp.autocast(torch_xla.device()):``.

    Matrix products and convolutions compute in ``dtype`` (default: ``torch.get_autocast_dtype('xla')``, at first
    bfloat16). ``cache_enabled`` is accepted and has no effect, since the compiler merges equal casts. Raises
    ValueError for another device than ``xla``.
    """

    def __init__(
        self,
        device: torch.device | str = "xla",
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        cache_enabled: bool = True,
    ) -> None:
        kind = torch.device(device).type
        if kind != "xla":
            raise ValueError(
                f"torch_xla.amp.autocast is for xla devices, got {device}; use torch.autocast('{kind}')"
            )
        super().__init__(kind, dtype, enabled, cache_enabled)
