"""Which distributions PyTorch draws from: bounds, probabilities and dtypes, refused in its own words.

PyTorch's CPU kernels check these before they draw, and its meta kernels do not check them all. Many of
the numbers are operands of the program rather than part of it, so that they differ between two runs of
one step: they are looked at in each call. (``cpu_error_parity`` looks at that of dropout.) The
tests here say only what is certainly right; for the rest the operator is called on the CPU with one
element, which raises what the CPU raises and warns of what it warns of. Probabilities and deviations
that are tensors are not looked at: that would fetch them.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
from torch._ops import OpOverload

from xla_core.recording import source_location
from xla_core.recording.xla_tensor import XLATensor
from xla_core.torch_bridge.operands import Operand

# Whether an operator surely takes these arguments (positional ones, what is left out is None), and the
# dtype of what it draws or of its first tensor.
Test = Callable[[Sequence[Operand], torch.dtype], bool]

_FLOATS: Final = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_COMPLEX: Final = frozenset({torch.complex64, torch.complex128})
_INTEGERS: Final = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
_REAL: Final = _FLOATS | _INTEGERS | {torch.bool}
_INEXACT: Final = _FLOATS | _COMPLEX
_LARGEST: Final = {dtype: torch.finfo(dtype).max for dtype in _FLOATS}
_MOST_CHOICES: Final = 1 << 24  # torch 2.13: what multinomial accepts
# For other dtypes (8-bit floats) the CPU lacks kernels that the xla device has.
_ON_CPU: Final = _REAL | _COMPLEX


@functools.cache
def _integers_of(dtype: torch.dtype) -> range:
    """The integers around 0 that ``dtype`` holds without a gap."""
    if dtype in _FLOATS:
        edge = round(2 / torch.finfo(dtype).eps)
        return range(-edge, edge + 1)
    if dtype == torch.bool:
        return range(2)
    if dtype.is_floating_point or dtype.is_complex:
        return range(0)
    limits = torch.iinfo(dtype)
    return range(limits.min, limits.max + 1)


def _holds(dtype: torch.dtype, low: int, high: int | None) -> bool:
    """Whether there are integers from ``low`` to ``high - 1`` (default: the largest), all in ``dtype``."""
    held = _integers_of(dtype)
    if high is None:
        return low in held and low < held.stop - 1
    return low < high and low in held and high - 1 in held


def _has(dtypes: frozenset[torch.dtype]) -> Test:
    return lambda _args, dtype: dtype in dtypes


def _second_has(dtypes: frozenset[torch.dtype]) -> Test:
    return lambda args, _dtype: args[1].dtype in dtypes


def _below_first(args: Sequence[Operand], dtype: torch.dtype) -> bool:
    return _holds(dtype, 0, args[0])


def _below_second(args: Sequence[Operand], dtype: torch.dtype) -> bool:
    return _holds(dtype, 0, args[1])


def _from_first(args: Sequence[Operand], dtype: torch.dtype) -> bool:
    return _holds(dtype, args[0], args[1])


def _from_second(args: Sequence[Operand], dtype: torch.dtype) -> bool:
    return _holds(dtype, args[1], args[2])


def _permuted(args: Sequence[Operand], dtype: torch.dtype) -> bool:
    return dtype in _FLOATS | _INTEGERS and 0 <= args[0] < _integers_of(dtype).stop


def _uniform(args: Sequence[Operand], dtype: torch.dtype) -> bool:
    largest = _LARGEST.get(dtype)
    if largest is None:
        return False
    low, high = args[1], args[2]
    low, high = 0.0 if low is None else low, 1.0 if high is None else high
    return bool(-largest <= low <= high <= largest and high - low <= largest)


def _at_least_0(position: int) -> Test:
    def normal(args: Sequence[Operand], dtype: torch.dtype) -> bool:
        return dtype in _INEXACT and (args[position] is None or args[position] >= 0)

    return normal


def _above_0(position: int) -> Test:
    def positive(args: Sequence[Operand], dtype: torch.dtype) -> bool:
        return dtype in _FLOATS and (args[position] is None or args[position] > 0)

    return positive


def _geometric(args: Sequence[Operand], dtype: torch.dtype) -> bool:
    return dtype in _FLOATS | _INTEGERS and 0 < args[1] < 1


def _bernoulli(args: Sequence[Operand], dtype: torch.dtype) -> bool:
    return dtype in _REAL and (args[1] is None or 0 <= args[1] <= 1)


def _bernoulli_tensor(args: Sequence[Operand], dtype: torch.dtype) -> bool:
    return dtype in _REAL and args[1].dtype in _FLOATS


def _multinomial(args: Sequence[Operand], dtype: torch.dtype) -> bool:
    weights, count, replacement = args[:3]
    if dtype not in _FLOATS or not 0 < weights.dim() <= 2:
        return False
    choices = weights.shape[-1]
    enough = replacement or count <= choices
    return bool(count > 0 and 0 < choices <= _MOST_CHOICES and enough)


_TESTS: Final[dict[str, Test]] = {
    "random": _has(_REAL),
    "random.from": _from_second,
    "random.to": _below_second,
    "randint": _below_first,
    "randint.generator": _below_first,
    "randint.low": _from_first,
    "randint.low_generator": _from_first,
    "randint_like": _below_second,
    "randint_like.generator": _below_second,
    "randint_like.low_dtype": _from_second,
    "randint_like.low_generator_dtype": _from_second,
    "randperm": _permuted,
    "randperm.generator": _permuted,
    **{
        f"{name}{variant}": _has(_INEXACT)
        for name in ("rand", "randn", "rand_like", "randn_like")
        for variant in ("", ".generator")
    },
    "uniform": _uniform,
    "normal": _at_least_0(2),
    "normal.float_float": _at_least_0(1),
    "normal.Tensor_float": _at_least_0(1),
    "normal.float_Tensor": _second_has(_FLOATS),
    "normal.Tensor_Tensor": _second_has(_FLOATS),
    "exponential": _above_0(1),
    "cauchy": _above_0(2),
    "log_normal": _above_0(2),
    "geometric": _geometric,
    "bernoulli": _has(_FLOATS),
    "bernoulli.p": _bernoulli,
    "bernoulli.float": _bernoulli,
    "bernoulli.Tensor": _bernoulli_tensor,
    "poisson": _has(_FLOATS),
    "multinomial": _multinomial,
}
_DRAW_INTEGERS: Final = frozenset({"aten::randint", "aten::randperm"})


def check_of(
    overload: OpOverload,
) -> Callable[[Sequence[Operand], Mapping[str, Operand]], None] | None:
    """What a call of ``overload`` has to pass before it draws; None for what PyTorch never refuses.

    The check takes the arguments as the handler does, raises what the CPU raises of them, and warns of
    what it warns of at the user's line.
    """
    schema = overload._schema
    packet = schema.name.removeprefix("aten::").removesuffix("_functional").removesuffix("_")
    test = _TESTS.get(f"{packet}.{schema.overload_name}" if schema.overload_name else packet)
    if test is None:
        return None
    names = [a.name for a in schema.arguments]
    positional = [a.name for a in schema.arguments if not a.kwarg_only]
    takes_tensor = str(schema.arguments[0].type) == "Tensor"
    default = torch.int64 if schema.name in _DRAW_INTEGERS else torch.float32  # or another float

    def check(args: Sequence[Operand], kwargs: Mapping[str, Operand]) -> None:
        values = args
        if len(args) < len(positional):
            values = [*args, *(kwargs.get(name) for name in positional[len(args) :])]
        dtype = kwargs.get("dtype")
        if dtype is None:
            dtype = values[0].dtype if takes_tensor else default
        if not test(values, dtype):
            _ask_cpu(overload, names, args, kwargs)

    return check


def _ask_cpu(
    overload: OpOverload,
    names: Sequence[str],
    args: Sequence[Operand],
    kwargs: Mapping[str, Operand],
) -> None:
    """Call the operator on the CPU, with one element where their number does not matter."""
    dtypes = {a.dtype for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)}
    dtypes.add(kwargs.get("dtype") or torch.float32)
    keep_shapes = overload is torch.ops.aten.multinomial.default
    arguments = [_on_cpu(name, a, keep_shapes) for name, a in zip(names, args, strict=False)]
    named = {name: _on_cpu(name, a, keep_shapes) for name, a in kwargs.items() if name in names}
    if "device" in names:
        named["device"] = torch.device("cpu")
    if "generator" in names:
        named["generator"] = None
    with warnings.catch_warnings(record=True) as caught, torch.random.fork_rng(devices=[]):
        warnings.simplefilter("always")
        try:
            overload(*arguments, **named)
        except NotImplementedError:
            if dtypes <= _ON_CPU:
                raise
    for warning in caught:
        warnings.warn_explicit(warning.message, warning.category, *source_location.user_line())


def _on_cpu(name: str, a: Operand, keep_shapes: bool) -> Operand:
    if isinstance(a, XLATensor):
        # expanded, so that a large shape takes no memory
        one = torch.ones((), dtype=a.dtype)
        return one.expand(a.shape if keep_shapes else _shortened(a.shape))
    return _shortened(a) if name == "size" else a


def _shortened(shape: Sequence[int]) -> list[int]:
    """One element, or none where there is none: some kernels do not look at what they need not draw."""
    return [0 if 0 in shape else 1]
