"""Checks of one lowering rule against the CPU kernel of the same operator overload."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import numpy as np
import torch
from torch._ops import OpOverload

from xla_core.extension_api.lowering import TracedValue
from xla_core.extension_api.operators import NamedOperands, Operand, Operands
from xla_core.operators.inlining import calls_of
from xla_core.operators.lowering_registry import Rule, find_rule
from xla_core.operators.run_rule import STORAGE_ARGUMENTS, run_rule
from xla_core.operators.tensor_meta import TensorMeta, tensor_meta
from xla_core.pjrt.compile_options import with_known_options
from xla_core.torch_bridge.dtypes import from_numpy, numpy_dtype, to_numpy

# (rtol, atol) by result dtype: a few units in the last place, since XLA and the CPU kernels
# use different approximations of transcendental functions; integers are compared exactly.
TOLERANCES: dict[torch.dtype, tuple[float, float]] = {
    torch.float64: (1e-10, 1e-12),
    torch.complex128: (1e-10, 1e-12),
    torch.float32: (2e-5, 2e-6),
    torch.complex64: (2e-5, 2e-6),
    torch.bfloat16: (1.6e-2, 1e-3),
    torch.float16: (2e-3, 1e-4),
}


# What compiles soon, as the CPU plugin compiles small programs (xla_pjrt_cpu.effort, jaxlib 0.10.2): the passes
# over the program are the same, LLVM's are not. Half the processor time of most checks.
_FAST_ON_CPU = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}


def _map_tensors(value: Operand, function: Callable[[torch.Tensor], object]) -> Operand:
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_map_tensors(item, function) for item in value)
    return value


def _flatten(result: Operand) -> list[torch.Tensor | None]:
    if isinstance(result, (list, tuple)):
        return [leaf for item in result for leaf in _flatten(item)]
    return [result]


def _meta(tensor: torch.Tensor) -> TensorMeta:
    return tensor_meta(tuple(tensor.shape), tensor.dtype)


def _to_meta(value: Operand) -> Operand:
    return _map_tensors(value, lambda t: torch.empty(t.shape, dtype=t.dtype, device="meta"))


def _expected_metas(
    overload: OpOverload, args: Operands, kwargs: NamedOperands
) -> tuple[TensorMeta | None, ...]:
    """What the rule's or PyTorch's meta kernel promises, else what the CPU kernel gives."""
    meta_kwargs = {name: _to_meta(value) for name, value in kwargs.items()}
    if any(argument.name == "device" for argument in overload._schema.arguments):
        meta_kwargs["device"] = torch.device("meta")
    try:
        rule = find_rule(overload)
        infer = rule.meta if rule is not None and rule.meta is not None else overload
        leaves = _flatten(infer(*_to_meta(args), **meta_kwargs))
    except (NotImplementedError, RuntimeError):
        leaves = _flatten(overload(*_map_tensors(args, torch.clone), **kwargs))
    return tuple(None if leaf is None else _meta(leaf) for leaf in leaves)


def _lifted(value: Operand) -> Operand:
    if isinstance(value, (list, tuple)):
        return [_lifted(item) for item in value]
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value not in (0, 1):
        return np.asarray(value, dtype=np.float64 if isinstance(value, float) else np.int64)
    return value


class _Operands:
    """The operands of one call: arrays that the traced function takes, and what stays static."""

    def __init__(self, rule: Rule, args: Operands, kwargs: NamedOperands) -> None:
        names = [argument.name for argument in rule.overload._schema.arguments]
        lift = rule.lift
        self.arrays: list[np.ndarray] = []
        self.args = tuple(
            self._slot(_lifted(a) if n in lift else a) for n, a in zip(names, args, strict=False)
        )
        self.kwargs = {
            n: self._slot(_lifted(a) if n in lift else a)
            for n, a in kwargs.items()
            if n not in STORAGE_ARGUMENTS
        }

    def _slot(self, value: Operand) -> Operand:
        if isinstance(value, torch.Tensor):
            value = to_numpy(value)
        if isinstance(value, np.ndarray):
            self.arrays.append(value)
            return _Slot(len(self.arrays) - 1)
        if isinstance(value, (list, tuple)):
            return [self._slot(item) for item in value]
        return value


class _Slot:
    """The place of one array among the operands of a traced call."""

    def __init__(self, index: int) -> None:
        self.index = index

    @staticmethod
    def fill(value: Operand, arrays: list[TracedValue]) -> Operand:
        """``value`` with each slot in it replaced by its array."""
        if isinstance(value, _Slot):
            return arrays[value.index]
        if isinstance(value, list):
            return [_Slot.fill(item, arrays) for item in value]
        return value


class Call:
    """One call of an operator overload on CPU tensors, to be made by its rule.

    ``args`` and ``kwargs`` are the operator's own. ``tolerance`` is ``(rtol, atol)``, by default
    what ``TOLERANCES`` says for each result's dtype. Raises LookupError when there is no rule.
    """

    def __init__(
        self,
        overload: OpOverload,
        *args: Operand,
        tolerance: tuple[float, float] | None = None,
        **kwargs: object,
    ) -> None:
        rule = find_rule(overload)
        if rule is None:
            raise LookupError(f"no lowering rule for {overload}; import xla_core.lowering.rules")
        self.rule, self.args, self.kwargs, self.tolerance = rule, args, kwargs, tolerance
        self.outputs = _expected_metas(overload, args, kwargs)
        self.operands = _Operands(rule, args, kwargs)

    def lower(self, key: jax.Array, arrays: list[TracedValue]) -> list[TracedValue]:
        """The results of the rule, for the jax arrays of the operands."""
        kwargs = {name: _Slot.fill(value, arrays) for name, value in self.operands.kwargs.items()}
        args = tuple(_Slot.fill(value, arrays) for value in self.operands.args)
        metas = _map_tensors(self.args, _meta)
        with calls_of(self.rule):
            return run_rule(self.rule, args, kwargs, metas, self.outputs, key)

    def compare(self, results: list[torch.Tensor | None]) -> None:
        """Assert that ``results`` are those of PyTorch's CPU kernel."""
        overload = self.rule.overload
        wanted = _flatten(overload(*_map_tensors(self.args, torch.clone), **self.kwargs))
        assert len(results) == len(wanted), f"{overload}: {len(results)} results, not {len(wanted)}"
        for got, want in zip(results, wanted, strict=True):
            if want is None or got is None:
                assert want is got, f"{overload}: got {got}, expected {want}"
                continue
            rtol, atol = self.tolerance or TOLERANCES.get(want.dtype, (0.0, 0.0))
            torch.testing.assert_close(
                got,
                want.resolve_conj().resolve_neg().contiguous(),
                rtol=rtol,
                atol=atol,
                equal_nan=True,
                msg=lambda text: f"{overload}{self.args}{self.kwargs}: {text}",
            )


