"""Runs the same call on the CPU and on the ``xla`` device, and compares what comes back."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence

import torch
from torch.utils import _pytree

from xla_core.api import program_report
from xla_core.execution import runtime
from xla_core.extension_api.operators import Operand

Tolerance = tuple[float, float]
"""``(rtol, atol)``."""

# By result dtype: the two systems order sums differently and approximate transcendental functions
# differently; integers and booleans are compared exactly.
TOLERANCES: dict[torch.dtype, Tolerance] = {
    torch.float64: (1e-7, 1e-7),
    torch.complex128: (1e-7, 1e-7),
    torch.float32: (1e-4, 1e-5),
    torch.complex64: (1e-4, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-3),
    torch.float16: (2e-3, 1e-4),
}


# How many roundings of a result's largest number count as none, for sums of many terms; the CPU may
# happen to have no error at all. One of bfloat16 is half a percent already.
ROUNDINGS: dict[torch.dtype, int] = {torch.bfloat16: 2, torch.float16: 4}


def copy_to(value: Operand, device: str) -> Operand:
    """``value`` with every tensor in it detached, copied to ``device``, and each CPU device replaced.

    A tensor that occurs twice stays one tensor, and one that shows a part of its storage shows that part
    of a copy of it all: ``as_strided`` may look at the rest. What required a gradient still does.
    """
    copies: dict[int, torch.Tensor] = {}

    def one(leaf: Operand) -> Operand:
        if isinstance(leaf, torch.Tensor):
            if id(leaf) not in copies:
                copied = _copied(leaf.detach(), device)
                copies[id(leaf)] = copied.requires_grad_(leaf.requires_grad)
            return copies[id(leaf)]
        return torch.device(device) if isinstance(leaf, torch.device) else leaf

    return _pytree.tree_map(one, value)


def _copied(tensor: torch.Tensor, device: str) -> torch.Tensor:
    whole = _storage_of_a_part(tensor)
    source = tensor if whole is None else whole
    copied = source.to(device) if source.device.type != device else source.clone()
    if whole is None:
        return copied
    return copied.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _storage_of_a_part(tensor: torch.Tensor) -> torch.Tensor | None:
    """All elements of the storage of which a CPU tensor shows a part; None if it shows all."""
    plain = tensor.device.type == "cpu" and tensor.layout is torch.strided
    if not plain or tensor.is_conj() or tensor.is_neg():
        return None
    room = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.as_strided((room,), (1,), 0) if room > tensor.numel() else None


def leaves(value: Operand) -> list[Operand]:
    """The tensors and numbers in nested lists, tuples and dictionaries."""
    return [leaf for leaf in _pytree.tree_leaves(value) if leaf is not None]


def to_host(value: Operand) -> list[Operand]:
    """The leaves of ``value``, each tensor among them detached on the CPU and plainly stored."""
    return [
        _plainly_stored(leaf.detach().cpu()) if isinstance(leaf, torch.Tensor) else leaf
        for leaf in leaves(value)
    ]


def _plainly_stored(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.resolve_conj().resolve_neg()
    return plain.contiguous() if plain.layout is torch.strided else plain


def assert_same(got: Operand, expected: Operand, tolerance: Tolerance | None = None) -> None:
    """Assert that values, shapes and dtypes agree; ``tolerance`` widens that of the dtype."""
    actual, wanted = to_host(got), to_host(expected)
    assert len(actual) == len(wanted), f"{len(actual)} results instead of {len(wanted)}"
    for position, (a, w) in enumerate(zip(actual, wanted, strict=True)):
        if not isinstance(w, torch.Tensor):
            a, w = torch.tensor(a), torch.tensor(w)
        rtol, atol = TOLERANCES.get(w.dtype, (0.0, 0.0))
        if tolerance is not None and (w.is_floating_point() or w.is_complex()):
            rtol, atol = max(rtol, tolerance[0]), max(atol, tolerance[1])
        label = f"result {position}: "
        torch.testing.assert_close(
            a, w, rtol=rtol, atol=atol, equal_nan=True, msg=lambda text, at=label: at + text
        )


def assert_as_accurate(
    got: Operand, expected: Operand, reference: Callable[[], object] | None = None
) -> None:
    """As ``assert_same``; results that differ more may be as near to the truth as the CPU's are.

    ``reference`` computes the truth, in a wider dtype. Raises the first difference when the error of
    a result, at its largest, is more than twice the CPU's own plus some roundings of the largest
    number (``ROUNDINGS``).
    """
    try:
        assert_same(got, expected)
    except AssertionError as difference:
        if reference is None:
            raise
        triples = zip(to_host(got), to_host(expected), to_host(reference()), strict=True)
        for a, w, truth in triples:
            if not _as_near(a, w, truth):
                raise difference from None


def _as_near(got: torch.Tensor, expected: torch.Tensor, truth: torch.Tensor) -> bool:
    if got.shape != expected.shape or got.dtype != expected.dtype or not got.numel():
        return got.shape == expected.shape and got.dtype == expected.dtype
    if not (got.is_floating_point() or got.is_complex()):
        return torch.equal(got, expected)
    rounded = truth.to(got.dtype)
    finite = rounded.isfinite()
    # Where only the CPU overflows on the way, the truth is what there should be.
    wanted = torch.where(expected.isnan(), rounded, expected)
    if not torch.equal(got[~finite].nan_to_num(), wanted[~finite].nan_to_num()):
        return False
    exact = truth[finite]
    if not exact.numel():
        return True
    error, own = ((x[finite].to(exact.dtype) - exact).abs() for x in (got, expected))
    # Where only the CPU overflows, its error is no measure.
    error, own = (
        error.max(),
        own[own.isfinite()].max() if own.isfinite().any() else own.new_zeros(()),
    )
    slack = ROUNDINGS.get(got.dtype, 8) * torch.finfo(got.dtype).eps
    return bool(error <= 2 * own + slack * exact.abs().max())


@dataclasses.dataclass
class Outcome:
    """What one call gave: a value, or the exception it raised."""

    value: Operand = None
    error: Exception | None = None


def attempt(call: Callable[[], object]) -> Outcome:
    """Call ``call``; an exception is kept, without its frames, which would keep tensors alive."""
    try:
        return Outcome(value=call())
    except Exception as error:
        return Outcome(error=error.with_traceback(None))


def gradients(result: Operand, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Gradients by ``inputs`` of a fixed weighting of all differentiable parts of ``result``."""
    outputs = [
        r for r in leaves(result) if isinstance(r, torch.Tensor) and r.requires_grad and r.numel()
    ]
    if not outputs:
        return []
    weighting = [weights(r) for r in outputs]
    return list(torch.autograd.grad(outputs, inputs, weighting, allow_unused=True))


