"""Operators of PyTorch's operator database with one size of a sample varied, on ``xla`` against the CPU."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final
from unittest import mock

import torch
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils import _pytree

import torch_xla
from xla_core.extension_api.operators import Operand
from xla_core.support import caches, counters
from xla_core.testing import op_db
from xla_core.testing.against_cpu import attempt, forget_pending, leaves
from xla_core.testing.lengths.programs import NotServedError
from xla_core.varying import families

LENGTHS: Final = (6, 9, 7, 11, 8)
"""Two to fit, and three to serve."""
_SERVED: Final = len(LENGTHS) - 2
MORE_LENGTHS: Final = (*LENGTHS, 10, 12, 5)
"""Five to fit, and three to serve: where sizes are parts of the length, or two numbers vary."""
_MOST_SAMPLES: Final = 8

# What transformers, convolutional and recurrent nets call, for training and for generation.
NETS: Final = frozenset(
    """
    __getitem__ abs add addbmm addmm addmv all amax amin any arange argmax argmin argsort baddbmm bernoulli bmm
    bool broadcast_to cat chunk clamp clamp_max clamp_min clone contiguous copysign cos cross cumprod cumsum
    diagonal div einsum empty_like eq erf exp expand expand_as expm1 fill flatten flip float floor floor_divide
    fmod full_like gather ge gt half index_add index_copy index_fill index_put index_select int isfinite isinf
    isnan layer_norm le lerp linalg.norm linalg.vector_norm log log1p log_softmax logical_and logical_not
    logical_or logit logsumexp long lt masked_fill masked_scatter matmul max maximum mean meshgrid min minimum
    mm mul mv nan_to_num narrow ne neg new_full new_ones new_zeros norm
    ones_like outer permute pow prod rand_like reciprocal remainder repeat repeat_interleave reshape
    reshape_as resolve_conj roll rot90 round rsqrt scatter scatter_add scatter_reduce select select_scatter sigmoid
    sign sin slice slice_scatter softmax sort split split_with_sizes sqrt square squeeze stack std std_mean sub
    sum t take_along_dim tan tanh tensor_split tile topk transpose tril triu true_divide unbind unflatten
    unfold unsqueeze var var_mean vdot view view_as vstack where xlogy zeros_like hstack dstack
    addcmul addcdiv logaddexp logcumsumexp cummax cummin count_nonzero msort kthvalue median searchsorted bucketize
    nn.functional.adaptive_avg_pool1d nn.functional.adaptive_avg_pool2d nn.functional.avg_pool1d
    nn.functional.avg_pool2d nn.functional.batch_norm nn.functional.binary_cross_entropy
    nn.functional.binary_cross_entropy_with_logits nn.functional.conv1d nn.functional.conv2d
    nn.functional.conv_transpose1d nn.functional.conv_transpose2d nn.functional.cosine_embedding_loss
    nn.functional.cosine_similarity nn.functional.cross_entropy nn.functional.ctc_loss nn.functional.dropout
    nn.functional.elu nn.functional.embedding nn.functional.embedding_bag nn.functional.gelu nn.functional.glu
    nn.functional.group_norm nn.functional.hardsigmoid nn.functional.hardswish nn.functional.hardtanh
    nn.functional.huber_loss nn.functional.instance_norm nn.functional.interpolate nn.functional.kl_div
    nn.functional.l1_loss nn.functional.layer_norm nn.functional.leaky_relu nn.functional.linear
    nn.functional.local_response_norm nn.functional.logsigmoid nn.functional.max_pool1d nn.functional.max_pool2d
    nn.functional.mish nn.functional.mse_loss nn.functional.multi_head_attention_forward
    nn.functional.nll_loss nn.functional.normalize nn.functional.one_hot nn.functional.pad
    nn.functional.pixel_shuffle nn.functional.prelu nn.functional.relu nn.functional.relu6
    nn.functional.rms_norm nn.functional.scaled_dot_product_attention nn.functional.selu nn.functional.silu
    nn.functional.smooth_l1_loss nn.functional.softmax nn.functional.softmin nn.functional.softplus
    nn.functional.softsign nn.functional.tanhshrink nn.functional.triplet_margin_loss nn.functional.unfold
    nn.functional.upsample_nearest
    """.split()  # noqa: SIM905 - a table of words is easier to read
)
"""Names of operators in the database."""


@dataclasses.dataclass
class Verdict:
    """What came of one operator: ``how`` it went, ``why`` if it was not served, and how many samples there were.

    ``how`` is "served" (some samples exactly, none wrong), "kept out", "wrong", or "cannot vary" (the CPU takes no
    sample with another size, or all that it takes need no program).
    """

    how: str
    why: str
    served: int
    tried: int


def verdict(op: OpInfo, backward: bool) -> Verdict:
    """Run an operator's float32 samples with one size varied, or their gradients if ``backward``."""
    few = op_db.chosen(op, torch.float32, _MOST_SAMPLES, requires_grad=backward)
    verdict_of_few = _verdict(op, few, backward)
    if verdict_of_few.tried:
        return verdict_of_few
    # of dropout the chosen ones drop nothing, and need no program
    return _verdict(op, op_db.all_samples(op, torch.float32, backward), backward)


