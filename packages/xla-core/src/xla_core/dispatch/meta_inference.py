"""Shapes and dtypes of an operator's results, inferred by torch's meta kernels; errors are the CPU's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch._ops import OpOverload

from xla_core.dispatch import cpu_error_parity, layouts
from xla_core.operators.foreach import distinct_elements, is_per_element
from xla_core.operators.lowering_registry import Promotion, Rule
from xla_core.operators.plan import SEED, Plan
from xla_core.operators.tensor_meta import TensorMeta, tensor_meta
from xla_core.recording.xla_tensor import NoMetaKernelError, XLATensor
from xla_core.support import caches
from xla_core.torch_bridge import dtypes, reference_kernels
from xla_core.torch_bridge.aot_graphs import untraced
from xla_core.torch_bridge.operands import NamedOperands, Operand

_META: Final = torch.device("meta")
# Stands for the metas of an operator whose results only the CPU can determine; compared by identity.
_ONLY_ON_CPU: Final[tuple[TensorMeta | None, ...]] = (None,) * 64

MSG_TOO_SMALL: Final = "output with shape {had} doesn't match the broadcast shape {needed}"

_FILLS: Final = frozenset(
    getattr(torch.ops.aten, name)
    for name in ("masked_fill", "masked_fill_", "index_fill", "index_fill_")
)

# How operators convert their operands so that floats of one dtype give that dtype.
_KEEP_FLOATS: Final = (Promotion.DEFAULT, Promotion.INT_TO_FLOAT)


class OperatorPlan(Plan):
    """A ``Plan`` that infers its results' shapes and dtypes by torch's meta kernels."""

    __slots__ = ()

    def infer(
        self, args: Sequence[Operand], kwargs: NamedOperands
    ) -> tuple[TensorMeta | None, ...]:
        """The metas of the results.

        Raises PyTorch's error for these operands, and NoMetaKernelError if only the CPU can
        determine the results.
        """
        key = (_freeze(args), _freeze(tuple(kwargs.items())) if kwargs else ())
        metas = self._metas.get(key)
        if metas is None:
            if len(self._metas) == caches.MOST:
                self._metas.clear()
            metas = self._metas[key] = self._checked(args, kwargs)
        if metas is _ONLY_ON_CPU:
            raise NoMetaKernelError(self.name)
        return metas

    @untraced
    def _checked(
        self, args: Sequence[Operand], kwargs: NamedOperands
    ) -> tuple[TensorMeta | None, ...]:
        layouts.check_wanted(self.overload, kwargs)
        try:
            metas = self._run_meta(args, kwargs)
        except Exception as error:
            if self.needs_all_replicas:  # a collective, which PyTorch's CPU does not have
                raise
            cpu_error = cpu_error_parity.cpu_error_for(self.overload, args, kwargs)
            unknown_dtype = isinstance(error, dtypes.UnsupportedDtypeError)
            if (
                cpu_error is None
                and not unknown_dtype
                and (
                    isinstance(error, NotImplementedError)
                    or cpu_error_parity.are_small(args, kwargs)
                )
            ):
                return _ONLY_ON_CPU
            try:
                raise (cpu_error or error) from None
            finally:
                # a frame that refers to its own exception is a cycle, which would keep operands alive
                del cpu_error
        if self.copies_host_tensors() and any(map(_is_large_on_host, args)):
            return metas
        mistake = cpu_error_parity.find(self.overload, args, kwargs)
        if mistake is not None:
            try:
                raise mistake
            finally:
                del mistake
        return metas

    def _run_meta(
        self, args: Sequence[Operand], kwargs: NamedOperands
    ) -> tuple[TensorMeta | None, ...]:
        if not is_per_element(self.name):
            return self._metas_of(args, kwargs)
        # A meta kernel takes a tenth of a millisecond per element, and models repeat their layers.
        shortened = distinct_elements(args, _freeze)
        if shortened is None:
            return self._metas_of(args, kwargs)
        few, places = shortened
        metas = self._metas_of(few, kwargs)
        distinct = max(places) + 1
        return tuple(
            metas[part + place] for part in range(0, len(metas), distinct) for place in places
        )

    def _metas_of(
        self, args: Sequence[Operand], kwargs: NamedOperands
    ) -> tuple[TensorMeta | None, ...]:
        known = {a.name for a in self.overload._schema.arguments}
        named = {
            name: _META if name == "device" else to_meta(value)
            for name, value in kwargs.items()
            if name != SEED and (value is not None or name in known)
        }
        if not any(isinstance(a, torch.Tensor) for a in _flat(args)) and any(
            a.name == "device" for a in self.overload._schema.arguments
        ):
            named["device"] = _META
        if named.get("pin_memory"):
            named["pin_memory"] = None
        reference_kernels.call_directly()
        own = self.rule.meta if isinstance(self.rule, Rule) else None
        converted = [to_meta(a) for a in args]
        if self.copies_host_tensors():
            converted = [a.to(_META) if _is_large_on_host(a) else a for a in converted]
        if self.overload.overloadpacket in _FILLS:
            # torch 2.13: their meta kernels refuse a number in a CPU tensor, which kernels of all devices take
            converted = [a.to(_META) if isinstance(a, torch.Tensor) else a for a in converted]
        if own is None and self._is_like_its_operand(converted, named):
            # Python meta kernels take a millisecond each
            return (_meta_of(args[0]),)
        try:
            result = (own or self.overload)(*converted, **named)
        except NotImplementedError:
            if not self.written or _fresh_count(self.overload):
                raise
            result = None  # an operator that only writes: its results look like its arguments
        for i in self.written:
            # meta kernels written in Python resize what they write to where others refuse
            if (
                i < len(args)
                and isinstance(args[i], XLATensor)
                and converted[i].shape != args[i].shape
            ):
                raise RuntimeError(
                    MSG_TOO_SMALL.format(had=list(args[i].shape), needed=list(converted[i].shape))
                )
        written = [args[i] if i < len(args) else None for i in self.written]
        if not self.written:
            return tuple(_meta_of(r) for r in _flat_results(result))
        fresh = result if isinstance(result, tuple) else (result,)
        return tuple(_meta_of(r) for r in fresh[: _fresh_count(self.overload)]) + tuple(
            _meta_of(w) for w in _flat(written)
        )

    def _is_like_its_operand(self, args: Sequence[Operand], named: Mapping[str, Operand]) -> bool:
        """Whether this is an elementwise operator whose result any kernel says is as the first operand.

        That is so of floats of one shape and dtype. An operator that refuses floats is found out
        later, on one element (``cpu_error_parity.find``), where the CPU has kernels for all.
        """
        if torch.Tag.pointwise not in self.overload.tags or len(self.overload._schema.returns) != 1:
            return False
        if self.written != (0,) and (self.written or not self._keeps_floats()):
            return False
        first, *rest = [*args, *named.values()]
        return (
            isinstance(first, torch.Tensor)
            and first.dtype in (torch.float32, torch.float64)
            and all(
                a is None
                or type(a) in (bool, int, float)
                or (
                    isinstance(a, torch.Tensor) and (a.dtype, a.shape) == (first.dtype, first.shape)
                )
                for a in rest
            )
        )

    def _keeps_floats(self) -> bool:
        rule = self.rule
        return isinstance(rule, Rule) and rule.promotion in _KEEP_FLOATS


def _fresh_count(overload: OpOverload) -> int:
    return sum(r.alias_info is None for r in overload._schema.returns)


def _freeze(a: Operand) -> Operand:
    """A hashable image of an argument in which 1, 1.0 and True, 0.0 and -0.0 differ."""
    t = type(a)
    if t is XLATensor:
        v = a._v
        return v.meta if v is not None else a._s.meta
    if t is tuple or t is list:
        return tuple(map(_freeze, a))
    if a is None or t is torch.dtype:
        return a
    if t is int or t is bool:
        return (t, a)
    if isinstance(a, XLATensor):
        return _meta_of(a)
    if isinstance(a, torch.Tensor):
        return ("host", a.dtype, a.shape)
    if isinstance(a, (list, tuple)):
        return tuple(map(_freeze, a))
    if isinstance(a, (int, float, complex)):
        return (t, repr(a))
    return a


def _is_large_on_host(a: Operand) -> bool:
    """Whether this is a CPU tensor that does not stand for a number."""
    return isinstance(a, torch.Tensor) and a.device.type == "cpu" and a.dim() > 0


def to_meta(a: Operand) -> Operand:
    """An operand as the meta kernels take it: ``xla`` tensors become meta tensors."""
    if isinstance(a, XLATensor):
        return torch.empty(
            a._v.meta.shape if a._v else a._s.meta.shape, dtype=a.dtype, device=_META
        )
    if isinstance(a, torch.Tensor):
        # Without dimensions and on the CPU: for type promotion, the tensor itself says it best.
        return a
    if isinstance(a, (list, tuple)):
        return [to_meta(item) for item in a]
    return a


def _meta_of(a: Operand) -> TensorMeta | None:
    if a is None:
        return None
    if isinstance(a, XLATensor):
        return a._v.meta if a._v is not None else a._s.meta
    return tensor_meta(tuple(a.shape), a.dtype)


def _flat(items: Operand) -> list[Operand]:
    flat: list[Operand] = []
    for item in items:
        if isinstance(item, (list, tuple)):
            flat.extend(_flat(item))
        else:
            flat.append(item)
    return flat


def _flat_results(result: Operand) -> list[Operand]:
    return _flat(result) if isinstance(result, (list, tuple)) else [result]
