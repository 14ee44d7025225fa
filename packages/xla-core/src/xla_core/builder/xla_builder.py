"""The names of ``torch_xla.core.xla_builder``: types, shapes, operations, computations.

Operations are HLO's, by the names of https://openxla.org/xla/operation_semantics in snake case.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from xla_core.builder import hlo_operations
from xla_core.builder.hlo import (
    TORCH_TYPES,
    XLA_TYPES,
    XlaBuilder,
    XlaComputation,
    XlaOp,
    describe,
    from_module,
    struct_of,
)
from xla_core.builder.hlo_attributes import ATTRIBUTES
from xla_core.builder.hlo_shapes import Shape
from xla_core.builder.hlo_shapes import Type as Type
from xla_core.contract.foreign_values import AnyFunction
from xla_core.execution import runtime
from xla_core.operators.tensor_meta import tensor_meta
from xla_core.recording.storage import PLACEHOLDER
from xla_core.torch_bridge.operands import Operand, Tree


def _unary(name: str) -> Callable[[Op], Op]:
    def method(self: Op) -> Op:
        return mkop(name, (self.op,))

    method.__doc__ = f"HLO's {name}, element by element."
    return method


def _binary(name: str) -> Callable[[Op, Op], Op]:
    def method(self: Op, rhs: Op) -> Op:
        return mkop(name, (self.op, rhs.op))

    method.__doc__ = f"HLO's {name}, element by element; scalars are broadcast."
    return method


def _with_attributes(name: str, *operands: str) -> Callable[..., Op]:
    """A method for the operation ``name``, whose first arguments, called ``operands``, are operations."""

    def method(self: Op, *args: Operand, **attributes: Operand) -> Op:
        ops, rest = list(args[: len(operands)]), args[len(operands) :]
        ops += [attributes.pop(o) for o in operands[len(ops) :]]
        attributes.update(zip(ATTRIBUTES[name], rest, strict=False))
        return mkop(name, (self.op, *(o.op for o in ops)), **attributes)

    method.__doc__ = f"HLO's {name}: operands {operands or 'none'}, then {ATTRIBUTES[name]}."
    return method


class Op:
    """An operation of a computation that is being built; its methods and operators create further ones."""

    def __init__(self, op: XlaOp) -> None:
        self.op = op

    def shape(self) -> Shape:
        """The shape of its value."""
        return Shape(describe(self.op.struct))

    def builder(self) -> XlaBuilder:
        """The builder that it belongs to."""
        return self.op.builder

    def build(self, name: str) -> XlaComputation:
        """The computation ``name`` that returns this operation's value."""
        return self.op.build(name)

    __add__, __sub__, __mul__ = _binary("Add"), _binary("Sub"), _binary("Mul")
    __truediv__, __pow__, __mod__ = _binary("Div"), _binary("Pow"), _binary("Rem")
    __and__, __or__, __xor__ = _binary("And"), _binary("Or"), _binary("Xor")
    __le__, __lt__, __ge__, __gt__ = _binary("Le"), _binary("Lt"), _binary("Ge"), _binary("Gt")
    __eq__, __ne__ = _binary("Eq"), _binary("Ne")  # type: ignore[assignment]
    __hash__ = object.__hash__
    __lshift__, __rshift__ = _binary("ShiftLeft"), _binary("ShiftRight")
    __matmul__ = _binary("Dot")
    __neg__, __not__, __invert__ = _unary("Neg"), _unary("Not"), _unary("Not")
    atan2, max, min = _binary("Atan2"), _binary("Max"), _binary("Min")

    acos, asin, atan = _unary("Acos"), _unary("Asin"), _unary("Atan")
    cos, sin, tan = _unary("Cos"), _unary("Sin"), _unary("Tan")
    cosh, sinh, tanh = _unary("Cosh"), _unary("Sinh"), _unary("Tanh")
    erf, erfc, erfinf = _unary("Erf"), _unary("Erfc"), _unary("ErfInv")
    exp, expm1, log, log1p = _unary("Exp"), _unary("Expm1"), _unary("Log"), _unary("Log1p")
    ceil, floor, sqrt, rsqrt = _unary("Ceil"), _unary("Floor"), _unary("Sqrt"), _unary("Rsqrt")
    real, imag, conj, clz = _unary("Real"), _unary("Imag"), _unary("Conj"), _unary("Clz")

    reshape = _with_attributes("Reshape")
    dynamic_reshape = _with_attributes("DynamicReshape")
    broadcast = _with_attributes("Broadcast")
    broadcast_in_dim = _with_attributes("BroadcastInDim")
    gather = _with_attributes("Gather", "start_indices")
    conv = _with_attributes("Conv", "kernel")
    conv_with_general_padding = _with_attributes("ConvWithGeneralPadding", "kernel")
    conv_with_general_dimensions = _with_attributes("ConvWithGeneralDimensions", "kernel")
    conv_general = _with_attributes("ConvGeneral", "kernel")
    conv_general_dilated = _with_attributes("ConvGeneralDilated", "kernel")
    cast = _with_attributes("Convert")
    bitcast = _with_attributes("BitcastConvert")
    pad = _with_attributes("Pad", "value")
    max_pool = _with_attributes("MaxPool")
    select = _with_attributes("Select", "true_value", "false_value")
    transpose = _with_attributes("Transpose")
    triangualr_solve = triangular_solve = _with_attributes("TriangularSolve", "b")
    clamp = _with_attributes("Clamp", "min_value", "max_value")
    get_tuple_element = _with_attributes("GetTupleElement")
    get_dimension_size = _with_attributes("GetDimensionSize")
    set_dimension_size = _with_attributes("SetDimensionSize", "size")
    rev = _with_attributes("Rev")

    def slice(
        self,
        start_indices: Sequence[int],
        limit_indices: Sequence[int],
        strides: Sequence[int] | None = None,
    ) -> Op:
        """HLO's Slice; the strides default to 1."""
        steps = [1] * len(start_indices) if strides is None else strides
        return mkop(
            "Slice",
            (self.op,),
            start_indices=start_indices,
            limit_indices=limit_indices,
            strides=steps,
        )

    def slice_in_dim(self, start_index: int, limit_index: int, dimno: int, stride: int = 1) -> Op:
        """A slice along one dimension."""
        return mkop(
            "SliceInDim",
            (self.op,),
            start_index=start_index,
            limit_index=limit_index,
            dimno=dimno,
            stride=stride,
        )

    def dynamic_slice(self, start_indices: Sequence[Op], slice_sizes: Sequence[int]) -> Op:
        """A slice of fixed sizes that begins at ``start_indices``, which are scalars."""
        starts = [s.op for s in start_indices]
        return mkop("DynamicSlice", (self.op,), start_indices=starts, slice_sizes=slice_sizes)

    def dynamic_update_slice(self, update: Op, start_indices: Sequence[Op]) -> Op:
        """The value with ``update`` written at ``start_indices``, which are scalars."""
        starts = [s.op for s in start_indices]
        return mkop("DynamicUpdateSlice", (self.op, update.op), start_indices=starts)

    def scatter(
        self,
        scatter_indices: Op,
        updates: Op,
        computation: AnyFunction,
        *args: object,
        **attributes: object,
    ) -> Op:
        """HLO's Scatter: update_window_dims, inserted_window_dims, scatter_dims_to_operand_dims, ..."""
        attributes.update(zip(ATTRIBUTES["Scatter"], args, strict=False))
        operands = (self.op, scatter_indices.op, updates.op)
        return mkop("Scatter", operands, computation=self._pair(computation), **attributes)

    def _pair(self, computation: AnyFunction) -> XlaComputation:
        """A computation of two elements."""
        scalar = self.shape().as_scalar()
        return Op.make_computation("elements", computation, (scalar, scalar))

    def reduce(self, init_value: Op, computation: AnyFunction, dimensions: Sequence[int]) -> Op:
        """HLO's Reduce along ``dimensions``, by ``computation`` of two elements."""
        operands = (self.op, init_value.op)
        return mkop("Reduce", operands, computation=self._pair(computation), dimensions=dimensions)

    def reduce_all(self, init_value: Op, computation: AnyFunction) -> Op:
        """HLO's Reduce along all dimensions, by ``computation`` of two elements."""
        return mkop("ReduceAll", (self.op, init_value.op), computation=self._pair(computation))

    def reduce_window(
        self,
        init_value: Op,
        computation: AnyFunction,
        window_dimensions: Sequence[int],
        window_strides: Sequence[int],
        padding: str = "valid",
    ) -> Op:
        """HLO's ReduceWindow, by ``computation`` of two elements; ``padding`` is ``"valid"`` or ``"same"``."""
        return mkop(
            "ReduceWindow",
            (self.op, init_value.op),
            computation=self._pair(computation),
            window_dimensions=window_dimensions,
            window_strides=window_strides,
            padding=padding,
        )

    def select_and_scatter(
        self,
        source: Op,
        init_value: Op,
        window_dimensions: Sequence[int],
        window_strides: Sequence[int],
        select_computation: AnyFunction,
        scatter_computation: AnyFunction,
        padding: object = "valid",
    ) -> Op:
        """HLO's SelectAndScatter; ``padding`` by name, or (low, high) for each dimension."""
        return mkop(
            "SelectAndScatter",
            (self.op, source.op, init_value.op),
            window_dimensions=window_dimensions,
            window_strides=window_strides,
            select_computation=self._pair(select_computation),
            scatter_computation=self._pair(scatter_computation),
            padding=padding,
        )

    select_and_scatter_with_general_padding = select_and_scatter

    def conditional(
        self,
        true_operand: Op,
        false_operand: Op,
        true_computation: AnyFunction,
        false_computation: AnyFunction,
    ) -> Op:
        """HLO's Conditional: one of two computations, each with an operand of its own."""
        return mkop(
            "Conditional",
            (self.op, true_operand.op, false_operand.op),
            true_computation=Op.make_computation("CondTrue", true_computation, (true_operand,)),
            false_computation=Op.make_computation("CondFalse", false_computation, (false_operand,)),
        )

    def mkconditional(
        self, ops: Sequence[Op], true_fn: AnyFunction, false_fn: AnyFunction, **_: object
    ) -> Op:
        """HLO's Conditional of two functions of the same operands."""
        operands = Op.tuple(ops)
        return self.conditional(operands, operands, true_fn, false_fn)

    def while_loop(self, condition_computation: AnyFunction, body_computation: AnyFunction) -> Op:
        """HLO's While, which begins with this value (a tuple); returns the value after the last iteration."""
        condition = Op.make_computation("Condition", condition_computation, (self,))
        body = Op.make_computation("Body", body_computation, (self,))
        return mkop("While", (self.op,), condition_computation=condition, body_computation=body)

    @classmethod
    def mkwhile(
        cls, ops: Sequence[Op], condition_fn: AnyFunction, body_fn: AnyFunction, **_: object
    ) -> Op:
        """HLO's While on the tuple of ``ops``, with functions of its elements."""
        return cls.tuple(ops).while_loop(condition_fn, body_fn)

    @classmethod
    def wrap_function(cls, fn: AnyFunction) -> Callable[..., Op]:
        """A function of a tuple that calls ``fn`` with its elements; a returned tuple becomes one operation."""

        def wrapper(*args: Op, **kwargs: object) -> Op:
            if len(args) == 1 and args[0].shape().is_tuple():
                count = args[0].shape().tuple_size()
                args = tuple(args[0].get_tuple_element(i) for i in range(count))
            result = fn(*args, **kwargs)
            return cls.tuple(result) if isinstance(result, (tuple, list)) else result

        return wrapper

    @classmethod
    def make_computation(
        cls,
        name: str,
        computation: AnyFunction,
        args_or_shapes: Sequence[Op | Shape],
        **kwargs: object,
    ) -> XlaComputation:
        """``computation`` itself, or the one that it builds for these shapes if it is a Python function."""
        if isinstance(computation, XlaComputation):
            return computation
        shapes = [a if isinstance(a, Shape) else a.shape() for a in args_or_shapes]
        return create_computation(name, cls.wrap_function(computation), shapes, **kwargs)

    @classmethod
    def tuple(cls, ops: Sequence[Op], builder: XlaBuilder | None = None) -> Op:
        """HLO's Tuple; ``builder`` is needed only without ``ops``."""
        return mkop("Tuple", [o.op for o in ops], builder=builder)

    @classmethod
    def concat_in_dim(
        cls, ops: Sequence[Op], dimension: int, builder: XlaBuilder | None = None
    ) -> Op:
        """HLO's Concatenate along ``dimension``."""
        return mkop("ConcatInDim", [o.op for o in ops], builder=builder, dimension=dimension)

    @classmethod
    def call(
        cls, computation: AnyFunction, ops: Sequence[Op], builder: XlaBuilder | None = None
    ) -> Op:
        """HLO's Call of a computation, or of a Python function that builds one."""
        callee = cls.make_computation("Call", computation, ops)
        return mkop("Call", [o.op for o in ops], builder=builder, computation=callee)

    @classmethod
    def map(
        cls,
        ops: Sequence[Op],
        computation: AnyFunction,
        dimensions: Sequence[int],
        static_operands: Sequence[Op] = (),
        builder: XlaBuilder | None = None,
    ) -> Op:
        """HLO's Map: a computation of scalars, applied to the elements of the operands."""
        scalars = [o.shape().as_scalar() for o in (*ops, *static_operands)]
        return mkop(
            "Map",
            [o.op for o in ops],
            builder=builder,
            computation=cls.make_computation("Map", computation, scalars),
            dimensions=dimensions,
            static_operands=[o.op for o in static_operands],
        )

    @classmethod
    def sort(
        cls,
        ops: Sequence[Op],
        comparator: AnyFunction,
        dimension: int | None = None,
        is_stable: bool | None = None,
    ) -> Op:
        """HLO's Sort along ``dimension`` (default: the last), by a comparator of two scalars of each operand."""
        scalars = [o.shape().as_scalar() for o in ops for _ in range(2)]
        return mkop(
            "Sort",
            [o.op for o in ops],
            comparator=cls.make_computation("Sort", comparator, scalars),
            dimension=dimension,
            is_stable=is_stable,
        )

    @classmethod
    def constant(cls, builder: XlaBuilder, value: torch.Tensor) -> Op:
        """HLO's Constant with the values of a CPU tensor."""
        return mkleaf("Constant", builder, value=value)

    @classmethod
    def scalar(cls, builder: XlaBuilder, value: object, dtype: str | None = None) -> Op:
        """A scalar constant of the element type ``dtype`` (default: f32)."""
        return mkleaf(
            "Constant", builder, value=torch.tensor(value, dtype=cls.to_torch_type(dtype))
        )

    @classmethod
    def zero(cls, builder: XlaBuilder, dtype: str | None = None) -> Op:
        """The scalar 0."""
        return cls.scalar(builder, 0, dtype)

    @classmethod
    def one(cls, builder: XlaBuilder, dtype: str | None = None) -> Op:
        """The scalar 1."""
        return cls.scalar(builder, 1, dtype)

    @classmethod
    def iota(cls, builder: XlaBuilder, shape: Shape, iota_dimension: int) -> Op:
        """HLO's Iota: the indices 0, 1, 2, ... along ``iota_dimension``."""
        return mkleaf("Iota", builder, shape=shape.shape, iota_dimension=iota_dimension)

    def scalar_like(self, value: object) -> Op:
        """A constant of this shape and dtype, filled with ``value``."""
        shape = self.shape()
        return Op.scalar(self.builder(), value, shape.dtype).broadcast(shape.sizes)

    def zeros_like(self) -> Op:
        """Zeros of this shape and dtype."""
        return self.scalar_like(0)

    def ones_like(self) -> Op:
        """Ones of this shape and dtype."""
        return self.scalar_like(1)

    @classmethod
    def to_torch_type(cls, dtype: str | None) -> torch.dtype:
        """PyTorch's dtype for an XLA name; float32 for None."""
        return TORCH_TYPES[dtype] if dtype else torch.float32

    @classmethod
    def from_torch_type(cls, dtype: torch.dtype) -> str:
        """XLA's name of a PyTorch dtype."""
        return XLA_TYPES[dtype]


