"""``ZeroRedundancyOptimizer``: an optimizer whose state is split over the replicas.

Each replica holds all parameters, but master weights and optimizer state only for its slice of each parameter,
along dimension 0, padded to a multiple of the number of replicas. A step reduces and scatters the gradients, runs
the wrapped optimizer on the slices, and gathers the parameters. This is the first stage of ZeRO (Rajbhandari et
al., 2020).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer

from xla_core.contract.foreign_values import JsonValue
from xla_core.extension_api import runtime
from xla_core.extension_api.operators import Tree
from xla_core.extension_api.tensors import XLATensor
from xla_dist.collectives.buckets import all_gather_bucketized, reduce_scatter_bucketized
from xla_dist.collectives.model_collectives import (
    REDUCE_SUM,
    all_gather,
    all_reduce,
    reduce_scatter,
)

Scheme = Sequence[Mapping[str, JsonValue]]
"""The stages in which parameters are split, each with ``scale_factor``, ``sharding_group`` (the groups) and
``group_size``."""

_NORM_EPSILON: Final = 1e-6
"""Added to the norm before dividing by it, as ``torch.nn.utils.clip_grad_norm_`` does."""

MSG_NOT_INITIALISED: Final = (
    "ZeroRedundancyOptimizer(lazy_init=True): call init_zero() before step()"
)
MSG_INITIALISED: Final = "sharding_groups cannot change once the parameters have been split"
MSG_NOT_IN: Final = "ordinal {me} is in none of sharding_groups={groups}"
MSG_DEVICE: Final = "ZeroRedundancyOptimizer takes parameters on one xla device, got {devices}"
MSG_SHAPES: Final = (
    "load_state_dict: parameter {index} has shape {mine}, but the state has shape {theirs}"
)


class ZeroRedundancyOptimizer(Optimizer):
    """Runs ``optimizer_class(**defaults)`` on this replica's slices of ``params``.

    A state dict contains this replica's state only: save one per ordinal.

    Args:
        params: parameters or parameter groups, all on one xla device.
        optimizer_class: the class of the wrapped optimizer, which gets ``defaults``.
        optimizer_dtype: dtype of slices and state (default: float32).
        grad_clipping: scale gradients so that their norm over all parameters is at most ``max_norm`` (default:
            True). ``grad_norm`` is the norm before that.
        max_norm: see ``grad_clipping`` (default: 1.0).
        pin_layout: has no effect.
        sharding_groups: groups of ordinals; the members of a group split the parameters among themselves (default:
            one group of all replicas).
        grad_norm_groups: groups over which the squared norm is summed in addition, for models that are themselves
            split (default: none).
        lazy_init: split the parameters in ``init_zero()``, not in the constructor (default: False).
        bucket_cap_mb_all_gather, bucket_cap_mb_reduce_scatter: MiB of parameters and gradients per collective;
            0 (default) is one collective for all.
        use_grad_acc_hook: accumulate gradients in ``param.main_grad``, in ``optimizer_dtype`` (default: False).
        save_master_weights: also save the slices in state dicts, so that resuming from parameters of a narrower
            dtype loses no precision (default: False).
        higher_cc_precision: reduce gradients in ``optimizer_dtype`` (default: False, in their own dtype).

    Raises ValueError if this ordinal is in none of ``sharding_groups``, or if parameters are not on one xla device.
    """

    state_of_each_process = True
    """Each process saves and loads its own state: see ``xla_core.contract.checkpoint_marks``."""

    def __init__(
        self,
        params: object,
        optimizer_class: type[Optimizer],
        optimizer_dtype: torch.dtype | None = None,
        grad_clipping: bool = True,
        max_norm: float | None = None,
        pin_layout: bool = True,
        sharding_groups: Sequence[Sequence[int]] | None = None,
        grad_norm_groups: Sequence[Sequence[int]] | None = None,
        lazy_init: bool = False,
        bucket_cap_mb_all_gather: int = 0,
        bucket_cap_mb_reduce_scatter: int = 0,
        use_grad_acc_hook: bool = False,
        save_master_weights: bool = False,
        higher_cc_precision: bool = False,
        **defaults: object,
    ) -> None:
        super().__init__(params, defaults)
        self.global_rank, self.global_world_size = runtime.replica_of()
        self._sharding_groups = sharding_groups or [list(range(self.global_world_size))]
        self._grad_norm_groups = grad_norm_groups
        self.optimizer_class = optimizer_class
        self.optimizer_dtype = optimizer_dtype or torch.float32
        self.grad_clipping = grad_clipping
        self.max_norm = 1.0 if max_norm is None else max_norm
        self.pin_layout = pin_layout
        self.bucket_cap_mb_all_gather = bucket_cap_mb_all_gather
        self.bucket_cap_mb_reduce_scatter = bucket_cap_mb_reduce_scatter
        self.use_grad_acc_hook = use_grad_acc_hook
        self.save_master_weights = save_master_weights
        self.higher_cc_precision = higher_cc_precision
        self._grad_norm: torch.Tensor | None = None
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self.inited = False
        if not lazy_init:
            self.init_zero()

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """The norm of all gradients of the last step, before clipping; None before a step, and without clipping."""
        return self._grad_norm

    @property
    def sharding_groups(self) -> Sequence[Sequence[int]]:
        """The groups of ordinals that split the parameters. Raises RuntimeError if set after ``init_zero()``."""
        return self._sharding_groups

    @sharding_groups.setter
    def sharding_groups(self, groups: Sequence[Sequence[int]]) -> None:
        if self.inited:
            raise RuntimeError(MSG_INITIALISED)
        self._sharding_groups = groups

    # --- splitting ------------------------------------------------------------------------------

    def init_zero(self) -> None:
        """Split the current values of the parameters, and create the wrapped optimizer, without state.

        Raises ValueError if this ordinal is in no group, or if the parameters are not on one xla device.
        """
        self.remove_hooks()
        me, groups = self.global_rank, self._sharding_groups
        own = [list(group) for group in groups if me in group]
        if not own:
            raise ValueError(MSG_NOT_IN.format(me=me, groups=[list(g) for g in groups]))
        self.local_world_size, self.local_rank = len(own[0]), own[0].index(me)
        self.device = self._common_device()
        slices = [
            {**group, "params": [self._slice_of(p) for p in group["params"]]}
            for group in self.param_groups
        ]
        self.base_optimizer = self.optimizer_class(slices, **self.defaults)
        _copy_options(self.param_groups, self.base_optimizer.param_groups)
        # learning-rate schedulers read the wrapped optimizer's defaults from this one's groups
        _copy_options(self.base_optimizer.param_groups, self.param_groups)
        if self.use_grad_acc_hook:
            self._hooks = [
                p.register_post_accumulate_grad_hook(self._hook(s)) for p, s in self._pairs()
            ]
        self.inited = True

    def _pairs(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """Pairs of each parameter and this replica's slice of it."""
        for whole, split in zip(self.param_groups, self.base_optimizer.param_groups, strict=True):
            yield from zip(whole["params"], split["params"], strict=True)

    def _common_device(self) -> torch.device:
        devices = {p.device for group in self.param_groups for p in group["params"]}
        tensors = [p for group in self.param_groups for p in group["params"]]
        if len(devices) != 1 or not isinstance(tensors[0], XLATensor):
            raise ValueError(MSG_DEVICE.format(devices=sorted(map(str, devices))))
        return devices.pop()

    def _slice_of(self, param: torch.Tensor) -> nn.Parameter:
        # on the host: on a TPU, replicas with different programs cannot run collectives in them
        rows = self._padded(param.cpu()).chunk(self.local_world_size)[self.local_rank]
        own = rows.to(self.optimizer_dtype, copy=True).to(self.device)
        return nn.Parameter(own, requires_grad=param.requires_grad)

    def _padded(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` padded with rows of zeros to a multiple of the group's size; a scalar counts as one row."""
        rows = tensor.detach()
        rows = rows if rows.dim() else rows.reshape(1)
        missing = -rows.size(0) % self.local_world_size
        return F.pad(rows, [0, 0] * (rows.dim() - 1) + [0, missing]) if missing else rows

    def _hook(self, own: nn.Parameter) -> Callable[[torch.Tensor], None]:
        def accumulate(param: torch.Tensor) -> None:
            with torch.no_grad():
                grad = param.grad.to(self.optimizer_dtype)  # type: ignore[union-attr]
                if hasattr(own, "main_grad"):
                    own.main_grad.add_(grad)
                else:
                    own.main_grad = param.main_grad = grad  # type: ignore[attr-defined]
            param.grad = None

        return accumulate

    def remove_hooks(self) -> None:
        """Remove the hooks of ``use_grad_acc_hook``: gradients accumulate in ``param.grad`` again."""
        while self._hooks:
            self._hooks.pop().remove()

    # --- one step -------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Tree] | None = None, **kwargs: Tree) -> Tree:
        """Run one step of the wrapped optimizer with the mean gradients of the replicas.

        Returns the result of ``closure``, which is called first with gradients enabled (default: None).
        ``sharding_scheme=`` reduces and gathers in several stages (``Scheme``) instead of one over
        ``sharding_groups``; other arguments go to the wrapped optimizer's ``step``. Raises RuntimeError before
        ``init_zero()``.
        """
        if not self.inited:
            raise RuntimeError(MSG_NOT_INITIALISED)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scheme = kwargs.pop("sharding_scheme", None) or self._scheme()
        _copy_options(self.param_groups, self.base_optimizer.param_groups)
        updated = self._reduce_gradients(scheme)
        if self.grad_clipping:
            self._clip()
        self.base_optimizer.step(**kwargs)
        self.base_optimizer.zero_grad(set_to_none=True)
        self._gather(updated, scheme)
        _copy_options(self.base_optimizer.param_groups, self.param_groups)
        return loss

    def _scheme(self) -> Scheme:
        size = self.local_world_size
        return [{"scale_factor": 1.0, "sharding_group": self._sharding_groups, "group_size": size}]

    def _gradient(self, param: torch.Tensor, own: torch.Tensor) -> torch.Tensor | None:
        return getattr(own, "main_grad", None) if self.use_grad_acc_hook else param.grad

    def _reduce_gradients(self, scheme: Scheme) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Set the gradients of the slices to means over the replicas; returns the pairs that have gradients."""
        with_gradient = [(p, s) for p, s in self._pairs() if self._gradient(p, s) is not None]
        grads: list[torch.Tensor] = []
        for pair in with_gradient:
            grad = self._gradient(*pair)
            assert grad is not None
            wide = grad.to(self.optimizer_dtype) if self.higher_cc_precision else grad
            grads.append(self._padded(wide))
        for stage in scheme:
            grads = self._scattered(grads, stage)
        for (_, own), grad in zip(with_gradient, grads, strict=True):
            own.grad = grad.to(self.optimizer_dtype)
        return with_gradient

    def _scattered(
        self, grads: list[torch.Tensor], stage: Mapping[str, JsonValue]
    ) -> list[torch.Tensor]:
        size, groups = stage["group_size"], stage["sharding_group"]
        arguments = (stage["scale_factor"] / size, 0, size, groups)
        if not grads:
            return []
        if self.bucket_cap_mb_reduce_scatter > 0:
            cap = self.bucket_cap_mb_reduce_scatter
            return reduce_scatter_bucketized(REDUCE_SUM, grads, *arguments, bucket_cap_mb=cap)
        results: list[torch.Tensor] = reduce_scatter(REDUCE_SUM, grads, *arguments)
        return results

    def _gather(self, pairs: Sequence[tuple[nn.Parameter, nn.Parameter]], scheme: Scheme) -> None:
        """Copy the slices of all replicas into the parameters, for ``pairs`` of a parameter and its slice."""
        rows = [own.detach().to(param.dtype) for param, own in pairs]
        for stage in reversed(scheme) if rows else ():
            groups, cap = stage["sharding_group"], self.bucket_cap_mb_all_gather
            if cap > 0:
                rows = all_gather_bucketized(rows, 0, groups, bucket_cap_mb=cap)
            else:
                rows = all_gather(rows, 0, groups)
        for (param, _), whole in zip(pairs, rows, strict=True):
            count = param.size(0) if param.dim() else 1
            param.detach().copy_(whole[:count].reshape(param.shape))

    def _clip(self) -> None:
        grads = [own.grad for _, own in self._pairs() if own.grad is not None]
        total = torch.zeros((), dtype=self.optimizer_dtype, device=self.device)
        for grad in grads:
            total = total + grad.square().sum()
        for groups in (self._sharding_groups, self._grad_norm_groups):
            if groups is not None:
                total = all_reduce(REDUCE_SUM, total, groups=groups)
        self._grad_norm = total.sqrt()
        scale = (self.max_norm / (self._grad_norm + _NORM_EPSILON)).clamp(max=1.0)
        for grad in grads:
            grad.mul_(scale)

    @torch.no_grad()
    def allgather_weights_and_update_full_parameter(
        self, sharding_scheme: Scheme | None = None
    ) -> None:
        """Copy the slices of all replicas into all parameters.

        ``sharding_scheme`` is the scheme of the split (default: one stage over ``sharding_groups``).
        """
        self._gather(list(self._pairs()), sharding_scheme or self._scheme())

    def zero_grad(self, set_to_none: bool = False) -> None:
        """``zero_grad`` of ``torch.optim.Optimizer``; also sets ``main_grad`` of ``use_grad_acc_hook`` to zero."""
        super().zero_grad(set_to_none=set_to_none)
        for _, own in self._pairs() if self.use_grad_acc_hook else ():
            if hasattr(own, "main_grad"):
                own.main_grad.zero_()

    # --- state ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, object]:
        """This replica's state: options, ``base_state`` by the parameter's index, and ``shape_info``.

        With ``save_master_weights`` also ``sharded_master_weights``, by the parameter's index.
        """
        state = super().state_dict()
        state["base_state"] = self.base_optimizer.state_dict()["state"]
        state["shape_info"] = self.get_shape_info()
        if self.save_master_weights:
            weights = [own.detach() for _, own in self._pairs()]
            state["sharded_master_weights"] = dict(enumerate(weights))
        return state

    def load_state_dict(self, state_dict: Mapping[str, Tree]) -> None:
        """Load a ``state_dict()`` of this replica. Load the model's parameters before, which this splits again.

        Master weights in ``state_dict`` are also copied into the parameters. Raises ValueError if the parameters
        have other shapes than those in ``state_dict``.
        """
        state = dict(state_dict)
        self._check_shapes(state.pop("shape_info", {}))
        base_state, weights = state.pop("base_state"), state.pop("sharded_master_weights", {})
        super().load_state_dict(state)
        self.init_zero()
        options = self.base_optimizer.state_dict()["param_groups"]
        self.base_optimizer.load_state_dict({"state": base_state, "param_groups": options})
        if weights:
            with torch.no_grad():
                for index, (_, own) in enumerate(self._pairs()):
                    own.copy_(weights[index])
            self.allgather_weights_and_update_full_parameter()

    def get_shape_info(self) -> dict[int, torch.Size]:
        """The shapes of the whole parameters, by their index."""
        params = [p for group in self.param_groups for p in group["params"]]
        return {index: p.shape for index, p in enumerate(params)}

    def _check_shapes(self, saved: Mapping[int, Sequence[int]]) -> None:
        mine = self.get_shape_info()
        for index, shape in saved.items():
            if tuple(mine.get(index, ())) != tuple(shape):
                facts = {"index": index, "mine": tuple(mine.get(index, ()))}
                raise ValueError(MSG_SHAPES.format(theirs=tuple(shape), **facts))


def _copy_options(
    source: Sequence[Mapping[str, object]], target: Sequence[dict[str, object]]
) -> None:  # fmt: skip
    """Copy the options of parameter groups, such as learning rates, from ``source`` to ``target``."""
    for options, group in zip(source, target, strict=True):
        group.update({name: value for name, value in options.items() if name != "params"})
