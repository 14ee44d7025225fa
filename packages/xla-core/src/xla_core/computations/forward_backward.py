"""Records a function and its gradient together, and decides which values the forward pass saves for the backward.

Autograd computes the gradient of the recorded function: the backward pass is recorded right after the forward pass,
with stand-ins for the gradients of the results. The values of the forward pass that it reads are saved, unless they
cost nothing to compute again; ``partition_fn`` may choose otherwise.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from xla_core.computations import rematerialization
from xla_core.computations.body_recorder import MSG_WRITES, Body, Recorder, needed
from xla_core.computations.rematerialization import Keep, PartitionFn
from xla_core.contract.foreign_values import AnyFunction, ForeignObject
from xla_core.execution import eager_mode, index_checks
from xla_core.operators.tensor_meta import TensorMeta
from xla_core.recording.entry import Operation, inputs_of
from xla_core.recording.storage import Storage
from xla_core.recording.trace import Trace
from xla_core.recording.xla_tensor import XLATensor, tensor_on
from xla_core.torch_bridge import error_texts, torch_private
from xla_core.torch_bridge.operands import Operand, Operands, Tree

MSG_HISTORY: Final = (
    "{what} uses a captured tensor whose gradient is needed in a way that cannot be followed ({node}); pass it as "
    "an argument, or detach() it"
)


class Joint:
    """The forward and the backward pass. Values are identified by their numbers in ``body``.

    ``outputs`` are the function's results. ``tangents`` has for each result the input that stands for its gradient,
    or None. ``gradients`` has the gradient of each argument, and then of each captured tensor that needs one, or
    None.
    ``saved`` are the values of the forward pass that the backward pass reads, ``reads`` the inputs of the function
    that it reads. ``forward`` and ``backward`` are the operations of the passes. ``programs`` is a cache for the
    computations that are made of them.
    """

    def __init__(
        self,
        body: Body,
        cut: int,
        outputs: tuple[int, ...],
        tangents: tuple[int | None, ...],
        gradients: tuple[int | None, ...],
        argument_metas: tuple[TensorMeta, ...],
        captures: int,
        partition_fn: PartitionFn | None,
    ) -> None:
        self.body = body
        self.argument_metas = argument_metas
        self.captures = captures
        self.outputs = outputs
        self.tangents = tangents
        self.gradients = gradients
        self.arguments = arguments = len(argument_metas)
        self.inputs = {v: s for v, s in body.inputs.items() if s < arguments}
        self.programs: dict[object, ForeignObject] = {}
        wanted = [g for g in gradients if g is not None]
        keep = rematerialization.keep_rule(body, cut, outputs, wanted, tangents, partition_fn)
        self.backward, self.saved, self.reads = _backward(body, cut, wanted, tangents, keep)
        self.forward = needed(body.entries[:cut], (*outputs, *self.saved))

    @property
    def differentiable(self) -> bool:
        """Whether there is a backward pass."""
        return any(g is not None for g in self.gradients)

    def text(self) -> bytes:
        """Both passes in full."""
        parts = (self.outputs, self.tangents, self.gradients, self.saved, self.arguments)
        wanted = [g for g in self.gradients if g is not None]
        return self.body.text((*self.outputs, *wanted)) + repr(parts).encode()


@dataclasses.dataclass(frozen=True, slots=True)
class Recorded:
    """A joint, and the values of one call of the function.

    ``captured`` are the storages whose values it uses without getting them as arguments, ``differentiable`` the
    captured tensors whose gradients are needed, ``floats`` and ``ints`` the lifted numbers. With
    ``XLA_CHECK_INDICES`` the joint's last outputs are the smallest and largest indices that the function uses,
    which must be in ``ranges``.
    """

    joint: Joint
    captured: tuple[Storage, ...]
    differentiable: tuple[torch.Tensor, ...]
    floats: tuple[float, ...]
    ints: tuple[int, ...]
    ranges: tuple[index_checks.Range, ...] = ()

    def checked(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The results of a call, without the indices for ``ranges`` at their end, which are checked later."""
        count = len(values) - len(self.ranges)
        for wanted, extremes in zip(self.ranges, values[count:], strict=True):
            assert isinstance(extremes, XLATensor)
            index_checks.add(extremes._s.trace, wanted, extremes)
        return list(values[:count])


def _backward(
    body: Body, cut: int, wanted: Sequence[int], tangents: Sequence[int | None], keep: Keep
) -> tuple[list[Operation], tuple[int, ...], tuple[int, ...]]:
    """The operations of the backward pass in order, and the values and inputs of the forward pass that it reads."""
    missing = set(wanted)
    operations: list[Operation] = []
    saved: list[int] = []
    reads: list[int] = []
    for number in range(len(body.entries) - 1, -1, -1):
        entry = body.entries[number]
        values = [v for v in range(entry.first, entry.end) if v in missing]
        if not values:
            continue
        if not isinstance(entry, Operation):
            reads += (v for v in values if v not in tangents)
            continue
        kept = [v for v in values if number < cut and keep(entry, v)]
        saved += kept
        if len(kept) < len(values):
            operations.append(entry)
            missing.update(ref.vid for ref in entry.references())
    operations.reverse()
    return operations, tuple(reversed(saved)), tuple(reversed(reads))


