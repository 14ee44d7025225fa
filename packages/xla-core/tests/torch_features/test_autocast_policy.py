"""The dtype of every operator that ``torch.autocast('xla')`` casts, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch.nn import functional as F

import torch_xla  # noqa: F401 - registers the device
from xla_core.torch_features import autocast

_REAL: Final = torch.arange(1, 5, dtype=torch.float32) / 8
_MATRIX: Final = torch.tensor([[2.0, 0.5], [0.5, 1.0]])  # positive definite
_LABELS: Final = torch.tensor([1, 0])
_SIGNS: Final = torch.tensor([1.0, -1.0])


def _image(*shape: int) -> torch.Tensor:
    return torch.linspace(-0.5, 1, torch.Size(shape).numel()).reshape(shape)


_CONV: Final = ([1], [0], [1])

# The arguments of each operator; tensors of float32 are given to the device in another dtype.
ARGUMENTS: Final[dict[str, tuple[Any, ...]]] = {
    "matmul": (_MATRIX, _MATRIX),
    "mm": (_MATRIX, _MATRIX),
    "bmm": (_image(2, 2, 2), _image(2, 2, 2)),
    "addmm": (_MATRIX, _MATRIX, _MATRIX),
    "addmv": (_SIGNS, _MATRIX, _SIGNS),
    "addr": (_MATRIX, _SIGNS, _SIGNS),
    "addbmm": (_MATRIX, _image(2, 2, 2), _image(2, 2, 2)),
    "baddbmm": (_image(2, 2, 2), _image(2, 2, 2), _image(2, 2, 2)),
    "linear": (_MATRIX, _MATRIX, _SIGNS),
    "linalg_vecdot": (_MATRIX, _MATRIX),
    "conv1d": (_image(1, 2, 4), _image(2, 2, 2)),
    "conv1d.padding": (_image(1, 2, 4), _image(2, 2, 2), None, [1], "same"),
    "conv2d": (_image(1, 2, 4, 4), _image(2, 2, 2, 2)),
    "conv2d.padding": (_image(1, 2, 4, 4), _image(2, 2, 2, 2), None, [1, 1], "valid"),
    "conv3d": (_image(1, 1, 2, 2, 2), _image(1, 1, 2, 2, 2)),
    "conv3d.padding": (_image(1, 1, 2, 2, 2), _image(1, 1, 2, 2, 2), None, [1, 1, 1], "valid"),
    "_convolution": (
        *(_image(1, 2, 4), _image(2, 2, 2), None),
        *(*_CONV, False, [0], 1, False, False, False, False),
    ),
    "_convolution.deprecated": (
        *(_image(1, 2, 4), _image(2, 2, 2), None),
        *(*_CONV, False, [0], 1, False, False, False),
    ),
    "convolution": (_image(1, 2, 4), _image(2, 2, 2), None, *_CONV, False, [0], 1),
    "conv_tbc": (_image(4, 1, 2), _image(2, 2, 2), _SIGNS),
    "conv_transpose1d": (_image(1, 2, 4), _image(2, 2, 2)),
    "conv_transpose2d.input": (_image(1, 2, 4, 4), _image(2, 2, 2, 2)),
    "conv_transpose3d.input": (_image(1, 1, 2, 2, 2), _image(1, 1, 2, 2, 2)),
    "prelu": (_MATRIX, _SIGNS),
    "relu": (_MATRIX,),
    "max_pool2d": (_image(1, 2, 4, 4), [2, 2]),
    "einsum": ("ij,jk->ik", [_MATRIX, _MATRIX]),
    "scaled_dot_product_attention": (*[_image(1, 1, 2, 2)] * 3,),
    "batch_norm": (_image(4, 2), _SIGNS, _SIGNS, None, None, True, 0.1, 1e-5, False),
    "_softmax": (_MATRIX, 1, False),
    "softmax.int": (_MATRIX, 1),
    "_log_softmax": (_MATRIX, 1, False),
    "log_softmax.int": (_MATRIX, 1),
    "pow.Tensor_Scalar": (_MATRIX, 2),
    "pow.Tensor_Tensor": (_MATRIX, _MATRIX),
    "pow.Scalar": (2, _MATRIX),
    "binary_cross_entropy": (_REAL, _REAL),
    "binary_cross_entropy_with_logits": (_REAL, _REAL),
    "prod": (_MATRIX,),
    "prod.dim_int": (_MATRIX, 1),
    "cdist": (_MATRIX, _image(3, 2)),
    "trace": (_MATRIX,),
    "cholesky": (_MATRIX,),
    "cholesky_inverse": (_MATRIX,),
    "cholesky_solve": (_MATRIX, _MATRIX),
    "inverse": (_MATRIX,),
    "linalg_inv": (_MATRIX,),
    "linalg_inv_ex": (_MATRIX,),
    "pinverse": (_MATRIX,),
    "reflection_pad1d": (_image(1, 2, 4), [1, 1]),
    "reflection_pad2d": (_image(1, 2, 4, 4), [1] * 4),
    "reflection_pad3d": (_image(1, 1, 2, 2, 2), [1] * 6),
    "replication_pad1d": (_image(1, 2, 4), [1, 1]),
    "replication_pad2d": (_image(1, 2, 4, 4), [1] * 4),
    "replication_pad3d": (_image(1, 1, 2, 2, 2), [1] * 6),
    "mse_loss": (_REAL, _REAL + 1),
    "l1_loss": (_REAL, _REAL + 1),
    "smooth_l1_loss": (_REAL, _REAL + 1),
    "huber_loss": (_REAL, _REAL + 1),
    "kl_div": (_REAL, _REAL + 1),
    "poisson_nll_loss": (_REAL, _REAL + 1, True, False, 1e-8, 1),
    "cosine_embedding_loss": (_MATRIX, _MATRIX + 1, _SIGNS),
    "hinge_embedding_loss": (_MATRIX, _SIGNS),
    "nll_loss": (_MATRIX, _LABELS),
    "nll_loss_nd": (_MATRIX, _LABELS),
    "nll_loss2d": (_image(1, 2, 1, 2), _LABELS.view(1, 1, 2)),
    "cross_entropy_loss": (_MATRIX, _LABELS),
    "margin_ranking_loss": (_REAL[:2], _REAL[2:], _SIGNS),
    "multi_margin_loss": (_MATRIX, _LABELS),
    "multilabel_margin_loss": (_MATRIX, torch.tensor([[1, -1], [0, -1]])),
    "multilabel_margin_loss_forward": (_MATRIX, torch.tensor([[1, -1], [0, -1]]), 1),
    "soft_margin_loss": (_SIGNS / 2, _SIGNS),
    "triplet_margin_loss": (_MATRIX, _MATRIX + 1, _MATRIX - 1),
    "ctc_loss.Tensor": (
        *(_image(3, 1, 3).log_softmax(2), torch.tensor([[1, 2]])),
        *(torch.tensor([3]), torch.tensor([2])),
    ),
    "ctc_loss.IntList": (_image(3, 1, 3).log_softmax(2), torch.tensor([[1, 2]]), [3], [2]),
    "qr": (_MATRIX,),
    "linalg_qr": (_MATRIX,),
    "svd": (_MATRIX,),
    "linalg_svd": (_MATRIX,),
    "linalg_svdvals": (_MATRIX,),
    "linalg_eigh": (_MATRIX,),
    "linalg_eigvalsh": (_MATRIX,),
    "linalg_cholesky": (_MATRIX,),
    "triangular_solve": (_MATRIX, _MATRIX),
    "cat": ([_MATRIX, _MATRIX],),
    "stack": ([_MATRIX, _MATRIX],),
    "index_copy": (_MATRIX, 0, _LABELS, _MATRIX),
}


def _exists(name: str) -> bool:
    """Whether this torch has the operator: 2.15 has no ``aten::cholesky`` and ``aten::qr`` any more."""
    return hasattr(torch.ops.aten, name.partition(".")[0])


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _on_device(a: Any, dtype: torch.dtype, leaves: list[torch.Tensor]) -> Any:
    if isinstance(a, list):
        return [_on_device(item, dtype, leaves) for item in a]
    if not isinstance(a, torch.Tensor):
        return a
    moved = a.to("xla")
    if a.dtype == torch.float32:
        moved = moved.to(dtype).detach()
        leaves.append(moved)
    return moved


def _floats(results: Any) -> list[torch.Tensor]:
    results = results if isinstance(results, (tuple, list)) else (results,)
    return [r for r in results if r.is_floating_point()]


# conv_tbc has no lowering: it runs on the CPU, and warns of that
@pytest.mark.filterwarnings("ignore::xla_core.dispatch.cpu_fallback.FallbackWarning")
@pytest.mark.parametrize("given", [torch.bfloat16, torch.float32])
# torch 2.15 says so of the padding of conv1d.padding
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("name", [name for name in ARGUMENTS if _exists(name)])
def test_a_listed_operator_computes_in_the_promised_dtype(name: str, given: torch.dtype) -> None:
    leaves: list[torch.Tensor] = []
    arguments = [_on_device(a, given, leaves) for a in ARGUMENTS[name]]
    leaves[0].requires_grad_()
    with torch.autocast("xla", dtype=torch.bfloat16):
        results = _floats(_overload(name)(*arguments))
    lower = name in autocast.LOWER_PRECISION or (
        name in autocast.WIDEST and given == torch.bfloat16
    )
    promised = torch.bfloat16 if lower else torch.float32
    assert {r.dtype for r in results} == {promised}
    (gradient,) = torch.autograd.grad(results[0].sum(), leaves[0])
    assert (gradient.dtype, gradient.shape) == (given, leaves[0].shape)


def test_every_overload_of_a_listed_operator_is_listed_and_tried() -> None:
    listed = {*autocast.LOWER_PRECISION, *autocast.FLOAT32, *autocast.WIDEST}
    assert set(ARGUMENTS) == listed
    missing = []
    for packet in {name.partition(".")[0] for name in listed if _exists(name)}:
        for overload in getattr(torch.ops.aten, packet).overloads():
            name = packet if overload == "default" else f"{packet}.{overload}"
            # ``mm.dtype`` and its like take the dtype of the result from the caller
            if name not in listed and overload != "dtype" and _takes_tensors_only_to_read(name):
                missing.append(name)
    assert missing == []


def _takes_tensors_only_to_read(name: str) -> bool:
    """Whether the dispatcher knows this overload (TorchScript's own it does not), without ``out=``.

    Those of named tensors, which torch 2.11 still has, take names of dimensions.
    """
    overload = _overload(name)
    known = torch._C._dispatch_has_kernel(f"aten::{name}")
    return known and not overload._schema.is_mutable and "name" not in name.lower()


COMPOSED: Final[dict[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "F.softmax": lambda x: F.softmax(x, -1),
    "torch.softmax": lambda x: torch.softmax(x, -1),
    "special.softmax": lambda x: torch.special.softmax(x, -1),
    "nn.Softmax": lambda x: torch.nn.Softmax(-1)(x),
    "F.softmin": lambda x: F.softmin(x, -1),
    "F.log_softmax": lambda x: F.log_softmax(x, -1),
    "special.log_softmax": lambda x: torch.special.log_softmax(x, -1),
    "x ** 2": lambda x: x**2,
    "x ** x": lambda x: x**x,
    "2 ** x": lambda x: 2**x,
    "x.pow(0.5)": lambda x: x.pow(0.5),
    "F.cross_entropy": lambda x: F.cross_entropy(x, torch.zeros(2, dtype=torch.long, device="xla")),
    "F.pad": lambda x: F.pad(x[None], (1, 1), "reflect"),
    "linalg.inv": torch.linalg.inv,
    "linalg.svdvals": torch.linalg.svdvals,
}


@pytest.mark.parametrize("name", COMPOSED)
def test_what_is_composed_of_listed_operators_computes_in_float32(name: str) -> None:
    x = _MATRIX.to("xla").bfloat16().requires_grad_()
    with torch.autocast("xla", dtype=torch.bfloat16):
        result = COMPOSED[name](x)
    assert result.dtype == torch.float32
    result.sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.bfloat16


def test_a_dtype_that_the_caller_names_is_the_result_s() -> None:
    x = _MATRIX.to("xla").bfloat16()
    with torch.autocast("xla", dtype=torch.bfloat16):
        assert x.softmax(1, dtype=torch.bfloat16).dtype == torch.bfloat16
        assert x.prod(1, dtype=torch.float64).dtype == torch.float64
        assert (x.double() ** 2).dtype == torch.float64
        assert (torch.ones(2, dtype=torch.long, device="xla") ** 2).dtype == torch.long


def test_softmax_and_pow_have_the_values_of_float32() -> None:
    cpu = torch.linspace(-2, 2, 16).bfloat16().requires_grad_()
    xla = cpu.detach().to("xla").requires_grad_()
    with torch.autocast("xla", dtype=torch.bfloat16):
        results = torch.stack([xla.softmax(0), xla**3])
    expected = torch.stack([cpu.float().softmax(0), cpu.float() ** 3])
    torch.testing.assert_close(results.cpu(), expected)
    for x, result in ((cpu, expected), (xla, results)):
        result.select(0, 1).sum().backward()
        assert x.grad is not None
    torch.testing.assert_close(xla.grad.cpu(), cpu.grad)
