"""``assume_pure``: functions whose operators are recorded once, and are then called as one operation.

Recording takes microseconds per operator in each step. A function that always runs the same operators for arguments
of the same shapes and dtypes needs to be recorded only once, with its backward pass.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Final

import torch
from torch import nn
from torch.utils import _pytree as pytree

from xla_core.computations import forward_backward as joints
from xla_core.computations import pytrees
from xla_core.computations.call_jax import key_of
from xla_core.computations.computation import Computation
from xla_core.computations.forward_backward import Joint, Passes, Recorded, snapshot
from xla_core.dispatch.functional import find_trace
from xla_core.jax_bridge.traced_values import TracedValue
from xla_core.recording import random_state
from xla_core.recording.entry import Operation
from xla_core.recording.xla_tensor import XLATensor
from xla_core.torch_bridge.operands import NamedOperands, Operands, TorchObject, Tree

MSG_SEED: Final = (
    "the function was created with add_rng_seed_argument=True: give it rng_seed=, an int; got {got}"
)
MSG_HOST: Final = (
    "{function} got a tensor on {device}; assume_pure takes tensors on an xla device, and constants"
)
MSG_UNHASHABLE: Final = (
    "{function} got a {type}, which is not hashable: the function is recorded once for each value of an "
    "argument that is not a tensor"
)
MSG_GRAD: Final = "assume_pure_torch is for inference: use it under torch.no_grad(), or assume_pure"

# A function that gets a new number in each step is recorded in each step. Each recording holds the tensors that the
# function captures, so an unlimited table of them would grow for ever.
MOST_RECORDINGS: Final = 256


def assume_pure(
    fn: Callable[..., object], *, add_rng_seed_argument: bool = False
) -> Callable[..., Tree]:
    """A function that records ``fn`` once, and then calls it as one operation.

    ``fn`` is recorded again for tensors of other shapes or dtypes, for another structure of the arguments, and for
    each value of an argument that is not a tensor; the latest 256 recordings are kept. ``fn`` must be pure: its
    results depend only on its arguments, and it has no side effects. Gradients flow to its arguments and to the
    tensors that it captures, whose values are read in each call. All calls get the random numbers of the first
    call, unless ``add_rng_seed_argument`` (default: False): the function then also takes ``rng_seed``, an int, and
    equal seeds give equal random numbers.

    A call raises RuntimeError if ``fn`` reads a value or writes in place, and TypeError for tensors on other
    devices and for arguments that are not hashable.
    """
    cache: dict[Hashable, _Traced] = {}

    @functools.wraps(fn)
    def pure(*args: Tree, **kwargs: Tree) -> Tree:
        seed = None
        if add_rng_seed_argument:
            rng_seed = kwargs.pop("rng_seed", None)
            if not isinstance(rng_seed, int):
                raise TypeError(MSG_SEED.format(got=repr(rng_seed)))
            seed = random_state.derived_seed(rng_seed)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, XLATensor)]
        key = (_key(fn, leaves), spec, joints.modes())
        traced = cache.get(key)
        if traced is None:
            traced = _trace(fn, leaves, spec, tensors)
            if len(cache) >= MOST_RECORDINGS:
                cache.pop(next(iter(cache)), None)  # the oldest
            cache[key] = traced
        return traced(tensors, seed)

    return pure


def _key(fn: object, leaves: Sequence[Tree]) -> Hashable:
    """The key of the recording for these arguments. Raises TypeError for an argument that has no key."""
    parts: list[Hashable] = []
    for leaf in leaves:
        if isinstance(leaf, XLATensor):
            parts.append((leaf.shape, leaf.dtype, leaf.requires_grad, leaf.device))
        elif isinstance(leaf, torch.Tensor):
            raise TypeError(MSG_HOST.format(function=_name(fn), device=leaf.device))
        else:
            parts.append(key_of(leaf))
    key = tuple(parts)
    try:
        hash(key)
    except TypeError:
        kinds = (type(leaf).__name__ for leaf in leaves if type(leaf).__hash__ is None)
        kind = next(kinds, "tuple of such")
        raise TypeError(MSG_UNHASHABLE.format(function=_name(fn), type=kind)) from None
    return key


def _name(fn: object) -> str:
    return str(getattr(fn, "__name__", type(fn).__name__))


@dataclasses.dataclass(frozen=True, slots=True)
class _Traced:
    """A recorded function.

    ``leaves`` are its results; those at the indices ``places`` are tensors, and None in ``leaves``. ``spec`` is the
    structure of the results, ``seed`` the seed of the first call.
    """

    recorded: Recorded
    seed: int
    leaves: tuple[Tree, ...]
    places: tuple[int, ...]
    spec: TorchObject

    def __call__(self, tensors: Sequence[torch.Tensor], seed: int | None) -> Tree:
        passes = _Once(self.recorded, self.seed if seed is None else seed)
        outputs = joints.run(passes, [*tensors, *self.recorded.differentiable])
        values = self.recorded.checked(outputs)
        leaves = list(self.leaves)
        for place, value in zip(self.places, values, strict=True):
            leaves[place] = value
        return pytree.tree_unflatten(leaves, self.spec)


def _trace(
    fn: Callable[..., object], leaves: Sequence[Tree], spec: object, tensors: Sequence[XLATensor]
) -> _Traced:
    results: list[Tree] = []

    def flat(stand_ins: list[XLATensor]) -> list[torch.Tensor]:
        remaining = iter(stand_ins)
        filled = [next(remaining) if isinstance(a, XLATensor) else a for a in leaves]
        args, kwargs = pytree.tree_unflatten(filled, spec)
        values, structure = pytree.tree_flatten(fn(*args, **kwargs))
        results[:] = [values, structure]
        return [t for t in values if isinstance(t, torch.Tensor)]

    trace = find_trace(leaves)
    recorded = joints.record(
        trace,
        _name(fn),
        flat,
        pytrees.metas(tensors),
        [t.requires_grad for t in tensors],
        wanted=any(t.requires_grad for t in tensors),
    )
    values, structure = results
    places = tuple(i for i, t in enumerate(values) if isinstance(t, torch.Tensor))
    others = tuple(None if isinstance(t, torch.Tensor) else t for t in values)
    return _Traced(recorded, random_state.next_seed(trace.device.index), others, places, structure)


class _Programs:
    """The forward and the backward pass as computations.

    ``read`` are the arguments that the backward pass reads.
    """

    def __init__(self, joint: Joint) -> None:
        self.joint = joint
        body = joint.body
        self.results = tuple(dict.fromkeys((*joint.outputs, *joint.saved)))
        self.read = {v: joint.inputs[v] for v in joint.reads if joint.inputs[v] >= 0}
        self.forward = self._computation("pure", self.results, joint.forward, self._given_forward)
        wanted = tuple(g for g in joint.gradients if g is not None)
        self.backward = None
        if wanted:
            # tangents that nothing depends on have no input
            self.tangents = [t for t in joint.tangents if t is not None]
            self.backward = self._computation(
                "pure_backward", wanted, joint.backward, self._given_backward
            )
        self.held = {v: s for v, s in body.inputs.items() if s < 0}

    def _computation(
        self,
        name: str,
        values: Sequence[int],
        entries: Sequence[Operation],
        given: Callable[[Sequence[TracedValue]], dict[int, TracedValue]],
    ) -> Computation:
        body = self.joint.body

        def evaluate(
            tensors: Sequence[TracedValue],
            floats: Sequence[TracedValue],
            ints: Sequence[TracedValue],
            key: TracedValue,
        ) -> list[TracedValue]:
            scope = body.run(entries, given(tensors), floats, ints, key)
            return [scope[v] for v in values]

        random = body.is_random(entries)
        metas = [body.meta(v) for v in values]
        return Computation(name, self.joint.text(), metas, evaluate, random=random)

    def _given_forward(self, tensors: Sequence[TracedValue]) -> dict[int, TracedValue]:
        count = self.joint.arguments
        sources = (*tensors[:count], *reversed(tensors[count:]))
        return {v: sources[s] for v, s in self.joint.inputs.items()}

    def _given_backward(self, tensors: Sequence[TracedValue]) -> dict[int, TracedValue]:
        joint = self.joint
        given = dict(zip((*joint.saved, *self.read), tensors, strict=False))
        rest = tensors[len(joint.saved) + len(self.read) :]
        captured = rest[: joint.captures]
        given.update((v, captured[-1 - s]) for v, s in self.held.items())
        given.update(zip(self.tangents, rest[joint.captures :], strict=True))
        return given


class _Once(Passes):
    """The forward and the backward pass of one call."""

    def __init__(self, recorded: Recorded, seed: int) -> None:
        self.recorded = recorded
        self.seed = seed
        known = recorded.joint.programs
        self.programs: _Programs = known.get(_Programs) or _Programs(recorded.joint)
        known[_Programs] = self.programs

    def _run(self, computation: Computation, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        seed = self.seed if computation.plan.random else None
        return computation(tensors, self.recorded.floats, self.recorded.ints, seed)

    def forward(
        self, tensors: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[bool], list[torch.Tensor]]:
        recorded, programs = self.recorded, self.programs
        joint = recorded.joint
        arguments = tensors[: joint.arguments]
        captured = [snapshot(s) for s in recorded.captured]
        of = dict(
            zip(programs.results, self._run(programs.forward, (*arguments, *captured)), strict=True)
        )
        saved = []
        if joint.differentiable:
            read = [snapshot(arguments[s]) for s in programs.read.values()]
            saved = [*(of[v] for v in joint.saved), *read, *captured]
        return (
            [snapshot(of[v]) for v in joint.outputs],
            [t is not None for t in joint.tangents],
            saved,
        )

    def backward(
        self, saved: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        joint = self.recorded.joint
        wanted = [g for g, t in zip(gradients, joint.tangents, strict=True) if t is not None]
        assert self.programs.backward is not None
        remaining = iter(self._run(self.programs.backward, (*saved, *wanted)))
        return [None if g is None else next(remaining) for g in joint.gradients]


class PureModule(nn.Module):
    """A module that records the forward pass of ``module`` once per mode, with its parameters as arguments.

    ``module`` must not write to its buffers, as batch normalization does in training.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = module
        function = functools.partial(_pure_forward, module)
        function.__name__ = f"{type(module).__name__}.forward"  # type: ignore[attr-defined]
        self._pure_forward = assume_pure(function)

    def forward(self, *args: Tree, **kwargs: Tree) -> Tree:
        """The results of ``module(*args, **kwargs)``."""
        parameters = dict(self._module.named_parameters())
        buffers = dict(self._module.named_buffers())
        modes = tuple(module.training for module in self._module.modules())
        return self._pure_forward(parameters, buffers, modes, args, kwargs)


def _pure_forward(
    module: nn.Module,
    parameters: dict[str, torch.Tensor],
    buffers: dict[str, torch.Tensor],
    _modes: tuple[bool, ...],
    args: Operands,
    kwargs: NamedOperands,
) -> object:
    return torch.func.functional_call(module, (parameters, buffers), args, kwargs)


def assume_pure_torch(func: Callable[..., object], use_cache: bool = False) -> Callable[..., Tree]:
    """A function that calls ``func`` as one operation of the step, without gradients.

    ``func`` is recorded in each call; with ``use_cache`` (default: False) it is recorded once, as by
    ``assume_pure``. Raises RuntimeError if gradients are enabled.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(MSG_GRAD)
    pure = assume_pure(func)

    @functools.wraps(func)
    def inner(*args: Tree, **kwargs: Tree) -> Tree:
        with torch.no_grad():
            return (pure if use_cache else assume_pure(func))(*args, **kwargs)

    return inner
