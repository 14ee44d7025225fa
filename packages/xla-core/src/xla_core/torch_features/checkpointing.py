"""``torch_xla.utils.checkpoint.checkpoint``: recompute a part of the model in the backward pass.

The compiler sees the whole step at once. It would merge the recomputation with the first computation, and keep all
intermediate values alive after all. So the recomputation takes its inputs from an optimization barrier that also
waits for the gradients. Weights that the function reads in addition to its arguments pass a barrier, too:
otherwise values that are computed from them alone (a conversion, or the whole of a sharded weight) would stay
alive from the first computation to the second.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Literal

import torch
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint as torch_checkpoint

from xla_core.recording import random_state, tensor_trees
from xla_core.recording.xla_tensor import XLATensor
from xla_core.torch_bridge.operands import Gradients, Operands, Tree
from xla_core.torch_features import optimization_barrier

_READERS: Final = frozenset((
    F.linear, F.bilinear, F.embedding, F.embedding_bag, F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d,
    F.conv_transpose2d, F.conv_transpose3d, torch.conv1d, torch.conv2d, torch.conv3d, torch.matmul, torch.mm,
    torch.bmm, torch.addmm, torch.baddbmm, torch.einsum, torch.Tensor.matmul, torch.Tensor.__matmul__,
    torch.Tensor.__rmatmul__, torch.Tensor.mm, torch.Tensor.bmm, torch.Tensor.to, torch.Tensor.type,
    torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16, torch.Tensor.t, torch.Tensor.transpose,
    torch.Tensor.mT.__get__, torch.Tensor.T.__get__, torch.t, torch.transpose,
))  # fmt: skip
"""Functions that get a weight behind the barrier. Others get the weight itself, as some look it up by identity."""

_States = dict[Literal["cpu"] | int, torch.Tensor | int]
"""Random states of the CPU, and of ``xla`` devices by their indices."""


def _is_xla(value: object) -> bool:
    return isinstance(value, XLATensor)


class CheckpointFunction(torch.autograd.Function):
    """Runs a function without keeping intermediate values, and runs it again in the backward pass.

    Call ``CheckpointFunction.apply(function, preserve_rng_state, *args)``.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, function: Callable[..., object], preserve_rng: bool, *args: object
    ) -> Tree:
        """``function(*args)``; the arguments that are tensors are saved."""
        ctx.function = function
        ctx.positions = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor)]
        ctx.others = [None if isinstance(a, torch.Tensor) else a for a in args]
        ctx.rng = _random_states(args) if preserve_rng else {}
        ctx.autocast = _autocast_state()
        ctx.save_for_backward(*(args[i] for i in ctx.positions))
        with torch.no_grad():
            return function(*args)

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: torch.Tensor | None) -> Gradients:
        """Run the function again on the inputs, and return the gradients of these."""
        saved = list(ctx.saved_tensors)
        inputs, fresh_grads = _behind_barrier(saved, grads)
        for fresh, tensor in zip(inputs, saved, strict=True):
            fresh.requires_grad_(tensor.requires_grad)
        args: list[object] = list(ctx.others)
        for position, tensor in zip(ctx.positions, inputs, strict=True):
            args[position] = tensor
        waited = next((g for g in (*fresh_grads, *inputs) if _is_xla(g)), None)
        with (
            torch.enable_grad(), _RandomStates(ctx.rng), _autocast(ctx.autocast), _Weights(waited)
        ):  # fmt: skip
            results = ctx.function(*args)
        pairs = [
            (result, grad)
            for result, grad in zip(_as_tuple(results), fresh_grads, strict=True)
            if isinstance(result, torch.Tensor) and result.requires_grad and grad is not None
        ]
        if not pairs:
            raise RuntimeError(
                "none of the checkpointed function's results requires a gradient, so checkpoint() is not "
                "needed: call the function itself"
            )
        torch.autograd.backward([r for r, _ in pairs], [g for _, g in pairs])
        gradients: list[object] = [None] * len(args)
        for position, tensor in zip(ctx.positions, inputs, strict=True):
            gradients[position] = tensor.grad
        return (None, None, *gradients)


def _as_tuple(results: Tree) -> tuple[object, ...]:
    return results if isinstance(results, tuple) else (results,)


def _behind_barrier(
    inputs: list[torch.Tensor], grads: tuple[object, ...]
) -> tuple[list[torch.Tensor], list[object]]:
    """Copies of the inputs and gradients behind one barrier; tensors on other devices are only detached."""
    everything = [*inputs, *grads]
    chosen = [i for i, t in enumerate(everything) if _is_xla(t)]
    changed = [t.detach() if isinstance(t, torch.Tensor) else t for t in everything]
    if chosen:
        results = optimization_barrier.behind_barrier([everything[i] for i in chosen])
        for i, result in zip(chosen, results, strict=True):
            changed[i] = result
    return changed[: len(inputs)], changed[len(inputs) :]