def create_builder(name: str) -> XlaBuilder:
    """A builder for the operations of one computation."""
    return XlaBuilder(name)


def mkshape(
    dtype: str, sizes: Sequence[int], dynamic_dimensions: Sequence[bool] | None = None
) -> Shape:
    """The shape of an array with the element type ``dtype`` (``"f32"``)."""
    return Shape.create(dtype, sizes, dynamic_dimensions)


def mkop(name: str, ops: Sequence[XlaOp], **kwargs: Operand) -> Op:
    """The operation ``name`` (``"Add"``) on ``ops``, with HLO's attributes as keyword arguments.

    Raises RuntimeError for an unknown name, and for operands that do not fit or belong to another builder.
    """
    builder = kwargs.get("builder") or ops[0].builder
    return Op(hlo_operations.create(builder, name, ops, kwargs))


def mkleaf(name: str, builder: XlaBuilder, **kwargs: object) -> Op:
    """An operation without operands, such as ``"Constant"`` or ``"Iota"``."""
    return Op(hlo_operations.create(builder, name, (), kwargs))


def mkparam(builder: XlaBuilder, param_no: int, shape: Shape) -> Op:
    """The parameter number ``param_no`` of the computation. Raises RuntimeError for dynamic dimensions."""
    struct = struct_of(shape.shape)
    return Op(XlaOp(builder, "parameter", (), lambda: None, int(param_no), struct))


