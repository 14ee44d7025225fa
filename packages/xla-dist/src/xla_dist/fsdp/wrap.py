"""Policies that choose which parts of a model become sharding units of their own.

A policy is called as ``policy(module=, recurse=, unwrapped_params=)``: with ``recurse`` whether to look into the
module's children, without whether to wrap the module itself; ``unwrapped_params`` counts the
elements of its parameters that nothing inside wraps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

from torch import nn

from xla_core.extension_api.operators import Tree

MIN_NUM_PARAMS: Final = 100_000_000
FORCE_LEAF_MODULES: Final = frozenset({nn.MultiheadAttention})
EXCLUDE_WRAP_MODULES: Final = frozenset({nn.ModuleList, nn.ModuleDict})
MSG_WRAPPED: Final = (
    "recursive_wrap: {name} is already a {kind}; wrap by policy first, or wrap all parts yourself"
)


def always_wrap_policy(*args: object, **kwargs: object) -> bool:
    """Wrap every module."""
    del args, kwargs
    return True


def lambda_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    unwrapped_params: int,
    lambda_fn: Callable[[nn.Module], bool],
) -> bool:
    """Wrap the modules that ``lambda_fn`` says yes to."""
    del unwrapped_params
    return recurse or lambda_fn(module)


def transformer_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    unwrapped_params: int,
    transformer_layer_cls: Collection[type[nn.Module]],
) -> bool:
    """Wrap the modules of these classes: a transformer's layers."""
    del unwrapped_params
    return recurse or isinstance(module, tuple(transformer_layer_cls))


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    unwrapped_params: int,
    min_num_params: int = MIN_NUM_PARAMS,
    force_leaf_modules: Collection[type[nn.Module]] | None = None,
    exclude_wrap_modules: Collection[type[nn.Module]] | None = None,
) -> bool:
    """Wrap modules with at least ``min_num_params`` (10**8) elements that nothing inside wraps.

    Children of ``force_leaf_modules`` (default: nn.MultiheadAttention) are never looked at,
    ``exclude_wrap_modules`` (default: nn.ModuleList, nn.ModuleDict, which have no forward) never wrapped.
    """
    if unwrapped_params < min_num_params:
        return False
    if recurse:
        spared = FORCE_LEAF_MODULES if force_leaf_modules is None else force_leaf_modules
    else:
        spared = EXCLUDE_WRAP_MODULES if exclude_wrap_modules is None else exclude_wrap_modules
    return not isinstance(module, tuple(spared))


def recursive_wrap(
    module: nn.Module,
    auto_wrap_policy: Callable[..., bool],
    wrapper_cls: Callable[..., nn.Module],
    ignored_modules: Collection[nn.Module] = (),
    ignored_params: Collection[nn.Parameter] = (),
    only_wrap_children: bool = False,
    **kwargs: Tree,
) -> tuple[nn.Module, int]:
    """Wrap the parts of ``module`` that the policy chooses as ``wrapper_cls(part, **kwargs)``, inside out.

    Returns the module, wrapped itself where the policy says so unless ``only_wrap_children``, and how many
    elements of parameters were wrapped. A module's dict ``_wrap_overrides`` replaces ``kwargs`` for it.
    Raises ValueError when a part is wrapped already.
    """
    _check_unwrapped(module, wrapper_cls, ignored_modules)
    ignored = {id(p) for p in ignored_params}
    count = sum(p.numel() for p in module.parameters() if id(p) not in ignored)
    if not auto_wrap_policy(module=module, recurse=True, unwrapped_params=count):
        return module, 0
    done = 0
    for name, child in list(module.named_children()):
        if child in ignored_modules:
            continue
        wrapped, number = recursive_wrap(
            child, auto_wrap_policy, wrapper_cls, ignored_modules, ignored_params, **kwargs
        )
        setattr(module, name, wrapped)
        done += number
    if only_wrap_children:
        return module, done
    if not auto_wrap_policy(module=module, recurse=False, unwrapped_params=count - done):
        return module, done
    options = {**kwargs, **getattr(module, "_wrap_overrides", {})}
    return wrapper_cls(module, **options), count


def _check_unwrapped(
    module: nn.Module, wrapper_cls: Callable[..., nn.Module], ignored: Collection[nn.Module]
) -> None:
    if not isinstance(wrapper_cls, type):
        return
    for name, child in module.named_modules():
        if child not in ignored and isinstance(child, wrapper_cls):
            raise ValueError(
                MSG_WRAPPED.format(name=name or "the module", kind=wrapper_cls.__name__)
            )
