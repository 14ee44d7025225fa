"""Shapes and element types as users of ``torch_xla.core.xla_builder`` write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from xla_core.builder.hlo import Described
from xla_core.contract.foreign_values import JsonObject

MSG_NOT_ONE: Final = "{got} is the shape of a tuple, which has no {what}; use tuple_shape(index)"


class Type:
    """XLA's names of element types."""

    F32 = "f32"
    F64 = "f64"
    BF16 = "bf16"
    F16 = "f16"
    U8 = "u8"
    S8 = "s8"
    U16 = "u16"
    S16 = "s16"
    U32 = "u32"
    S32 = "s32"
    U64 = "u64"
    S64 = "s64"
    C64 = "c64"
    C128 = "c128"
    PRED = "pred"


class Shape:
    """The shape of an array or of a tuple, as a wrapper around torch_xla's dictionary for it."""

    def __init__(self, shape: Described) -> None:
        self._shape = shape

    @classmethod
    def create(
        cls, dtype: str, sizes: Sequence[int], dynamic_dimensions: Sequence[bool] | None = None
    ) -> Shape:
        """The shape of an array with the element type ``dtype`` (``"f32"``)."""
        described = {"type": str(dtype), "sizes": tuple(sizes)}
        if dynamic_dimensions is not None:
            described["dynamic_dimensions"] = tuple(dynamic_dimensions)
        return cls(described)

    @property
    def shape(self) -> Described:
        """``{"type": "f32", "sizes": (2, 3)}``, or a tuple of such."""
        return self._shape

    def is_tuple(self) -> bool:
        """Whether it is the shape of a tuple."""
        return isinstance(self._shape, (list, tuple))

    def tuple_size(self) -> int:
        """The number of elements of the tuple."""
        return len(self._shape)

    def tuple_shape(self, index: int) -> Described:
        """The dictionary of the shape of the tuple's element ``index``."""
        return self._shape[index]

    def _one(self, what: str) -> JsonObject:
        if self.is_tuple():
            raise ValueError(MSG_NOT_ONE.format(got=self._shape, what=what))
        return dict(self._shape)

    def is_dynamic(self) -> bool:
        """Whether it was created with dynamic dimensions."""
        return "dynamic_dimensions" in self._one("dimensions")

    def as_scalar(self) -> Shape:
        """The shape of a scalar of the same element type."""
        return Shape.create(self.dtype, ())

    @property
    def rank(self) -> int:
        """The number of dimensions."""
        return len(self.sizes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the dimensions."""
        return tuple(self._one("sizes")["sizes"])

    @property
    def dynamic_dimensions(self) -> tuple[bool, ...] | None:
        """Which dimensions are dynamic; None if it was created without dynamic dimensions."""
        return self._one("dimensions").get("dynamic_dimensions")

    @property
    def dtype(self) -> str:
        """XLA's name of the element type."""
        return str(self._one("dtype")["type"])