def tensor_shape(tensor: Tree, device: str = "") -> Tree:
    """The shape of a tensor, or a list of the shapes of several."""
    if isinstance(tensor, (list, tuple)):
        return [tensor_shape(t, device) for t in tensor]
    return Shape.create(Op.from_torch_type(tensor.dtype), tuple(tensor.shape))


def create_computation(
    name: str, fn: Callable[..., Op], shapes: Sequence[Shape], **kwargs: object
) -> XlaComputation:
    """The computation that ``fn`` builds from parameters of these shapes."""
    builder = create_builder(name)
    parameters = [mkparam(builder, number, shape) for number, shape in enumerate(shapes)]
    root: Op = fn(*parameters, **kwargs)
    return root.build(name)


def computation_from_module_proto(name: str, proto: bytes) -> XlaComputation:
    """The computation of a serialized HloModuleProto. Raises ValueError for other bytes."""
    return from_module(name, proto)


def get_computation_hlo(computation: XlaComputation) -> str:
    """The computation as HLO text."""
    return computation.hlo_text()


def xla_computation_as_func(
    computation: XlaComputation, name: str | None = None
) -> Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]:
    """A function from a list of ``xla`` tensors to the list of the computation's results."""

    def fn(input_tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return computation.run(name or "xla::computation", input_tensors)

    return fn


def create_placeholder_tensor(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor on the current ``xla`` device without a value, for recording computations.

    Reading a value that depends on it raises RuntimeError.
    """
    meta = tensor_meta(tuple(shape), dtype)
    trace = runtime.trace_of(None)
    trace.expect_placeholders()
    return trace.from_buffer(PLACEHOLDER, meta)