def _random_states(args: Operands) -> _States:
    """The random state of the CPU and of each ``xla`` device among the arguments."""
    devices = {t.device.index for t in tensor_trees.collect(list(args), _is_xla)}
    return {
        "cpu": torch.get_rng_state(),
        **{index: random_state.get_state(index) for index in devices},
    }


def get_device_states(*args: object) -> tuple[list[torch.device], list[int]]:
    """The ``xla`` devices of the tensors among ``args``, and the random state of each."""
    devices = {t.device.index: t.device for t in tensor_trees.collect(list(args), _is_xla)}
    return list(devices.values()), [random_state.get_state(index) for index in devices]


def set_device_states(devices: list[torch.device], states: list[int]) -> None:
    """Set the random state of each of ``devices`` to that in ``states``, from ``get_device_states``."""
    for device, state in zip(devices, states, strict=True):
        random_state.set_state(state, device.index)


class _RandomStates:
    """A block with the given random states; the former ones are restored afterwards."""

    def __init__(self, states: _States) -> None:
        self._wanted = states

    def __enter__(self) -> None:
        self._former = {
            place: torch.get_rng_state() if place == "cpu" else random_state.get_state(place)
            for place in self._wanted
        }
        self._set(self._wanted)

    def __exit__(self, *_error: object) -> None:
        self._set(self._former)

    @staticmethod
    def _set(states: _States) -> None:
        for place, state in states.items():
            if place == "cpu":
                torch.set_rng_state(state)
            else:
                random_state.set_state(state, place)


def _autocast_state() -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled("xla"), torch.get_autocast_dtype("xla")


def _autocast(state: tuple[bool, torch.dtype]) -> torch.autocast:
    return torch.autocast("xla", enabled=state[0], dtype=state[1])


def checkpoint(
    function: Callable[..., object], *args: object, use_reentrant: bool = True, **kwargs: object
) -> Tree:
    """Run ``function(*args)``, and run it again in the backward pass instead of keeping its intermediate values.

    It is ``torch.utils.checkpoint.checkpoint`` with a barrier that keeps the compiler from merging both runs. With
    ``preserve_rng_state`` (default: True) the second run draws the same random numbers. With
    ``use_reentrant=False`` (default: True) PyTorch's own implementation is used, and ``kwargs`` are passed to the
    function. Raises ValueError for other keyword arguments if ``use_reentrant``.
    """
    if not use_reentrant:
        recomputed = _with_barrier_when_repeated(function)
        return torch_checkpoint.checkpoint(recomputed, *args, use_reentrant=False, **kwargs)
    preserve = kwargs.pop("preserve_rng_state", True)
    if kwargs:
        raise ValueError(f"unexpected keyword arguments: {', '.join(kwargs)}")
    return CheckpointFunction.apply(function, preserve, *args)


def _with_barrier_when_repeated(function: Callable[..., object]) -> Callable[..., Tree]:
    """A function that calls ``function``; from its second call on with the tensors behind a barrier."""
    calls = [0]

    def run(*args: Tree, **kwargs: Tree) -> Tree:
        calls[0] += 1
        if calls[0] == 1:
            return function(*args, **kwargs)
        behind = tensor_trees.map_selected(list(args), _is_xla, _Behind.apply)
        with _Weights(None):
            return function(*behind, **kwargs)

    return run


class _Behind(torch.autograd.Function):
    """Puts a tensor behind a barrier, which also waits for another one if given; the gradient is unchanged."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, tensor: torch.Tensor, waited: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The same value."""
        del ctx
        both = [tensor] if waited is None else [tensor, waited]
        return optimization_barrier.behind_barrier(both)[0]

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: torch.Tensor | None) -> Gradients:
        """The gradient, unchanged."""
        del ctx
        return grads[0], None


class _Weights(TorchFunctionMode):
    """A block in which ``_READERS`` get parameters behind a barrier, which waits for the tensor ``waited``."""

    def __init__(self, waited: torch.Tensor | None) -> None:
        super().__init__()
        self._waited = waited
        self._behind: dict[tuple[int, bool], tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_function__(
        self,
        func: Callable[..., Tree],
        types: object,
        args: Operands = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> Tree:
        del types
        if func in _READERS:
            args = tuple(tensor_trees.map_selected(list(args), _is_parameter, self._of))
        return func(*args, **(kwargs or {}))

    def _of(self, parameter: torch.Tensor) -> torch.Tensor:
        key = id(parameter), torch.is_grad_enabled()
        if key not in self._behind:
            # the parameter is kept because its id is the key
            self._behind[key] = parameter, _Behind.apply(parameter, self._waited)
        return self._behind[key][1]


def _is_parameter(value: object) -> bool:
    return isinstance(value, torch.nn.Parameter) and _is_xla(value)