def record(
    trace: Trace,
    what: str,
    function: Callable[[list[XLATensor]], Sequence[torch.Tensor]],
    metas: Sequence[TensorMeta],
    requires: Sequence[bool],
    *,
    wanted: bool,
    partition_fn: PartitionFn | None = None,
) -> Recorded:
    """Record ``function`` for arguments with these shapes and dtypes, which require gradients as ``requires`` says.

    Its gradient is recorded, too, if it is ``wanted`` or if the function captures a tensor that requires one.
    ``what`` names the function in errors. Raises RuntimeError for a function that reads values, or writes in place
    to its arguments or captured tensors.
    """
    recorder = Recorder(trace, what)
    grad = torch.is_grad_enabled()
    history = _Cut(torch_private.next_sequence())
    gradients: list[int | None] = []
    tangents: list[int | None] = []
    captured: list[torch.Tensor] = []
    aliases: list[torch.Tensor] = []
    with trace.lock, eager_mode.mode(False), contextlib.closing(recorder), recorder:
        given = [recorder.stand_in(m, grad and r) for m, r in zip(metas, requires, strict=True)]
        with history, _own_autograd(what), index_checks.of_body() as index_ranges:
            results = [history.alias(r) for r in function(given)]
        results += [extremes for _, extremes in index_ranges]
        outputs = tuple(map(recorder.value, results))
        cut = trace.cur.depth
        if grad:
            captured, aliases = _captured(history, results, given, what)
        if grad and (wanted or captured):
            tangents, gradients = _differentiate(recorder, given, results, aliases)
        sources = tuple(recorder.sources())
    vids = {source: vid for vid, source in zip(_inputs(recorder), sources, strict=True)}
    tangent_vids = tuple(None if t is None else vids.get(t) for t in tangents) or (None,) * len(
        outputs
    )
    passes = (cut, outputs, tangent_vids, tuple(gradients))
    joint = _joint(recorder, sources, passes, tuple(metas), partition_fn)
    ints = joint.body.numbers(recorder.ints)
    return Recorded(
        joint,
        tuple(recorder.captured),
        tuple(captured),
        tuple(recorder.floats),
        tuple(ints),
        tuple(checked for checked, _ in index_ranges),
    )


def _own_saved_values() -> contextlib.AbstractContextManager[object]:
    """Hide the values that autograd saves inside the recorded function from hooks around the call.

    These values exist only during the recording: ``torch.utils.checkpoint`` would run the function again to get
    them, and ``save_on_cpu`` would read them. Both still see the values that the call as a whole saves.
    """
    if not torch_private.saved_tensors_have_hooks():
        return contextlib.nullcontext()
    return saved_tensors_hooks(lambda saved: saved, lambda saved: saved)


def _joint(
    recorder: Recorder,
    sources: tuple[int, ...],
    passes: tuple[int, tuple[int, ...], tuple[int | None, ...], tuple[int | None, ...]],
    metas: tuple[TensorMeta, ...],
    partition_fn: PartitionFn | None,
) -> Joint:
    """The joint of a recording; ``passes`` are the cut, outputs, tangents and gradients for ``Joint``."""
    key = (Joint, *passes, sources, partition_fn)
    joint = recorder.end.programs.get(key)
    if joint is None:
        body = Body(recorder.end, sources)
        joint = Joint(body, *passes, metas, len(recorder.captured), partition_fn)
        recorder.end.keep(key, joint)
    return joint


@contextlib.contextmanager
def _own_autograd(what: str) -> Iterator[None]:
    """Hide saved values from hooks, and raise an error of our own for a write to a stand-in."""
    try:
        with _own_saved_values():
            yield
    except RuntimeError as error:
        if not error_texts.is_write_to_leaf(error):
            raise
        target = "an argument, or to a captured tensor that requires a gradient"
        raise RuntimeError(MSG_WRITES.format(what=what, target=target)) from error


def _inputs(recorder: Recorder) -> list[int]:
    return [entry.first for entry in inputs_of(recorder.end.path())]