def _run(calls: Sequence[Call], seed: int) -> list[list[torch.Tensor | None]]:
    """The results of all calls, compiled as one program."""

    def program(key: jax.Array, arrays: list[list[TracedValue]]) -> list[list[TracedValue]]:
        return [call.lower(key, given) for call, given in zip(calls, arrays, strict=True)]

    with jax.enable_x64(True):
        arrays = [call.operands.arrays for call in calls]
        options = _FAST_ON_CPU if jax.default_backend() == "cpu" else {}
        results = with_known_options(
            lambda known: jax.jit(program, compiler_options=dict(known))(
                jax.random.key(seed), arrays
            ),
            options,
        )
        return [
            [None if m is None else _to_torch(r, m) for r, m in zip(of, call.outputs, strict=True)]
            for of, call in zip(results, calls, strict=True)
        ]


def _to_torch(result: Operand, meta: TensorMeta) -> torch.Tensor:
    array = np.asarray(result)
    if array.dtype != numpy_dtype(meta.dtype):
        raise AssertionError(f"the rule gave {array.dtype}, PyTorch promises {meta}")
    # jax's array is read-only, and from_numpy takes over what it gets.
    return from_numpy(array.copy(), meta.dtype)


def evaluate(
    overload: OpOverload, *args: Operand, seed: int = 0, **kwargs: Operand
) -> list[torch.Tensor | None]:
    """Run the rule of ``overload`` on CPU tensors, compiled, with its scalars lifted.

    Returns one CPU tensor per result (None for a result that the operator leaves out).
    ``seed`` makes the PRNG key of a random rule. Raises LookupError when there is no rule.
    """
    return _run([Call(overload, *args, **kwargs)], seed)[0]


def check_all(calls: Sequence[Call]) -> None:
    """Assert that the rule of each call gives what PyTorch's CPU kernel gives.

    Values (NaN equals NaN), shapes and dtypes are compared. All calls are compiled as one
    program, which is faster than a program for each. Raises AssertionError on a difference.
    """
    for call, results in zip(calls, _run(calls, seed=0), strict=True):
        call.compare(results)


def check(
    overload: OpOverload,
    *args: Operand,
    tolerance: tuple[float, float] | None = None,
    **kwargs: object,
) -> None:
    """As ``check_all`` for the one ``Call`` with these arguments."""
    check_all([Call(overload, *args, tolerance=tolerance, **kwargs)])
