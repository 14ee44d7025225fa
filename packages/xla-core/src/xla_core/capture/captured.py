"""``Captured``: a function that is recorded, and then replayed without running its Python code."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Final

import torch
from torch.utils import _pytree as pytree

from xla_core.capture import errors
from xla_core.capture.errors import refuse
from xla_core.capture.executed_code import ExecutedCode, noticing_prints, stream_capturing
from xla_core.capture.guards import TRAINING, Guards, Snapshot
from xla_core.capture.matching import gradients_in_one, wiring
from xla_core.capture.observation import Observation, Observer
from xla_core.capture.reachable import Reachable
from xla_core.capture.replay import Replay
from xla_core.capture.slots import Rate, position_of, random_states_of_host
from xla_core.contract.foreign_values import ForeignObject
from xla_core.dispatch import transfers
from xla_core.execution import runtime
from xla_core.execution.device_backend import DeviceBackend
from xla_core.lowering import compile_settings
from xla_core.recording.storage import chain
from xla_core.recording.trace import Trace
from xla_core.recording.xla_tensor import XLATensor
from xla_core.support import counters, flags
from xla_core.torch_bridge.operands import Operand, Tree
from xla_core.torch_bridge.torch_private import without_torch_function

RECORDED: Final = "CapturedStepRecorded"
"""Counts the calls of captured functions that ran their Python code to record it."""
CALLS_THAT_DRAW: Final = 20
"""How many calls must have recorded the same if the step draws on the host, which may decide what it does."""


@dataclasses.dataclass(slots=True)
class _Progress:
    """The calls so far with arguments of one kind, before there is a replay, and what the last one recorded.

    ``same`` is how many calls before the last one have recorded the same, one after the other.
    """

    calls: int = 0
    observed: Observation | None = None
    attempts: int = 0
    same: int = 0

    @property
    def present(self) -> Set[int]:
        """The ids of parameters that had a gradient before the last call."""
        return set() if self.observed is None else self.observed.present().keys()


class Captured:
    """A callable that records ``function`` and replays it; made by ``capture``."""

    def __init__(
        self,
        function: Callable[..., object],
        warmup: int = 1,
        check_every: int = 0,
        max_recordings: int = 16,
    ) -> None:
        for option, got, least in (
            ("warmup", warmup, 0), ("check_every", check_every, 0), ("max_recordings", max_recordings, 1),
        ):  # fmt: skip
            if not isinstance(got, int) or got < least:
                raise ValueError(
                    errors.MSG_CHECK_OPTION.format(option=option, got=got, least=least)
                )
        functools.update_wrapper(self, function, updated=())
        self._function = function
        self._name = getattr(function, "__qualname__", None) or type(function).__name__
        self._warmup = warmup
        self._check_every = check_every
        self._max = max_recordings
        self._known: dict[tuple[Operand, ...], Replay | _Progress] = {}
        self._executed: dict[tuple[Operand, ...], ExecutedCode] = {}
        self._bound: weakref.WeakKeyDictionary[object, Captured] = weakref.WeakKeyDictionary()
        self._flagged: list[Operand] = []
        self._switched: list[torch.nn.Module] = []
        self._graded: list[Operand] = []
        self._replays = 0

    def __get__(self, instance: object, owner: type | None = None) -> Captured:
        """For a method: the capture of the instance's method, with recordings of its own."""
        if instance is None:
            return self
        known = self._bound.get(instance)
        if known is None:
            method = self._function.__get__(instance, owner)
            known = Captured(method, self._warmup, self._check_every, self._max)
            self._bound[instance] = known
        return known

    @property
    def recordings(self) -> int:
        """The number of kinds of arguments for which the function is replayed."""
        return sum(isinstance(one, Replay) for one in self._known.values())

    def reset(self) -> None:
        """Forget all recordings; the next calls record again."""
        self._known.clear()
        self._executed.clear()
        self._flagged.clear()
        self._switched.clear()
        self._graded.clear()
        for one in self._bound.values():
            one.reset()

    def __call__(self, *args: Operand, **kwargs: object) -> Tree:
        """Replay the function, or in the first calls record it like an ordinary step, and return its results.

        CPU tensors among the arguments are uploaded. Raises CaptureError if the function cannot be captured, or if
        something that it depends on has changed since it was recorded.
        """
        leaves, spec = (args, None)
        key: tuple[object, ...] = () if kwargs else tuple(map(_kind, leaves))
        if kwargs or _NESTED in key:
            leaves, spec = pytree.tree_flatten((args, kwargs))
            key = tuple(map(_kind_of_leaf, leaves))
        trace = _trace_of(leaves)
        # the step that sets requires_grad or a mode itself may look at it before
        flags = tuple(t.requires_grad for t in self._flagged) if self._flagged else ()
        graded = self._have_gradients() if self._graded else ()
        modes = tuple(map(TRAINING, self._switched))
        key = (key, spec, _mode(), _layouts(leaves, trace), flags, modes, graded)
        known = self._known.get(key)
        try:
            if type(known) is Replay and not self._is_check_due():
                tensors = [_on_device(t, trace) for t in leaves if isinstance(t, torch.Tensor)]
                return known.run(tensors)
            return self._record(trace, key, known, leaves, spec)
        except errors.OtherGradientsError as error:  # nothing has run yet
            if not self._tell_apart(error.parameters):
                raise
        return self(*args, **kwargs)

    def _have_gradients(self) -> tuple[bool, ...]:
        with without_torch_function():
            return tuple(p.grad is not None for p in self._graded)

    def _tell_apart(self, parameters: Iterable[Operand]) -> bool:
        """Let keys say which of these parameters have gradients; False if they say it for all of them already."""
        known = set(map(id, self._graded))
        fresh = [p for p in parameters if id(p) not in known]
        self._graded += fresh
        longer = {key: _with_gradients(key, one.present, fresh) for key, one in self._known.items()}
        self._known = {longer[key]: one for key, one in self._known.items()}
        self._executed = {longer[key]: self._executed[key] for key in longer}
        return bool(fresh)

    def _is_check_due(self) -> bool:
        self._replays += 1
        return bool(self._check_every) and self._replays % self._check_every == 0

    # -- recording -----------------------------------------------------------------------------

    def _record(
        self, trace: Trace, key: tuple[Operand, ...], known: ForeignObject, leaves: Sequence[Operand],
        spec: object,
    ) -> object:  # fmt: skip
        leaves = [_on_device(t, trace) if isinstance(t, torch.Tensor) else t for t in leaves]
        args, kwargs = (leaves, {}) if spec is None else pytree.tree_unflatten(leaves, spec)
        function = functools.partial(self._function, *args, **kwargs)
        if (
            trace.on_new_storage is not None
            or trace.forbidden is not None
            or flags.CHECK_INDICES.get()
        ):
            return function()  # inside another one's step
        if known is None:
            if len(self._known) >= self._max:
                raise refuse(errors.MSG_MANY, name=self._name, count=len(self._known))
            known = self._known[key] = _Progress()
        code = self._executed.setdefault(key, ExecutedCode())
        if type(known) is _Progress and known.calls < self._warmup:
            known.calls += 1
            with code.noting(trace), stream_capturing(code):
                result = detached(function())
            runtime.sync(trace.device)
            return result
        tensors = [t for t in leaves if isinstance(t, torch.Tensor)]
        objects = {
            f"argument {i}": a for i, a in enumerate(leaves) if not isinstance(a, torch.Tensor)
        }
        reachable = Reachable.of(self._function, objects, code)
        inputs = known.inputs(tensors) if type(known) is Replay else []
        lines = code.count_lines()
        observed, result = observe(self._name, trace, function, tensors, reachable, code)
        counters.increment(RECORDED)
        key = self._noted(key, observed, reachable)
        if type(known) is Replay:
            known.compare(inputs, observed)
            return result
        former, known.observed = known.observed, observed
        known.calls += 1
        # what a line does that no call before has run was not looked at; the next call will be compared
        if former is not None and code.count_lines() == lines:
            self._end_recording(trace, key, former, Reachable.of(self._function, objects, code))
        return result

    def _end_recording(
        self, trace: Trace, key: tuple[Operand, ...], former: Observation, reachable: Reachable
    ) -> None:
        """Make the replay of two recorded calls; if they differ, wait for another one, or for one of each kind.

        A step that draws on the host must be recorded more often, as it may do something else next time.
        Raises CaptureError if two calls differ again.
        """
        known: ForeignObject = self._known[key]
        latter = known.observed
        try:
            replay = replay_of(self._name, trace, former, latter, reachable)
        except errors.CaptureError:
            known.same = 0
            known.attempts += 1
            if others := gradients_in_one(former, latter):
                self._separate(key, known, former, others)
            elif known.attempts > 1:
                raise
        else:
            known.same += 1
            if not (former.draws or latter.draws) or known.same >= CALLS_THAT_DRAW - 1:
                self._known[key] = replay

    def _separate(
        self, key: tuple[Operand, ...], latter: _Progress, former: Observation, parameters: Sequence[Operand]
    ) -> None:  # fmt: skip
        """Let two calls be of different kinds, as one had gradients of ``parameters`` that the other lacked."""
        earlier = _Progress(latter.calls, former)
        latter.attempts = 0
        code = self._executed[key]
        self._tell_apart(parameters)
        key = _with_gradients(key, earlier.present, parameters)
        self._known[key], self._executed[key] = earlier, code

    def _noted(
        self, key: tuple[Operand, ...], observed: Observation, reachable: Reachable
    ) -> tuple[Operand, ...]:
        """The call's key, with what it is the first to have set: ``requires_grad`` of tensors, modes of modules."""
        fresh = observed.flagged.keys() - set(map(id, self._flagged))
        tensors = [t for t in reachable.tensors() if id(t) in fresh] if fresh else []
        known = set(map(id, self._switched))
        switched = [(module, was) for module, was, _ in observed.modes if id(module) not in known]
        if not (tensors or switched):
            return key
        self._flagged += tensors
        self._switched += [module for module, _ in switched]
        *others, flags, modes, graded = key
        flags = (*flags, *(observed.flagged[id(t)] for t in tensors))
        longer = (*others, flags, (*modes, *(was for _, was in switched)), graded)
        self._known[longer] = self._known.pop(key)
        self._executed[longer] = self._executed.pop(key)
        return longer