def weights(like: torch.Tensor) -> torch.Tensor:
    """Fixed numbers of the shape and dtype of ``like``, to weight results or to go along."""
    # No symmetry and no sum of zero: a gradient that is permuted or dropped shows.
    flat = torch.arange(like.numel(), dtype=torch.float64)
    values = 0.5 + 0.5 * torch.cos(flat * 1.7 + 0.3)
    return values.reshape(like.shape).to(like.dtype).to(like.device)


@contextlib.contextmanager
def fallbacks() -> Iterator[dict[str, int]]:
    """How often each operator ran on the CPU inside the block, filled in when it ends."""
    before = program_report.fallback_counts()
    counts: dict[str, int] = {}
    try:
        yield counts
    finally:
        for name, count in program_report.fallback_counts().items():
            if count > before.get(name, 0):
                counts[name] = count - before.get(name, 0)


def forget_pending() -> None:
    """Drop what the devices have recorded: after a failure it must not fail the next test too."""
    for trace in runtime.traces():
        with trace.lock:
            trace.turns.drop_all()


def assert_agrees_with_cpu(
    call: Callable[..., object],
    *args: Operand,
    tolerance: tuple[float, float] | None = None,
    **kwargs: object,
) -> None:
    """Raise AssertionError unless ``call`` gives the CPU's value on ``xla``, or its exception and words.

    ``tolerance`` is relative and absolute, as ``assert_same`` takes it.
    """
    expected = attempt(lambda: call(*args, **kwargs))
    got = attempt(lambda: call(*copy_to(args, "xla"), **copy_to(kwargs, "xla")))
    if expected.error is None:
        if got.error is not None:
            raise got.error
        assert_same(got.value, expected.value, tolerance)
    else:
        assert (type(got.error), str(got.error)) == (type(expected.error), str(expected.error))
