"""Many functions of torch's public interface on ``xla`` against the CPU."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

# float32 sums, products and library functions in another order or approximation than the CPU's.
CLOSE = {"rtol": 2e-5, "atol": 2e-6}


def on(device, make):
    torch.manual_seed(0)
    return [x.to(device) if isinstance(x, torch.Tensor) else x for x in make()]


def compare(found, expected):
    assert type(found) is type(expected) or isinstance(expected, torch.Tensor)
    if isinstance(expected, torch.Tensor):
        assert found.device.type == "xla"
        torch.testing.assert_close(found.detach().cpu(), expected.detach(), equal_nan=True, **CLOSE)
    elif isinstance(expected, (tuple, list)):
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            compare(a, b)
    else:
        assert found == expected


def matrix():
    return [torch.randn(4, 5)]


def pair():
    return [torch.randn(4, 5), torch.randn(4, 5)]


def cube():
    return [torch.randn(2, 3, 4)]


def image():
    return [torch.randn(2, 3, 8, 8)]


UNARY = [
    "abs", "neg", "exp", "exp2", "expm1", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh",
    "tanh", "asinh", "atanh", "sigmoid", "erf", "erfc", "sign", "sgn", "ceil", "floor", "round",
    "trunc", "frac", "square", "reciprocal", "relu", "logit", "sinc", "isnan", "isinf", "isfinite",
    "logical_not", "signbit", "positive", "deg2rad", "rad2deg", "nan_to_num", "sum", "mean", "prod",
    "std", "var", "max", "min", "argmax", "argmin", "any", "all", "norm", "count_nonzero", "numel",
    "t", "flatten", "ravel", "diag", "diagonal", "trace", "tril", "triu", "logsumexp", "softmax",
    "cumsum", "cumprod", "cummax", "fliplr", "flipud", "atleast_3d", "squeeze", "argsort",
]  # fmt: skip

OVER_DIM_1 = {"logsumexp", "softmax", "cumsum", "cumprod", "cummax", "argsort"}

CALLS = {
    "where": (pair, lambda a, b: torch.where(a > 0, a, b)),
    "where number": (pair, lambda a, b: torch.where(a > b, a, 0.0)),
    "clamp": (matrix, lambda a: a.clamp(-0.5, 0.5)),
    "clamp one side": (matrix, lambda a: a.clamp(min=0.1)),
    "clamp tensors": (pair, lambda a, b: torch.clamp(a, min=b)),
    "maximum": (pair, torch.maximum),
    "minimum": (pair, torch.minimum),
    "fmod": (pair, torch.fmod),
    "remainder": (pair, torch.remainder),
    "floor divide": (pair, lambda a, b: a // b),
    "rounded div": (pair, lambda a, b: torch.div(a, b, rounding_mode="trunc")),
    "pow": (pair, lambda a, b: a.abs() ** b),
    "pow int": (matrix, lambda a: a**3),
    "rpow": (matrix, lambda a: 2**a),
    "rsub": (matrix, lambda a: 1 - a),
    "rdiv": (matrix, lambda a: 1 / (a + 10)),
    "comparisons": (pair, lambda a, b: [a < b, a <= b, a > b, a >= b, a == b, a != b]),
    "logic": (
        pair,
        lambda a, b: [(a > 0) & (b > 0), (a > 0) | (b > 0), (a > 0) ^ (b > 0), ~(a > 0)],
    ),
    "bits": (lambda: [torch.arange(8)], lambda a: [a & 3, a | 1, a ^ 5, ~a, a << 2, a >> 1]),
    "integer arithmetic": (
        lambda: [torch.arange(-4, 4)],
        lambda a: [a + 1, a * 3, a // 3, a % 3, a / 2, -a, a**2, a.abs(), a.fmod(3)],
    ),
    "promotion": (
        lambda: [torch.arange(3), torch.ones(3), torch.ones(3, dtype=torch.bool)],
        lambda i, f, b: [
            i + f,
            i * 2.5,
            i + True,
            b + b,
            b * 2,
            i + b,
            f.double() + f,
            f.half() + f,
        ],
    ),
    "atan2 hypot": (
        pair,
        lambda a, b: [torch.atan2(a, b), torch.hypot(a, b), torch.copysign(a, b)],
    ),
    "lerp addcmul addcdiv": (
        pair,
        lambda a, b: [
            torch.lerp(a, b, 0.3),
            torch.addcmul(a, a, b, value=2),
            torch.addcdiv(a, a, b + 9),
        ],
    ),
    "matmul": (lambda: [torch.randn(4, 5), torch.randn(5, 3)], torch.matmul),
    "matmul batches": (lambda: [torch.randn(2, 1, 4, 5), torch.randn(3, 5, 2)], lambda a, b: a @ b),
    "matmul vectors": (
        lambda: [torch.randn(5), torch.randn(5)],
        lambda a, b: [a @ b, a.dot(b), a.outer(b)],
    ),
    "mv": (lambda: [torch.randn(4, 5), torch.randn(5)], lambda a, b: [a.mv(b), a @ b, b @ a.t()]),
    "bmm": (lambda: [torch.randn(2, 4, 5), torch.randn(2, 5, 3)], torch.bmm),
    "addmm": (
        lambda: [torch.randn(3), torch.randn(4, 5), torch.randn(5, 3)],
        lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2),
    ),
    "einsum": (
        lambda: [torch.randn(2, 3), torch.randn(3, 4)],
        lambda a, b: torch.einsum("ij,jk->ki", a, b),
    ),
    "tensordot": (
        lambda: [torch.randn(2, 3, 4), torch.randn(4, 3)],
        lambda a, b: torch.tensordot(a, b, ([2, 1], [0, 1])),
    ),
    "kron": (lambda: [torch.randn(2, 2), torch.randn(2, 3)], torch.kron),
    "cdist": (lambda: [torch.randn(3, 4), torch.randn(5, 4)], torch.cdist),
    "linalg": (
        lambda: [torch.randn(3, 3) + 4 * torch.eye(3)],
        lambda a: [
            torch.linalg.inv(a),
            torch.linalg.det(a),
            torch.linalg.solve(a, a[0]),
            torch.linalg.cholesky(a @ a.t()),
        ],
    ),
    "norms": (
        matrix,
        lambda a: [
            torch.linalg.norm(a),
            a.norm(1),
            a.norm(p=2, dim=1),
            torch.linalg.vector_norm(a, 3),
        ],
    ),
    "reductions over dims": (
        cube,
        lambda a: [
            a.sum(1),
            a.mean((0, 2)),
            a.amax(-1),
            a.amin((0, 1)),
            a.prod(1, keepdim=True),
            a.var(2),
            a.std((0, 1), correction=0),
        ],
    ),
    "max with indices": (
        cube,
        lambda a: [*a.max(1), *a.min(-1, keepdim=True), a.argmax(2), a.argmin()],
    ),
    "sum dtype": (
        matrix,
        lambda a: [
            a.sum(dtype=torch.float64),
            (a > 0).sum(),
            (a > 0).sum(1),
            (a > 0).float().mean(),
        ],
    ),
    "logsumexp softmax": (
        cube,
        lambda a: [
            a.logsumexp(1),
            a.softmax(-1),
            a.log_softmax(0),
            a.softmax(-1, dtype=torch.float64),
        ],
    ),
    "sort topk": (
        cube,
        lambda a: [
            *a.sort(1),
            *a.sort(-1, descending=True),
            *a.topk(2),
            a.argsort(0),
            *a.kthvalue(2, 1),
        ],
    ),
    "sort with equal values": (
        lambda: [torch.tensor([2.0, 1.0, 2.0, 1.0])],
        lambda a: [*a.sort(stable=True), *a.sort(stable=True, descending=True)],
    ),
    "scans": (
        cube,
        lambda a: [
            a.cumsum(1),
            a.cumprod(2),
            *a.cummax(1),
            *a.cummin(0),
            a.logcumsumexp(2),
            a.diff(),
        ],
    ),
    "shapes": (
        cube,
        lambda a: [
            a.reshape(6, 4),
            a.view(2, -1),
            a.flatten(1),
            a.unflatten(2, (2, 2)),
            a.permute(2, 0, 1),
            a.transpose(0, 2),
            a.movedim(0, 1),
            a.unsqueeze(1),
            a[None].squeeze(0),
            a.expand(2, 2, 3, 4),
            a.repeat(1, 2, 1),
            a.tile(2),
            a.repeat_interleave(2, 1),
            a.flip(0, 2),
            a.roll(1, 2),
            a.rot90(1, (1, 2)),
            a.swapaxes(0, 1),
            a.mT,
            a.broadcast_to(3, 2, 3, 4),
        ],
    ),
    "joins": (
        pair,
        lambda a, b: [
            torch.cat([a, b]),
            torch.cat([a, b], 1),
            torch.stack([a, b], 2),
            torch.hstack([a, b]),
            torch.vstack([a, b]),
            torch.dstack([a, b]),
            torch.block_diag(a, b),
        ],
    ),
    "splits": (
        cube,
        lambda a: [
            *a.split(2, 2),
            *a.chunk(2, 1),
            *a.unbind(1),
            *torch.tensor_split(a, 2, 2),
            *a.split([1, 3], 2),
            *torch.hsplit(a, 3),
        ],
    ),
    "gather scatter": (
        lambda: [torch.randn(3, 4), torch.tensor([[0, 2], [1, 1], [3, 0]])],
        lambda a, i: [
            a.gather(1, i),
            a.scatter(1, i, 5.0),
            a.scatter_add(1, i, a[:, :2]),
            torch.take_along_dim(a, i, 1),
            a.scatter_reduce(1, i, a[:, :2], "amax"),
        ],
    ),
    "index functions": (
        lambda: [torch.randn(3, 4), torch.tensor([2, 0])],
        lambda a, i: [
            a.index_select(0, i),
            a.index_add(0, i, a[:2]),
            a.index_copy(0, i, a[:2]),
            a.index_fill(1, i, 7.0),
            a.take(i),
            a.index_put((i,), a[0]),
        ],
    ),
    "masks": (
        pair,
        lambda a, b: [
            a.masked_fill(b > 0, 3.0),
            a.masked_scatter(b > 0, b),
            torch.bucketize(a, torch.tensor([-1.0, 0.0, 1.0], device=a.device)),
            torch.isclose(a, b),
        ],
    ),
    "one_hot embedding": (
        lambda: [torch.tensor([[0, 2], [1, 1]]), torch.randn(3, 4)],
        lambda i, w: [
            F.one_hot(i, 3),
            F.embedding(i, w),
            F.embedding(i, w, padding_idx=1),
            F.embedding_bag(i, w),
        ],
    ),
    "triangles": (
        lambda: [torch.randn(4, 4)],
        lambda a: [a.tril(1), a.triu(-1), torch.diag_embed(a), a.diagonal(1), torch.diagflat(a[0])],
    ),
    "complex": (
        lambda: [torch.randn(3, dtype=torch.complex64)],
        lambda a: [
            a.abs(),
            a.real,
            a.imag,
            a.conj().resolve_conj(),
            a.angle(),
            a * a,
            torch.view_as_real(a),
            a.exp(),
        ],
    ),
    "fft": (
        lambda: [torch.randn(4, 8)],
        lambda a: [
            torch.fft.fft(a),
            torch.fft.rfft(a),
            torch.fft.ifft(torch.fft.fft(a)),
            torch.fft.irfft(torch.fft.rfft(a)),
            torch.fft.fft2(a),
            torch.fft.fftshift(a),
        ],
    ),
    "meshgrid": (
        lambda: [torch.arange(3.0), torch.arange(2.0)],
        lambda a, b: [*torch.meshgrid(a, b, indexing="ij"), torch.cartesian_prod(a, b)],
    ),
    "activations": (
        matrix,
        lambda a: [
            F.relu(a),
            F.relu6(a),
            F.leaky_relu(a),
            F.elu(a),
            F.selu(a),
            F.celu(a),
            F.gelu(a),
            F.gelu(a, approximate="tanh"),
            F.silu(a),
            F.mish(a),
            F.softplus(a),
            F.softsign(a),
            F.hardtanh(a),
            F.hardswish(a),
            F.hardsigmoid(a),
            F.tanhshrink(a),
            F.logsigmoid(a),
            F.threshold(a, 0.1, 2.0),
            F.glu(a[:, :4]),
            F.softmin(a, 1),
            F.hardshrink(a),
            F.softshrink(a),
        ],
    ),
    "losses": (
        pair,
        lambda a, b: [
            F.mse_loss(a, b),
            F.l1_loss(a, b),
            F.smooth_l1_loss(a, b),
            F.huber_loss(a, b),
            F.binary_cross_entropy_with_logits(a, b.sigmoid()),
            F.kl_div(a.log_softmax(1), b.softmax(1), reduction="batchmean"),
            F.cosine_similarity(a, b),
            F.binary_cross_entropy(a.sigmoid(), b.sigmoid()),
            F.cosine_embedding_loss(a, b, torch.ones(4, device=a.device)),
            F.margin_ranking_loss(a, b, torch.ones(4, 5, device=a.device)),
            F.triplet_margin_loss(a, b, a + b),
            F.poisson_nll_loss(a, b.abs()),
        ],
    ),
    "class losses": (
        lambda: [torch.randn(4, 5), torch.tensor([1, 0, 4, 2])],
        lambda a, t: [
            F.cross_entropy(a, t),
            F.cross_entropy(a, t, label_smoothing=0.1),
            F.nll_loss(a.log_softmax(1), t),
            F.cross_entropy(a, t, ignore_index=4),
            F.cross_entropy(a, t, weight=torch.arange(1.0, 6.0, device=a.device)),
            F.multi_margin_loss(a, t),
        ],
    ),
    "conv": (
        lambda: [torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3), torch.randn(4)],
        lambda x, w, b: [
            F.conv2d(x, w, b),
            F.conv2d(x, w, padding=1, stride=2),
            F.conv2d(x, w, dilation=2, padding="same"),
            F.conv_transpose2d(x, w.transpose(0, 1), stride=2, padding=1, output_padding=1),
            F.conv1d(x[:, :, 0], w[:, :, 0], b),
        ],
    ),
    "pooling": (
        image,
        lambda x: [
            F.max_pool2d(x, 2),
            F.avg_pool2d(x, 3, 2, 1),
            F.adaptive_avg_pool2d(x, 2),
            F.adaptive_max_pool2d(x, 3),
            F.max_pool2d(x, 3, 1, 1, ceil_mode=True),
            F.lp_pool2d(x, 2, 2),
        ],
    ),
    "pads and resampling": (
        image,
        lambda x: [
            F.pad(x, (1, 2)),
            F.pad(x, (1, 1, 2, 0), value=3.0),
            F.pad(x, (1, 1, 1, 1), mode="reflect"),
            F.pad(x, (1, 0, 2, 1), mode="replicate"),
            F.pad(x, (1, 1, 1, 1), mode="circular"),
            F.interpolate(x, scale_factor=2),
            F.interpolate(x, size=(5, 6), mode="bilinear"),
            F.pixel_shuffle(x.repeat(1, 4, 1, 1), 2),
            F.unfold(x, 2),
            F.fold(F.unfold(x, 2, stride=2), (8, 8), 2, stride=2),
        ],
    ),
    "norm layers": (
        image,
        lambda x: [
            F.layer_norm(x, (8, 8)),
            F.group_norm(x, 3),
            F.instance_norm(x),
            F.normalize(x, dim=1),
            F.local_response_norm(x, 2),
            F.rms_norm(x, (8,)),
            F.batch_norm(x, None, None, training=True),
        ],
    ),
    "attention": (
        lambda: [torch.randn(2, 4, 6, 8), torch.randn(2, 4, 6, 8), torch.randn(2, 4, 6, 8)],
        lambda q, k, v: [
            F.scaled_dot_product_attention(q, k, v),
            F.scaled_dot_product_attention(q, k, v, is_causal=True),
            F.scaled_dot_product_attention(
                q, k, v, attn_mask=torch.ones(6, 6, device=q.device).tril().bool()
            ),
        ],
    ),
    "predicates": (
        pair,
        lambda a, b: [
            torch.equal(a, a),
            torch.equal(a, b),
            torch.allclose(a, a + 1e-9),
            torch.allclose(a, b),
            torch.is_tensor(a),
            a.is_floating_point(),
            torch.numel(a),
            torch.result_type(a, 1),
        ],
    ),
    "statistics": (
        matrix,
        lambda a: [
            *torch.std_mean(a, 1),
            *torch.var_mean(a),
            a.quantile(0.3),
            torch.cov(a),
            torch.corrcoef(a),
            *torch.aminmax(a),
        ],
    ),
    "searchsorted": (
        lambda: [torch.arange(0.0, 10.0, 2), torch.tensor([3.0, 8.0, -1.0])],
        lambda a, v: [
            torch.searchsorted(a, v),
            torch.searchsorted(a, v, right=True),
            torch.isin(v, a),
        ],
    ),
}


@pytest.mark.parametrize("name", UNARY)
def test_unary(name):
    function = getattr(torch, name)
    argument = [1] if name in OVER_DIM_1 else []
    (a,), (host,) = on("xla", matrix), on("cpu", matrix)
    compare(function(a, *argument), function(host, *argument))


@pytest.mark.parametrize("name", CALLS)
def test_function(name):
    make, function = CALLS[name]
    found, expected = function(*on("xla", make)), function(*on("cpu", make))
    compare(found, expected)
