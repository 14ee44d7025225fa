"""``XlaFullyShardedDataParallel``: a module whose parameters are split over the replicas."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import torch
from torch import nn

from xla_core.contract import checkpoint_marks
from xla_core.contract.foreign_values import Attribute, ForeignObject
from xla_core.extension_api import autograd, runtime, tensors, training
from xla_core.extension_api.operators import Tree
from xla_dist.collectives import model_collectives
from xla_dist.fsdp import names, units, wrap
from xla_dist.fsdp.layouts import Layout
from xla_dist.fsdp.units import Options, Place, Shard, Unit

FLOAT_DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16)
_MEBIBYTE: Final = 1 << 20

MSG_TWICE: Final = "this module is already sharded; wrap its parts before the modules around them"
MSG_NO_FORWARD: Final = (
    "{kind} has no forward method, and full parameters exist only during forward; wrap the modules in it "
    "(nn.ModuleList, nn.ModuleDict), or a module that calls them"
)
MSG_DTYPE: Final = "{name} is {got}; give one of {known}"
MSG_PARAMETER_DTYPE: Final = (
    "{name} is {got}, and only float32 parameters are sharded; convert the module with float(), "
    "and choose the dtype it computes in with compute_dtype"
)
MSG_GROUPS: Final = "sharding_groups also needs sharding_rank and sharding_world_size"
MSG_SHARED: Final = (
    "{name} is also a parameter of a module that is sharded on its own; modules that share a parameter "
    "have to be in one wrapper"
)
MSG_ROOT: Final = "{what} is for the outermost sharded module; this one is inside another"
MSG_BUSY: Final = "{what} inside a backward pass; call it between steps"
MSG_DEBUG: Final = (
    "{names}: there are no dummy operations here; xla-debug (PT_XLA_DEBUG, xla_debug.memory) shows what the "
    "real ones cost"
)


class XlaFullyShardedDataParallel(nn.Module):
    """Splits the parameters of a module over the replicas, and with them gradients and optimizer state.

    Each replica keeps one part of each parameter. Full parameters exist only in the step's program, while the
    module computes. Create the optimizer from ``parameters()`` after wrapping, and call its ``step()`` directly,
    not ``xm.optimizer_step``: gradients are already means over the replicas. If parts of a model are wrapped too
    (by hand, or by ``auto_wrap_policy``), their parameters are gathered one part after the other.

    All replicas must start with the same values: set the same seed, or load the same file.

    Args:
        module: the module to wrap, on any device. Only its ``forward`` can compute with the parameters.
        reshard_after_forward: free full parameters after the forward pass, and gather them again for the backward
            pass (default: True).
        flatten_parameters: join all parameters that require gradients in one, and all others in another, for fewer
            and larger collectives (default: False).
        execute_sharding_on_init: end a step after wrapping, which frees full parameters on the device
            (default: True).
        optimization_barrier_in_forward, optimization_barrier_in_backward: gather parameters only after the module's
            inputs, or gradients, are computed (default: True). Otherwise the compiler may gather all at once.
        sync_on_finalization: end the step after each backward pass (default: False). disable_reshard_on_root: keep
        the full parameters of the outermost module for the backward pass, which begins
            with that module (default: True).
        compute_dtype: dtype of full parameters and of floating-point inputs (default: float32). The parts that
            replicas keep are float32.
        buffer_dtype: dtype of floating-point buffers (default: ``compute_dtype``).
        fp32_reduce_scatter: reduce gradients in float32, not in ``compute_dtype`` (default: False).
        sharding_groups, sharding_rank, sharding_world_size: the replica groups that split the parameters, this
            replica's index in its group, and the size of a group (default: one group of all replicas).
        shard_param_on_dim_0: cut rows instead of elements (default: False); has no effect with
            ``flatten_parameters``.
        reduce_scatter_bucket_size_mb: reduce gradients together in buckets of more than this many MiB (default: 0,
        one
            by one).
        coalesce_all_gather_ops: gather all parameters of a wrapped module by one operator (default: False).
        auto_wrap_policy: chooses the parts to wrap; see ``torch_xla.distributed.fsdp.wrap`` (default: none).
        auto_wrapper_callable: wraps those parts, and gets the options of this wrapper (default: this class).
        param_init_fn: ``fn(module)``, which initializes parameters on the meta device (default: their modules'
            ``reset_parameters()``, on the CPU).
        _shard_size_multiple: the size of a part is a multiple of this (default: 128, which suits TPUs).

    ``pin_layout_in_collective_ops`` and ``_use_xla_patched_linear`` have no effect. Raises RuntimeError for a
    module without ``forward`` or one that is already wrapped, TypeError for parameters that are not float32,
    ValueError for options that contradict each other and for parameters shared between wrapped modules,
    NotImplementedError for ``_debug_dummy_*``.
    """

    def __init__(
        self,
        module: nn.Module,
        reshard_after_forward: bool = True,
        flatten_parameters: bool = False,
        execute_sharding_on_init: bool = True,
        optimization_barrier_in_forward: bool = True,
        optimization_barrier_in_backward: bool = True,
        sync_on_finalization: bool = False,
        disable_reshard_on_root: bool = True,
        compute_dtype: torch.dtype | None = None,
        buffer_dtype: torch.dtype | None = None,
        fp32_reduce_scatter: bool = False,
        sharding_groups: Sequence[Sequence[int]] | None = None,
        sharding_rank: int | None = None,
        sharding_world_size: int | None = None,
        shard_param_on_dim_0: bool = False,
        pin_layout_in_collective_ops: bool = True,
        reduce_scatter_bucket_size_mb: int | None = 0,
        coalesce_all_gather_ops: bool = False,
        auto_wrap_policy: Callable[..., bool] | None = None,
        auto_wrapper_callable: Callable[..., nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        _shard_size_multiple: int = 128,
        _use_xla_patched_linear: bool = True,
        _debug_dummy_forward_pass: bool = False,
        _debug_msg: str = "xla_fsdp",
        _debug_print: bool = False,
        _debug_dummy_all_gather_op: bool = False,
        _debug_dummy_all_reduce_op: bool = False,
        _debug_dummy_reduce_scatter_op: bool = False,
        _debug_dummy_optimization_barrier_op: bool = False,
    ) -> None:
        options = dict(locals())
        _check(options)
        _wrap_parts(options)
        super().__init__()
        self._take_options(options)
        wrap.materialize(module, param_init_fn)
        self._fsdp_wrapped_module = names.Inner(module)
        self._unit = Unit(self._take_parameters(), self._unit_options(options))
        self._move_buffers()
        if execute_sharding_on_init:
            gc.collect()
            training.sync()

    def _take_options(self, options: dict[str, ForeignObject]) -> None:
        """Set this module's attributes from the constructor's arguments, and this replica's rank."""
        self.reshard_after_forward: bool = options["reshard_after_forward"]
        self.disable_reshard_on_root: bool = options["disable_reshard_on_root"]
        self.flatten_parameters: bool = options["flatten_parameters"]
        self.sync_on_finalization: bool = options["sync_on_finalization"]
        self.compute_dtype: torch.dtype = options["compute_dtype"] or torch.float32
        self.buffer_dtype: torch.dtype = options["buffer_dtype"] or self.compute_dtype
        self.sharding_groups: Sequence[Sequence[int]] | None = options["sharding_groups"]
        self.xla_device = runtime.device()
        rank, world_size = options["sharding_rank"], options["sharding_world_size"]
        mine = runtime.replica_of(self.xla_device)
        self.rank: int = mine[0] if rank is None else rank
        self.world_size: int = mine[1] if world_size is None else world_size
        on_rows = options["shard_param_on_dim_0"]
        self._by_rows: bool = on_rows and not self.flatten_parameters
        self._multiple: int = 1 if on_rows else options["_shard_size_multiple"]
        self._is_root: bool | None = None
        self._dtypes: dict[str, torch.dtype] = {}
        self._aliases: dict[str, str] = {}

    def _unit_options(self, options: dict[str, ForeignObject]) -> Options:
        """The options of this module's ``Unit``."""
        pre = _predivide_factor(self.world_size)
        return Options(
            self.compute_dtype, self.sharding_groups, self.world_size, options["coalesce_all_gather_ops"],
            (options["reduce_scatter_bucket_size_mb"] or 0) * _MEBIBYTE,
            options["optimization_barrier_in_forward"], options["optimization_barrier_in_backward"],
            options["fp32_reduce_scatter"], pre, self.world_size / pre,
        )  # fmt: skip

    # -- sharding -------------------------------------------------------------------------------

    def _take_parameters(self) -> list[Shard]:
        """Remove the parameters from the module, and return this replica's parts of them.

        Skips the parameters of parts that are wrapped themselves.
        """
        places: dict[nn.Parameter, list[tuple[str, Place]]] = {}
        for prefix, part in self.named_modules():
            if isinstance(part, XlaFullyShardedDataParallel):
                continue  # this module, or a wrapped part
            # unlike named_parameters(), this has a shared parameter under each of its names
            for name, parameter in part._parameters.items():
                if parameter is None:
                    continue
                path = f"{prefix}.{name}"
                self._check_parameter(path, parameter)
                place = Place(part, name, parameter.size())
                places.setdefault(parameter, []).append((path, place))
        for used in places.values():
            for path, place in used:
                del place.module._parameters[place.attribute]
                if path != used[0][0]:
                    self._aliases[path] = used[0][0]
        if self.flatten_parameters:
            return self._flattened(places)
        return [
            self._cut(parameter, used[0][0], tuple(place for _, place in used))
            for parameter, used in places.items()
        ]

    def _check_parameter(self, path: str, parameter: nn.Parameter) -> None:
        name = names.original_name(path)
        if getattr(parameter, _TAKEN, False):
            raise ValueError(MSG_SHARED.format(name=name))
        if parameter.dtype != torch.float32:
            raise TypeError(MSG_PARAMETER_DTYPE.format(name=name, got=parameter.dtype))

    def _flattened(self, places: Mapping[nn.Parameter, list[tuple[str, Place]]]) -> list[Shard]:
        inner = self._fsdp_wrapped_module
        shards = []
        for trains in (True, False):
            joined = {p: used for p, used in places.items() if p.requires_grad == trains}
            if not joined:
                continue
            name = f"{names.FLAT}{len(inner.flat)}"
            outside = names.WRAPPED
            inner.flatten({used[0][0].removeprefix(outside): p for p, used in joined.items()})
            start, pieces = 0, []
            for parameter, used in joined.items():
                for _, place in used:
                    pieces.append(Place(place.module, place.attribute, place.size, start))
                start += parameter.numel()
                setattr(parameter, _TAKEN, True)
            flat = inner._parameters.pop(name)
            assert flat is not None
            shards.append(self._cut(flat, outside + name, tuple(pieces)))
        return shards

    def _cut(self, parameter: nn.Parameter, path: str, places: tuple[Place, ...]) -> Shard:
        rows = self._by_rows and parameter.dim() > 0
        layout = Layout(parameter.size(), self.world_size, self.rank, self._multiple, rows)
        with torch.no_grad():
            part = layout.part(parameter.detach()).to(self.xla_device)
        mine = nn.Parameter(part, requires_grad=parameter.requires_grad)
        setattr(parameter, _TAKEN, True)
        setattr(mine, checkpoint_marks.ROWS_OF, layout.rows_of)
        self.register_parameter(names.shard_name(path), mine)
        return Shard(mine, layout, path, places)

    def _move_buffers(self) -> None:
        """Move all buffers to the device.

        Except in wrapped parts, convert floating-point ones to ``buffer_dtype``.
        """
        inner = [m for m in self.modules() if isinstance(m, XlaFullyShardedDataParallel)]
        theirs = {id(part) for m in inner if m is not self for part in m.modules()}
        for prefix, part in self.named_modules():
            if id(part) in theirs:
                continue
            for name, buffer in list(part.named_buffers(recurse=False)):
                dtype = self.buffer_dtype if buffer.is_floating_point() else buffer.dtype
                if dtype != buffer.dtype:
                    self._dtypes[f"{prefix}.{name}".replace(names.INNER, "")] = buffer.dtype
                part._buffers[name] = buffer.to(self.xla_device, dtype)

    # -- computing ------------------------------------------------------------------------------

    def forward(self, *args: object, **kwargs: object) -> Tree:
        """Gather the full parameters from all replicas, and call the wrapped module; returns its results."""
        self._find_root()
        if self.compute_dtype != torch.float32:
            args, kwargs = tensors.map_selected((args, kwargs), _is_float, self._cast)
        # a checkpoint computes this module again inside a backward pass, which needs the parameters right
        # afterwards
        recomputing = autograd.current_backward() != -1
        keeps = self._is_root and self.disable_reshard_on_root
        frees = self.reshard_after_forward and not keeps and not recomputing
        call = units.Call(self._unit, frees, self._end_backward)
        args, kwargs = call.enter((args, kwargs))
        try:
            results = self._fsdp_wrapped_module(*args, **kwargs)
        except BaseException:
            self._unit.clear()
            raise
        return call.leave(results)

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.compute_dtype)

    def _find_root(self) -> None:
        """Mark this wrapper as the outermost one if it is the first of nested wrappers that is called."""
        if self._is_root is None:
            for part in self._wrappers():
                part._is_root = part is self

    def _wrappers(self) -> Iterator[XlaFullyShardedDataParallel]:
        return (m for m in self.modules() if isinstance(m, XlaFullyShardedDataParallel))

    def _end_backward(self) -> None:
        if self._is_root and self.sync_on_finalization:
            training.sync()

    def _check_idle_root(self, what: str) -> None:
        self._find_root()
        if not self._is_root:
            raise RuntimeError(MSG_ROOT.format(what=what))
        if autograd.current_backward() != -1:
            raise RuntimeError(MSG_BUSY.format(what=what))

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """A block whose backward passes add up full gradients; the first one after the block reduces the sums.

        Raises RuntimeError on a wrapper inside another, and in a backward pass.
        """
        self._check_idle_root("no_sync")
        previous = [(part._unit, part._unit.reduces) for part in self._wrappers()]
        for unit, _ in previous:
            unit.reduces = False
        try:
            yield
        finally:
            for unit, reduces in previous:
                unit.reduces = reduces

    def set_gradient_divide_factors(self, pre: float, post: float, recursive: bool) -> None:
        """Divide gradients by ``pre`` before, and by ``post`` after, they are summed over the replicas.

        By default, the product of both is the number of replicas. (1, 1) divides by that number during the
        reduction. ``recursive`` also sets the factors of the wrappers inside this one.
        """
        for part in self._wrappers() if recursive else (self,):
            options = part._unit.options
            options.predivide, options.postdivide = pre, post
            options.scale = 1.0 / part.world_size if (pre, post) == (1, 1) else 1.0

    @torch.no_grad()
    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        groups: Sequence[Sequence[int]] | None = None,
    ) -> torch.Tensor:
        """Scale all gradients so that their total norm is at most ``max_norm``; returns the norm before, a scalar.

        The norm is that of the whole model's gradient, over the parts on all replicas, or those of this replica's
        group if ``groups`` are given. All these replicas must call this method. ``norm_type`` is the order of the
        norm (default: 2), which may be ``inf``. Raises RuntimeError on a wrapper inside another, and in a backward
        pass.
        """
        self._check_idle_root("clip_grad_norm_")
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        total = self._norm(gradients, float(norm_type), groups)
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for gradient in gradients:
            gradient.mul_(factor)
        return total

    def _norm(
        self, gradients: Sequence[torch.Tensor], kind: float, groups: model_collectives.Groups
    ) -> torch.Tensor:
        if not gradients:
            return torch.zeros((), device=self.xla_device)
        norms = torch.stack([torch.linalg.vector_norm(g, kind) for g in gradients])
        mine = torch.linalg.vector_norm(norms, kind)
        if kind == torch.inf:
            total: torch.Tensor = model_collectives.all_reduce("max", mine, groups=groups)
            return total
        return model_collectives.all_reduce("sum", mine**kind, groups=groups) ** (1.0 / kind)  # type: ignore[no-any-return]

    # -- inspection -----------------------------------------------------------------------------

    @property
    def module(self) -> names.Inner:
        """The module between this wrapper and the wrapped module, which is its attribute ``module``."""
        return self._fsdp_wrapped_module

    @property
    def sharded_params(self) -> list[nn.Parameter]:
        """This replica's parts of the parameters of this wrapper, without those of wrappers inside it."""
        return [shard.parameter for shard in self._unit.shards]

    @property
    def params_with_grad(self) -> list[nn.Parameter]:
        """The parts that have gradients, including those of wrappers inside this one."""
        return [p for p in self.parameters() if p.grad is not None]

    def get_original_names_and_sharded_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The parts, each with the name of its parameter in the original model; ``flat_param_N`` if flattened."""
        parts = []
        for prefix, part in self.named_modules():
            if isinstance(part, XlaFullyShardedDataParallel):
                for shard in part._unit.shards:
                    path = f"{prefix}.{shard.path}" if prefix else shard.path
                    parts.append((names.original_name(path), shard.parameter))
        return parts

    def get_shard_metadata(self) -> dict[str, object]:
        """The metadata that ``consolidate_sharded_state_dicts`` needs; save it with ``state_dict()``."""
        shard_info: dict[str, object] = {}
        flatten_info: dict[str, object] = {}
        buffer_info: dict[str, object] = {}
        shared_info: dict[str, str] = {}
        for full_prefix, part in self.named_modules():
            prefix = full_prefix.replace(names.INNER, "")
            if isinstance(part, names.Inner):
                for number, metadata in enumerate(part.flat):
                    flatten_info[f"{prefix}.{names.FLAT}{number}"] = metadata
            if not isinstance(part, XlaFullyShardedDataParallel):
                continue
            outside = f"{prefix}." if prefix else ""
            shard_info[prefix] = {
                names.shard_name(s.path): {"_orig_size": s.layout.size, "_orig_name": s.path}
                for s in part._unit.shards
            }
            for alias, first in part._aliases.items():
                alias, first = (names.original_name(outside + path) for path in (alias, first))
                shared_info[alias] = first
            for name, dtype in part._dtypes.items():
                buffer_info[outside + name] = {"_orig_dtype": dtype}
        return {
            "shard_info": shard_info, "flatten_info": flatten_info, "buffer_info": buffer_info,
            "shared_info": shared_info, "world_size": self.world_size, "rank": self.rank,
        }  # fmt: skip

    def extra_repr(self) -> str:
        """The options, for ``print(model)``."""
        shown = (
            "world_size", "rank", "compute_dtype", "buffer_dtype", "flatten_parameters",
            "reshard_after_forward", "sharding_groups",
        )  # fmt: skip
        return ", ".join(f"{name}={getattr(self, name)}" for name in shown)

    def __getattr__(self, name: str) -> Attribute:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_fsdp_wrapped_module":
                raise
            return getattr(self._fsdp_wrapped_module, name)

    def __getitem__(self, key: object) -> Attribute:
        return self._fsdp_wrapped_module[key]


# Marks a parameter that a wrapper has already cut: another wrapper with this parameter shares it.
_TAKEN: Final = "_xla_fsdp_taken"
# The wrapper's options that are passed on to the parts that its policy wraps.
_INHERITED: Final = (
    "reshard_after_forward", "flatten_parameters", "execute_sharding_on_init",
    "optimization_barrier_in_forward", "optimization_barrier_in_backward", "sync_on_finalization",
    "disable_reshard_on_root", "compute_dtype", "buffer_dtype", "fp32_reduce_scatter",
    "sharding_groups", "sharding_rank", "sharding_world_size", "shard_param_on_dim_0",
    "pin_layout_in_collective_ops", "reduce_scatter_bucket_size_mb", "coalesce_all_gather_ops",
    "param_init_fn", "_shard_size_multiple", "_use_xla_patched_linear", "_debug_msg",
)  # fmt: skip


def _is_float(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _check(options: Mapping[str, ForeignObject]) -> None:
    """Check the constructor's arguments; see the class for the errors."""
    dummies = [name for name, value in options.items() if name.startswith("_debug_dummy") and value]
    if dummies:
        raise NotImplementedError(MSG_DEBUG.format(names=", ".join(dummies)))
    module = options["module"]
    if isinstance(module, XlaFullyShardedDataParallel):
        raise RuntimeError(MSG_TWICE)
    if getattr(module.forward, "__func__", module.forward) is nn.Module.forward:
        raise RuntimeError(MSG_NO_FORWARD.format(kind=type(module).__name__))
    for name in ("compute_dtype", "buffer_dtype"):
        if options[name] is not None and options[name] not in FLOAT_DTYPES:
            known = ", ".join(map(str, FLOAT_DTYPES))
            raise ValueError(MSG_DTYPE.format(name=name, got=options[name], known=known))
    parts = (options["sharding_rank"], options["sharding_world_size"])
    if options["sharding_groups"] is not None and None in parts:
        raise ValueError(MSG_GROUPS)


def _predivide_factor(world_size: int) -> float:
    """A power of two near the square root of ``world_size``.

    Dividing by it before the sum, and by the rest after it, avoids overflow and underflow in half precision.
    """
    factor = 1
    while world_size % factor == 0 and world_size / factor > factor:
        factor *= 2
    return float(factor)


def _wrap_parts(options: dict[str, ForeignObject]) -> None:
    """Wrap the parts of the module that the policy chooses."""
    if options["auto_wrap_policy"] is not None:
        wrap.recursive_wrap(
            options["module"],
            options["auto_wrap_policy"],
            options["auto_wrapper_callable"] or XlaFullyShardedDataParallel,
            only_wrap_children=True,
            **{name: options[name] for name in _INHERITED},
        )