def _differentiate(
    recorder: Recorder,
    given: Sequence[XLATensor],
    results: Sequence[torch.Tensor],
    captured: Sequence[torch.Tensor],
) -> tuple[list[int | None], list[int | None]]:
    """Record the backward pass; returns the stand-ins of the results' gradients, and the gradients."""
    tangents: list[int | None] = []
    for result in results:
        tangents.append(len(recorder.stand_ins) if result.requires_grad else None)
        if result.requires_grad:
            assert isinstance(result, XLATensor)
            recorder.stand_in(result._v.meta if result._v is not None else result._s.meta)
    sources = [r for r in results if r.requires_grad]
    targets = [t for t in (*given, *captured) if t.requires_grad]
    if not sources or not targets:
        return tangents, [None] * (len(given) + len(captured))
    # as when a user calls backward() outside of the autocast region
    with torch.autocast("xla", enabled=False):
        derivatives = torch.autograd.grad(
            sources, targets, recorder.stand_ins[len(given) :], allow_unused=True
        )
    values = iter(derivatives)
    gradients: list[int | None] = []
    for t in (*given, *captured):
        gradient = next(values) if t.requires_grad else None
        gradients.append(None if gradient is None else recorder.value(gradient))
    return tangents, gradients


class _Cut(TorchFunctionMode):
    """Cuts the history of captured tensors where they are passed to functions of torch.

    A tensor with a history from before ``start`` is replaced by an alias without one: the gradient of the tensor is
    needed, and the operations that computed it do not belong to the function.
    """

    def __init__(self, start: int) -> None:
        super().__init__()
        self.start = start
        self.aliases: dict[
            tuple[torch.autograd.graph.Node, int], tuple[torch.Tensor, torch.Tensor]
        ] = {}

    def __torch_function__(
        self, func: AnyFunction, _types: object, args: Operands = (), kwargs: Tree = None
    ) -> Operand:
        named = {name: self.alias(a) for name, a in kwargs.items()} if kwargs else {}
        return func(*map(self.alias, args), **named)

    def alias(self, a: Operand) -> Operand:
        """``a``, or the alias that replaces it; also for the items of a list or tuple."""
        if isinstance(a, XLATensor):
            node = a.grad_fn
            if node is None or torch_private.sequence_of(node) >= self.start:
                return a
            key = (node, a.output_nr)
            if key not in self.aliases:
                self.aliases[key] = (a, a.detach().requires_grad_())
            return self.aliases[key][1]
        if type(a) in (list, tuple):
            return type(a)(map(self.alias, a))
        return a


def _captured(
    cut: _Cut, results: Sequence[torch.Tensor], given: Sequence[torch.Tensor], what: str
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The captured tensors in the results' history, and the aliases that stand for them."""
    own = {get_gradient_edge(t).node for t in given if t.requires_grad}
    originals = {get_gradient_edge(alias).node: a for a, alias in cut.aliases.values()}
    pending = [get_gradient_edge(r).node for r in reversed(results) if r.requires_grad]
    visited: set[object] = set()
    aliases: dict[torch.Tensor, torch.Tensor] = {}
    while pending:
        node = pending.pop()
        if node in own or node in visited:
            continue
        visited.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            aliases[leaf] = originals.get(node, leaf)
        elif torch_private.sequence_of(node) < cut.start:
            raise RuntimeError(MSG_HISTORY.format(what=what, node=node.name()))
        else:
            pending += [n for n, _ in reversed(node.next_functions) if n is not None]
    return list(aliases.values()), list(aliases)


class Passes:
    """The passes of one call of a recorded function, for autograd. Subclasses define what they compute."""

    def forward(
        self, tensors: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[bool], list[torch.Tensor]]:
        """The results, whether each has a gradient, and the values that the backward pass reads."""
        raise NotImplementedError

    def backward(
        self, saved: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """The gradient of each tensor that ``forward`` took, or None."""
        raise NotImplementedError


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, passes: Passes, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        results, differentiable, saved = passes.forward(tensors)
        ctx.passes = passes
        ctx.save_for_backward(*saved)
        ctx.mark_non_differentiable(
            *(r for r, has in zip(results, differentiable, strict=True) if not has)
        )
        return tuple(results)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: FunctionCtx, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None, *ctx.passes.backward(ctx.saved_tensors, gradients))


def run(passes: Passes, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The results of the passes for these tensors, with an autograd history if a gradient is needed."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return list(_Apply.apply(passes, *tensors))
    with torch.no_grad():
        return passes.forward(tensors)[0]


def modes() -> tuple[object, ...]:
    """The modes of torch that affect what a function records."""
    return (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("xla"),
        torch.get_autocast_dtype("xla"),
    )


def snapshot(tensor: torch.Tensor | Storage) -> XLATensor:
    """A tensor with the present value of ``tensor``, which later writes to ``tensor`` do not change."""
    s = tensor if isinstance(tensor, Storage) else tensor._s  # type: ignore[attr-defined]
    trace: Trace = s.trace
    whole = tensor_on(s) if isinstance(tensor, Storage) else tensor
    assert isinstance(whole, XLATensor)
    with trace.lock:
        vid = trace.value_of(whole)
        return trace.new_tensor(whole._v.meta if whole._v is not None else s.meta, vid)