def replay_of(
    name: str, trace: Trace, former: Observation, latter: Observation, reachable: Reachable
) -> Replay:
    """The replay of a step that two calls recorded. Raises CaptureError if they did not record the same."""
    guards = Guards(name, reachable)
    tensors = [t for t in reachable.tensors() if isinstance(t, XLATensor)]
    held = {id(s) for s in (*guards.storages(), *(t._s for t in tensors))}
    shared = wiring(name, trace, former, latter, held)
    return Replay(name, trace, shared, former, latter, guards)


def _with_gradients(
    key: tuple[Operand, ...], present: Set[int], parameters: Iterable[Operand]
) -> tuple[Operand, ...]:
    """A key that also says which of these parameters had gradients: those with ids in ``present``."""
    *others, graded = key
    return (*others, (*graded, *(id(p) in present for p in parameters)))


def observe(
    name: str,
    trace: Trace,
    function: Callable[[], object],
    arguments: Sequence[XLATensor],
    reachable: Reachable,
    code: ExecutedCode,
) -> tuple[Observation, object]:
    """Call ``function`` and run its step; returns what it recorded, and its result.

    Raises CaptureError if a replay could not do what the step did. The step has run then, unless it read a value.
    """
    parameters = reachable.parameters()
    before = Snapshot(reachable)
    drawn = random_states_of_host(), list(map(position_of, reachable.sources))
    leaves = [t for t in arguments if t.is_leaf]
    given = [t.grad for t in leaves]
    observer = Observer(trace, name, arguments, parameters)
    schedulers = list(reachable.schedulers.values())
    modules = [m for _, m in reachable.modules.values()] if reachable.sets_modes else []
    modes = list(map(TRAINING, modules))
    with (
        noticing_prints(name) as noticed,
        observer.recording(schedulers),
        code.noting(trace),
        stream_capturing(code),
    ):
        result = function()
    result = detached(result)
    observed = observer.end(result)
    observed.modes = list(zip(modules, modes, map(TRAINING, modules), strict=True))
    observed.draws = drawn != (random_states_of_host(), list(map(position_of, reachable.sources)))
    noticed.check()
    _check_rates(name, observed, reachable)
    before.check_unchanged(name)
    if any(t.is_leaf and t.grad is not grad for t, grad in zip(leaves, given, strict=True)):
        raise refuse(errors.MSG_ARGUMENT_GRADIENT, name=name)
    _check_gradients_of_results(name, result, {id(t) for t in (*parameters, *arguments)})
    return observed, result


