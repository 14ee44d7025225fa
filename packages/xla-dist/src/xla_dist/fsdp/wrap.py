"""Policies that choose the parts of a model to wrap, and what is done to a model before it is wrapped.

A policy is called as ``policy(module=, recurse=, unwrapped_params=)``. With ``recurse`` it returns whether to visit
the module's children, and without it whether to wrap the module itself. ``unwrapped_params`` is the number of
elements of the module's parameters that are not in a wrapped part.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

from torch import nn

from xla_core.extension_api.operators import Tree

MIN_NUM_PARAMS: Final = 100_000_000
FORCE_LEAF_MODULES: Final = frozenset({nn.MultiheadAttention})
EXCLUDE_WRAP_MODULES: Final = frozenset({nn.ModuleList, nn.ModuleDict})
MSG_META: Final = (
    "{name} is on the meta device, and its module {kind} has no reset_parameters(); "
    "give param_init_fn"
)
MSG_WRAPPED: Final = (
    "recursive_wrap: {name} is already a {kind}; wrap by policy first, or wrap all parts yourself"
)


def always_wrap_policy(*args: object, **kwargs: object) -> bool:
    """A policy that wraps every module."""
    del args, kwargs
    return True


def lambda_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    unwrapped_params: int,
    lambda_fn: Callable[[nn.Module], bool],
) -> bool:
    """A policy that wraps the modules for which ``lambda_fn(module)`` is true."""
    del unwrapped_params
    return recurse or lambda_fn(module)


def transformer_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    unwrapped_params: int,
    transformer_layer_cls: Collection[type[nn.Module]],
) -> bool:
    """A policy that wraps the modules of the classes ``transformer_layer_cls``."""
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
    """A policy that wraps modules with at least ``min_num_params`` (default.

    10**8) unwrapped elements of parameters. It never visits children of the classes ``force_leaf_modules``
    (default: nn.MultiheadAttention), and never wraps modules of the classes ``exclude_wrap_modules`` (default:
    nn.ModuleList and nn.ModuleDict, which have no forward).
    """
    if unwrapped_params < min_num_params:
        return False
    if recurse:
        excluded = FORCE_LEAF_MODULES if force_leaf_modules is None else force_leaf_modules
    else:
        excluded = EXCLUDE_WRAP_MODULES if exclude_wrap_modules is None else exclude_wrap_modules
    return not isinstance(module, tuple(excluded))


def recursive_wrap(
    module: nn.Module,
    auto_wrap_policy: Callable[..., bool],
    wrapper_cls: Callable[..., nn.Module],
    ignored_modules: Collection[nn.Module] = (),
    ignored_params: Collection[nn.Parameter] = (),
    only_wrap_children: bool = False,
    **kwargs: Tree,
) -> tuple[nn.Module, int]:
    """Replace the parts that the policy chooses by ``wrapper_cls(part, **kwargs)``, inner parts first.

    Returns the module and the number of elements of parameters in wrapped parts. The module itself is wrapped too
    if the policy chooses it, unless ``only_wrap_children`` (default: False). It skips ``ignored_modules``, and does
    not count ``ignored_params`` (default: none). A module's dict ``_wrap_overrides`` overrides ``kwargs`` for it.
    Raises ValueError if a part is already wrapped.
    """
    _check_unwrapped(module, wrapper_cls, ignored_modules)
    ignored = {id(p) for p in ignored_params}
    count = sum(p.numel() for p in module.parameters() if id(p) not in ignored)
    if not auto_wrap_policy(module=module, recurse=True, unwrapped_params=count):
        return module, 0
    wrapped_count = 0
    for name, child in list(module.named_children()):
        if child in ignored_modules:
            continue
        wrapped, child_count = recursive_wrap(
            child, auto_wrap_policy, wrapper_cls, ignored_modules, ignored_params, **kwargs
        )
        setattr(module, name, wrapped)
        wrapped_count += child_count
    if only_wrap_children:
        return module, wrapped_count
    unwrapped = count - wrapped_count
    if not auto_wrap_policy(module=module, recurse=False, unwrapped_params=unwrapped):
        return module, wrapped_count
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


def materialize(module: nn.Module, init: Callable[[nn.Module], None] | None) -> None:
    """Initialize parameters of ``module`` on the meta device: by ``init(module)``, or by ``reset_parameters()``.

    Raises ValueError if ``init`` is None and a module with such parameters has no ``reset_parameters()``.
    """
    missing = [(n, p) for n, p in module.named_parameters() if p.is_meta]
    if not missing:
        return
    if init is not None:
        init(module)
        return
    for prefix, part in module.named_modules():
        own = [n for n, p in part.named_parameters(recurse=False) if p.is_meta]
        if not own:
            continue
        reset = getattr(part, "reset_parameters", None)
        if reset is None:
            name = f"{prefix}.{own[0]}" if prefix else own[0]
            raise ValueError(MSG_META.format(name=name, kind=type(part).__name__))
        part.to_empty(device="cpu", recurse=False)
        reset()