def _verdict(op: OpInfo, samples: Sequence[SampleInput], backward: bool) -> Verdict:
    served = tried = 0
    reasons: list[str] = []
    for sample in samples:
        resized = next(_resizable(op, sample), None)
        if resized is None:
            continue
        for lengths in (LENGTHS, MORE_LENGTHS):
            asked, last, wrong = _run(op, resized, backward, lengths)
            if wrong is not None:
                return Verdict("wrong", wrong, served, tried + 1)
            if not asked or all(last):
                break
        if not asked:
            continue  # it needs no program
        tried += 1
        if not all(last):
            reasons += [*families.kept_out(), f"served {sum(last)} of {len(last)}"][:1]
        served += all(last)
        caches.clear_all()
    if not tried:
        return Verdict("cannot vary", "", 0, 0)
    why = max(reasons, key=reasons.count, default="")
    return Verdict("kept out" if 2 * served < tried else "served", why, served, tried)


def _run(
    op: OpInfo, change: Callable[[int], SampleInput], backward: bool, lengths: Sequence[int]
) -> tuple[bool, list[bool], str | None]:
    """Whether any step needed a program, which of the last three lengths were served, and the first difference."""
    caches.clear_all()
    last: list[bool] = []
    needed = False
    for number, length in enumerate(lengths):
        before = counters.all_counters().get(families.SERVED, 0)
        with mock.patch.object(families, "serve", side_effect=families.serve) as asked:
            wrong = _difference(op, change, backward, length)
        if wrong is not None:
            return True, last, wrong
        needed = needed or asked.called
        if number >= len(lengths) - _SERVED:
            count = counters.all_counters().get(families.SERVED, 0) - before
            last.append(0 < asked.call_count <= count)
    return needed, last, None


def _resizable(op: OpInfo, sample: SampleInput) -> Iterator[Callable[[int], SampleInput]]:
    """Ways to give one size of a sample other values; the CPU takes all lengths."""
    tensors = [t for t in leaves((sample.input, sample.args, sample.kwargs)) if _dense(t)]
    sizes = dict.fromkeys(size for t in tensors for size in t.shape if size > 1)
    way = _RESIZED.get(op.name, resized)
    for size in sizes:
        for numbers in (False, True):
            change = partial(way, sample, size, numbers)
            if all(
                attempt(partial(op_db.call, op, change(n), "cpu")).error is None for n in LENGTHS
            ):
                yield change


def _dense(value: Operand) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def resized(sample: SampleInput, size: int, numbers: bool, length: int) -> SampleInput:
    """The sample with ``length`` elements along all dimensions of ``size``; with ``numbers`` integers, too.

    Elements repeat, each smaller than the one before, so that none are equal, nor rows as near as rounding.
    """

    def change(leaf: Operand) -> Operand:
        if _dense(leaf):
            return _resized(leaf, size, length)
        same = numbers and type(leaf) is int and leaf == size
        return length if same else leaf

    changed = _pytree.tree_map(change, (sample.input, sample.args, sample.kwargs))
    changed_sample = SampleInput(changed[0], args=changed[1], kwargs=changed[2])
    changed_sample.output_process_fn_grad = sample.output_process_fn_grad
    return changed_sample


def _sequence_resized(sample: SampleInput, size: int, numbers: bool, length: int) -> SampleInput:
    """``resized`` where the first operand is to be sorted, or ``sorter`` says how."""
    changed = resized(sample, size, numbers, length)
    sequence, how = changed.input, dict(changed.kwargs)
    if how.get("sorter") is None:
        sequence = sequence.sort(-1).values
    else:
        how["sorter"] = sequence.argsort(-1)
    return SampleInput(sequence, args=changed.args, kwargs=how)


def _boundaries_resized(sample: SampleInput, size: int, numbers: bool, length: int) -> SampleInput:
    """``resized`` where the second operand is to be sorted."""
    changed = resized(sample, size, numbers, length)
    boundaries, *others = changed.args
    args = (boundaries.sort().values, *others)
    return SampleInput(changed.input, args=args, kwargs=changed.kwargs)


_RESIZED: Final = {"searchsorted": _sequence_resized, "bucketize": _boundaries_resized}


def _resized(tensor: torch.Tensor, size: int, length: int) -> torch.Tensor:
    if size not in tensor.shape:
        return tensor
    resized_tensor = tensor.detach()
    for axis, old in enumerate(tensor.shape):
        if old == size:
            resized_tensor = resized_tensor.index_select(axis, torch.arange(length) % size)
    if resized_tensor.is_floating_point():
        draw = torch.Generator().manual_seed(length)
        resized_tensor = resized_tensor * (
            1 - 0.5 * torch.rand(resized_tensor.shape, generator=draw)
        )
    return resized_tensor.requires_grad_(tensor.requires_grad)


def _difference(
    op: OpInfo, change: Callable[[int], SampleInput], backward: bool, length: int
) -> str | None:
    """How the sample of a length differs from the CPU's result; None if it does not, or is not computed."""
    sample = change(length)
    run = _gradients if backward else op_db.call
    with mock.patch.object(torch, "manual_seed"), mock.patch.object(random, "seed"):
        expected = attempt(partial(run, op, sample, "cpu"))
        if expected.error is not None:
            return None
        try:
            got = run(op, sample, "xla")
            torch_xla.sync()
        except NotServedError:
            return None
        except Exception as error:
            return f"length {length}: {error!r}"
        finally:
            forget_pending()
    try:
        if backward and op_db.is_random(op, sample):
            op_db.assert_same_metas(got, expected.value)
        elif backward:
            op_db.assert_gradients_agree(op, sample, torch.float32, expected.value, got)
        else:
            op_db.assert_agrees(op, sample, torch.float32, expected.value, got)
    except AssertionError as error:
        return f"length {length}: {error}"
    return None


def _gradients(op: OpInfo, sample: SampleInput, device: str) -> Sequence[Operand]:
    outcome = op_db.gradients_of(op, sample, device)
    if outcome.error is not None:
        raise outcome.error
    return outcome.value