def _check_rates(name: str, observed: Observation, reachable: Reachable) -> None:
    """Refuse a step that reads a rate which its own schedule changes: it may do so after that."""
    if any(kind == "schedule" for kind, _ in observed.events):
        for slot in reachable.slots:
            if isinstance(slot, Rate):
                raise refuse(errors.MSG_RATE, name=name, what=slot.path)


def _check_gradients_of_results(name: str, result: Operand, existed: Set[int]) -> None:
    """Refuse a result with a gradient, as a replay returns values only; ``existed`` are ids of former tensors."""
    for leaf in pytree.tree_leaves(result):
        is_new = isinstance(leaf, XLATensor) and id(leaf) not in existed
        if is_new and leaf.is_leaf and leaf.grad is not None:
            raise refuse(errors.MSG_RESULT_GRADIENT, name=name, meta=leaf._s.meta)


def detached(result: Operand) -> Operand:
    """The results without their autograd graphs."""
    return pytree.tree_map(_detached, result)


def _detached(leaf: Operand) -> Operand:
    if isinstance(leaf, XLATensor) and leaf.grad_fn is not None:
        return leaf.detach()
    return leaf


_NESTED: Final = object()


def _kind(leaf: Operand) -> Operand:
    """The part of the key of a recording that an argument contributes."""
    if type(leaf) is XLATensor:
        return (leaf._s.meta, leaf.requires_grad) if leaf._v is None else _kind_of_tensor(leaf)
    if isinstance(leaf, XLATensor):
        return type(leaf), _kind_of_tensor(leaf)
    if isinstance(leaf, torch.Tensor):
        return leaf.dtype, leaf.shape, leaf.device.type, leaf.requires_grad
    if isinstance(leaf, (bool, int, float, complex, str, bytes, type(None))):
        return type(leaf), repr(leaf)
    if isinstance(leaf, (tuple, list, dict)):
        return _NESTED
    return _Identity(leaf)


