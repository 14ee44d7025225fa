"""``SpmdFullyShardedDataParallel``: a module whose parameters are split over the mesh axis ``fsdp``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Final

from torch import nn

from xla_core.contract.foreign_values import Attribute
from xla_core.extension_api.operators import Tree
from xla_core.extension_api.tensors import XLATensor
from xla_spmd.sharding.mesh import Mesh, get_global_mesh
from xla_spmd.tensors.marking import is_sharded, mark_sharding
from xla_spmd.training.linear import apply_backward_optimization_barrier

AXIS: Final = "fsdp"
"""The mesh axis over which parameters and batches are split."""

MSG_TWICE: Final = "the module is already wrapped; wrap only the outermost module"
MSG_NO_MESH: Final = (
    "SpmdFullyShardedDataParallel got no mesh, and there is no global mesh; pass mesh=, or call "
    "xs.set_global_mesh(xs.Mesh(np.arange(n), (n,), ('fsdp',)))"
)
MSG_AXIS: Final = "the mesh {mesh} has no axis named {axis!r}"
MSG_OUTPUT: Final = (
    "the module returned {kind}: pass shard_output, a function (output, mesh) that marks the tensors in "
    "it. Without it, the output must be a tensor, or a tuple whose first item is one, which is split along its "
    "first dimension"
)

ShardOutput = Callable[[Tree, Mesh], None]


class SpmdFullyShardedDataParallel(nn.Module):
    """Wraps ``module`` and splits each of its parameters, and its output, over the mesh axis ``fsdp``.

    The module is moved to the device first. Each parameter is split along its largest dimension that the axis
    divides. A parameter without such a dimension stays whole, and one that was marked already keeps its sharding.

    ``mesh`` defaults to the global one. ``shard_output(output, mesh)`` marks what the module returns (default: the
    tensor, or the first item of a tuple, is split along its first dimension).
    ``auto_wrap_policy(module, recurse, parameters)`` tells which inner modules are wrapped too
    (``torch.distributed.fsdp.wrap`` has such policies). They are wrapped by ``auto_wrapper_callable(module,
    mesh=..., shard_output=..., extra_data_axis=...)``, by default this class. ``extra_data_axis`` is a second axis
    over which batches are split (default: none). The devices along it hold copies of the parameters.

    Raises ValueError if there is no mesh or it does not have these axes, RuntimeError if the module is wrapped
    already or its output cannot be split, and what ``mark_sharding`` raises.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        mesh: Mesh | None = None,
        shard_output: ShardOutput | None = None,
        auto_wrap_policy: Callable[..., bool] | None = None,
        auto_wrapper_callable: Callable[..., nn.Module] | None = None,
        extra_data_axis: str | None = None,
    ) -> None:
        super().__init__()
        if isinstance(module, SpmdFullyShardedDataParallel):
            raise RuntimeError(MSG_TWICE)
        self._mesh = _checked(mesh or get_global_mesh(), extra_data_axis)
        self._extra = extra_data_axis
        self.shard_output = shard_output
        if auto_wrap_policy is not None:
            wrapper = functools.partial(
                auto_wrapper_callable or SpmdFullyShardedDataParallel,
                mesh=self._mesh,
                shard_output=shard_output,
                extra_data_axis=extra_data_axis,
            )
            _wrap_inside(module, auto_wrap_policy, wrapper)
        # torch_xla's name of the attribute, which the keys of state dicts contain
        self._orig_module = module.to("xla")
        for parameter in module.parameters():
            if not is_sharded(parameter):
                mark_sharding(parameter, self._mesh, self._spec_of(parameter.shape))
        apply_backward_optimization_barrier(module)

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        return self._orig_module

    def _spec_of(self, shape: Sequence[int]) -> tuple[str | None, ...]:
        size = self._mesh.shape()[AXIS]
        divisible = [i for i, n in enumerate(shape) if n % size == 0]
        chosen = max(divisible, key=lambda i: shape[i], default=None)
        return tuple(AXIS if i == chosen else None for i in range(len(shape)))

    def forward(self, *args: object, **kwargs: object) -> Tree:
        """Call the module, and split its output along the first dimension or as ``shard_output`` says.

        Raises RuntimeError if there is no ``shard_output`` and the output is neither a tensor nor a tuple that
        begins with one.
        """
        output = self.module(*args, **kwargs)
        if self.shard_output is not None:
            self.shard_output(output, self._mesh)
            return output
        first = output[0] if isinstance(output, tuple) and output else output
        if not isinstance(first, XLATensor):
            raise RuntimeError(MSG_OUTPUT.format(kind=type(output).__name__))
        if first.dim():
            rows = AXIS if self._extra is None else (self._extra, AXIS)
            mark_sharding(first, self._mesh, (rows, *[None] * (first.dim() - 1)))
        return output

    def __getattr__(self, name: str) -> Attribute:
        """Look up attributes that this module does not have in the wrapped module."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("_orig_module"), name)

    def __getitem__(self, key: int) -> nn.Module:
        """The item ``key`` of the wrapped module (``nn.Sequential``)."""
        return self.module[key]  # type: ignore[index]


def _checked(mesh: Mesh | None, extra: str | None) -> Mesh:
    if mesh is None:
        raise ValueError(MSG_NO_MESH)
    for axis in (AXIS, extra):
        if axis is not None and axis not in (mesh.axis_names or ()):
            raise ValueError(MSG_AXIS.format(mesh=mesh, axis=axis))
    return mesh


def _wrap_inside(
    module: nn.Module, policy: Callable[..., bool], wrapper: Callable[[nn.Module], nn.Module]
) -> int:
    """Wrap the modules inside ``module`` that the policy selects, innermost first.

    Returns the number of elements of all parameters that are now inside wrapped modules.
    """
    wrapped = 0
    for name, child in list(module.named_children()):
        size = sum(p.numel() for p in child.parameters())
        if isinstance(child, SpmdFullyShardedDataParallel):
            wrapped += size
            continue
        inside = _wrap_inside(child, policy, wrapper) if policy(child, True, size) else 0
        if policy(child, False, size - inside):
            setattr(module, name, wrapper(child))
            inside = size
        wrapped += inside
    return wrapped
