"""Optimizer state split over the replicas: ``torch_xla.distributed.zero_redundancy_optimizer``.

Every replica holds the whole parameters, and one part of each for the optimizer: master weights and
state of a slice along dimension 0, padded to a multiple of the number of replicas. A step reduces and
scatters the gradients, runs the wrapped optimizer on the slices, and gathers the parameters: what
ZeRO's first stage does (Rajbhandari et al., 2020).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer

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

Scheme = Sequence[Mapping[str, Any]]
"""Stages of a split, each with ``scale_factor``, ``sharding_group`` (groups) and ``group_size``."""

_NORM_FLOOR: Final = 1e-6
"""Added to the norm before it divides, as ``torch.nn.utils.clip_grad_norm_`` does."""

MSG_NOT_INITIALISED: Final = (
    "ZeroRedundancyOptimizer(lazy_init=True): call init_zero() before step()"
)
MSG_INITIALISED: Final = "sharding_groups cannot change once the parameters have been split"
MSG_NOT_IN: Final = "ordinal {me} is in none of sharding_groups={groups}"
MSG_DEVICE: Final = "ZeroRedundancyOptimizer takes parameters on one xla device, got {devices}"
MSG_SHAPES: Final = (
    "load_state_dict: parameter {index} has shape {mine}, the state was saved for {theirs}"
)


class ZeroRedundancyOptimizer(Optimizer):
    """Runs ``optimizer_class(**defaults)`` on this replica's slices of ``params``.

    ``optimizer_dtype`` is that of slices and state (default float32). With ``grad_clipping`` (default)
    gradients are scaled so that their norm over all parameters is at most ``max_norm`` (default 1.0);
    ``grad_norm`` is the norm before that. ``sharding_groups``: groups of ordinals, each of which splits
    the parameters over its members (default: one group of all); ``grad_norm_groups``: over which
    groups the norm is summed up besides, for models that are themselves split. With ``lazy_init``
    ``init_zero()`` splits the parameters. ``bucket_cap_mb_all_gather`` and
    ``bucket_cap_mb_reduce_scatter``: MiB of one bucket of collectives, 0 is all in one. With
    ``use_grad_acc_hook`` gradients accumulate in ``param.main_grad``, in ``optimizer_dtype``. With
    ``save_master_weights`` a state dict has the slices too, so that resuming from parameters of a
    narrower dtype loses nothing. ``higher_cc_precision``: gradients travel in ``optimizer_dtype``.
    ``pin_layout`` is accepted for torch_xla's sake.

    A state dict is this replica's own: save one per ordinal.
    """

    state_of_each_process = True
    """Each process writes its own, and reads that again: see ``xla_core.contract.checkpoint_marks``."""

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
        self._hooks: list[Any] = []
        self.inited = False
        if not lazy_init:
            self.init_zero()

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """The norm of all gradients in the last step, before clipping; None without clipping."""
        return self._grad_norm

    @property
    def sharding_groups(self) -> Sequence[Sequence[int]]:
        """The groups of ordinals that split the parameters; set them before ``init_zero()``."""
        return self._sharding_groups

    @sharding_groups.setter
    def sharding_groups(self, groups: Sequence[Sequence[int]]) -> None:
        if self.inited:
            raise RuntimeError(MSG_INITIALISED)
        self._sharding_groups = groups

    # --- splitting ------------------------------------------------------------------------------

    def init_zero(self) -> None:
        """Split the parameters as they are now, and make the wrapped optimizer with no state.

        Raises ValueError when this ordinal is in no group or parameters are elsewhere.
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
        # what the wrapped optimizer has for defaults, schedulers look for here
        _copy_options(self.base_optimizer.param_groups, self.param_groups)
        if self.use_grad_acc_hook:
            self._hooks = [
                p.register_post_accumulate_grad_hook(self._hook(s)) for p, s in self._pairs()
            ]
        self.inited = True

    def _pairs(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """Parameters and this replica's slices of them."""
        for whole, split in zip(self.param_groups, self.base_optimizer.param_groups, strict=True):
            yield from zip(whole["params"], split["params"], strict=True)

    def _common_device(self) -> torch.device:
        devices = {p.device for group in self.param_groups for p in group["params"]}
        tensors = [p for group in self.param_groups for p in group["params"]]
        if len(devices) != 1 or not isinstance(tensors[0], XLATensor):
            raise ValueError(MSG_DEVICE.format(devices=sorted(map(str, devices))))
        return devices.pop()

    def _slice_of(self, param: torch.Tensor) -> nn.Parameter:
        # cut on the host: a program that differs between replicas may hold no collectives on a TPU
        rows = self._padded(param.cpu()).chunk(self.local_world_size)[self.local_rank]
        own = rows.to(self.optimizer_dtype, copy=True).to(self.device)
        return nn.Parameter(own, requires_grad=param.requires_grad)

    def _padded(self, tensor: torch.Tensor) -> torch.Tensor:
        """With as many rows as the replicas can share, the last ones zero; a scalar has one row."""
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
        """Accumulate gradients as PyTorch does."""
        while self._hooks:
            self._hooks.pop().remove()

    # --- one step -------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Tree) -> Tree:
        """One step of the wrapped optimizer with the replicas' mean gradients; what ``closure`` gives.

        ``sharding_scheme=`` splits in several stages (``Scheme``) instead of one over
        ``sharding_groups``; other arguments go to the wrapped optimizer.
        """
        if not self.inited:
            raise RuntimeError(MSG_NOT_INITIALISED)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scheme = kwargs.pop("sharding_scheme", None) or self._scheme()
        _copy_options(self.param_groups, self.base_optimizer.param_groups)
        moved = self._reduce_gradients(scheme)
        if self.grad_clipping:
            self._clip()
        self.base_optimizer.step(**kwargs)
        self.base_optimizer.zero_grad(set_to_none=True)
        self._gather(moved, scheme)
        _copy_options(self.base_optimizer.param_groups, self.param_groups)
        return loss

    def _scheme(self) -> Scheme:
        size = self.local_world_size
        return [{"scale_factor": 1.0, "sharding_group": self._sharding_groups, "group_size": size}]

    def _gradient(self, param: torch.Tensor, own: torch.Tensor) -> torch.Tensor | None:
        return getattr(own, "main_grad", None) if self.use_grad_acc_hook else param.grad

    def _reduce_gradients(self, scheme: Scheme) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Give the slices their part of the mean gradients; the pairs of those that have any."""
        moved = [(p, s) for p, s in self._pairs() if self._gradient(p, s) is not None]
        grads: list[torch.Tensor] = []
        for pair in moved:
            grad = self._gradient(*pair)
            assert grad is not None
            wide = grad.to(self.optimizer_dtype) if self.higher_cc_precision else grad
            grads.append(self._padded(wide))
        for stage in scheme:
            grads = self._scattered(grads, stage)
        for (_, own), grad in zip(moved, grads, strict=True):
            own.grad = grad.to(self.optimizer_dtype)
        return moved

    def _scattered(self, grads: list[torch.Tensor], stage: Mapping[str, Any]) -> list[torch.Tensor]:
        size, groups = stage["group_size"], stage["sharding_group"]
        arguments = (stage["scale_factor"] / size, 0, size, groups)
        if not grads:
            return []
        if self.bucket_cap_mb_reduce_scatter > 0:
            cap = self.bucket_cap_mb_reduce_scatter
            return reduce_scatter_bucketized(REDUCE_SUM, grads, *arguments, bucket_cap_mb=cap)
        results: list[torch.Tensor] = reduce_scatter(REDUCE_SUM, grads, *arguments)
        return results

    def _gather(self, moved: Sequence[tuple[nn.Parameter, nn.Parameter]], scheme: Scheme) -> None:
        """Give the parameters the values of all replicas' slices."""
        rows = [own.detach().to(param.dtype) for param, own in moved]
        for stage in reversed(scheme) if rows else ():
            groups, cap = stage["sharding_group"], self.bucket_cap_mb_all_gather
            if cap > 0:
                rows = all_gather_bucketized(rows, 0, groups, bucket_cap_mb=cap)
            else:
                rows = all_gather(rows, 0, groups)
        for (param, _), whole in zip(moved, rows, strict=True):
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
        scale = (self.max_norm / (self._grad_norm + _NORM_FLOOR)).clamp(max=1.0)
        for grad in grads:
            grad.mul_(scale)

    @torch.no_grad()
    def allgather_weights_and_update_full_parameter(
        self, sharding_scheme: Scheme | None = None
    ) -> None:
        """Give all parameters the values of their slices."""
        self._gather(list(self._pairs()), sharding_scheme or self._scheme())

    def zero_grad(self, set_to_none: bool = False) -> None:
        """As ``torch.optim.Optimizer``; ``main_grad`` (``use_grad_acc_hook``) becomes zero."""
        super().zero_grad(set_to_none=set_to_none)
        for _, own in self._pairs() if self.use_grad_acc_hook else ():
            if hasattr(own, "main_grad"):
                own.main_grad.zero_()

    # --- state ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, object]:
        """This replica's state: ``base_state`` by number of the parameter, ``shape_info``, options.

        With ``save_master_weights`` also ``sharded_master_weights``.
        """
        state = super().state_dict()
        state["base_state"] = self.base_optimizer.state_dict()["state"]
        state["shape_info"] = self.get_shape_info()
        if self.save_master_weights:
            weights = [own.detach() for _, own in self._pairs()]
            state["sharded_master_weights"] = dict(enumerate(weights))
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where this replica's ``state_dict`` was taken; the model's parameters are loaded before.

        With master weights in it the parameters get their values. Raises ValueError when it was
        taken with parameters of other shapes.
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
        """The shapes of the whole parameters, by their number."""
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
    """Everything of parameter groups but the parameters: learning rates and the like."""
    for former, group in zip(source, target, strict=True):
        group.update({name: value for name, value in former.items() if name != "params"})