def _kind_of_leaf(leaf: Operand) -> Operand:
    """``_kind`` of a leaf of a tree: a container that PyTorch does not flatten is compared by identity."""
    kind = _kind(leaf)
    return _Identity(leaf) if kind is _NESTED else kind


def _kind_of_tensor(tensor: XLATensor) -> tuple[object, ...]:
    if tensor._v is None:
        return tensor._s.meta, tensor.requires_grad
    views = tuple((v.plan, v.tail) for v in chain(tensor._v))
    return tensor._s.meta, tensor.requires_grad, views


class _Identity:
    """An argument that is compared by identity."""

    __slots__ = ("value",)

    def __init__(self, value: Operand) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other.value is self.value


def _mode() -> object:
    """The modes of torch that affect what operators record, and the settings for making programs."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("xla") and torch.get_autocast_dtype("xla"),
        torch.get_default_dtype(),
        compile_settings.token(),
    )


def _layouts(leaves: Sequence[Operand], trace: Trace) -> object:
    """How the arguments are laid out over several devices; the index of the device if there is one."""
    if type(trace.backend) is DeviceBackend:
        return trace.device.index
    if trace.forbidden is not None:
        return None  # inside another one's step
    storages = [t._s for t in leaves if isinstance(t, XLATensor)]
    return trace.backend.argument_layouts(storages)


def _trace_of(leaves: Sequence[Operand]) -> Trace:
    for leaf in leaves:
        if isinstance(leaf, XLATensor):
            trace: Trace = leaf._s.trace
            return trace
    return runtime.trace_of(None)


def _on_device(tensor: torch.Tensor, trace: Trace) -> Operand:
    if isinstance(tensor, XLATensor):
        return tensor
    return transfers.upload(tensor, trace)


def capture(
    function: Callable[..., object] | None = None,
    *,
    warmup: int = 1,
    check_every: int = 0,
    max_recordings: int = 16,
) -> ForeignObject:
    """Record a step once, and replay it without running its Python code: ``step = capture(step)``, or a decorator.

    ``function`` is one whole step, which becomes one program. Its first ``warmup`` calls (default: 1, in which
    optimizers create their state) are ordinary steps. The next two are recorded and compared, and all further calls
    are replays. Arguments of other shapes, dtypes or numbers get recordings of their own, up to ``max_recordings``
    (default: 16). Results are new tensors without an autograd graph. Parameters, optimizer state, buffers and
    random state advance as in ordinary steps; learning rates are read from the optimizers' groups in each call.

    With ``check_every=n`` (default: 0, never) each n-th call also runs its Python code, and raises if it differs.
    Raises CaptureError for a step that cannot be replayed, with the line if it is known, and for a call in which
    something has changed since the recording; ValueError for options that are not such numbers.
    """
    if function is None:
        return functools.partial(
            capture, warmup=warmup, check_every=check_every, max_recordings=max_recordings
        )
    return Captured(function, warmup, check_every, max_recordings)
