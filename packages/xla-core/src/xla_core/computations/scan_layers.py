"""``scan_layers``: a sequence of equal layers as one loop over their stacked parameters."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import torch
from functorch.compile import default_partition
from torch import nn
from torch.utils import _pytree as pytree

from xla_core.computations.rematerialization import PartitionFn
from xla_core.computations.scan import scan
from xla_core.torch_bridge.operands import Tree

MSG_KEYS: Final = "Layer {number} has mismatched keys.{missing}{extra}"
MSG_SHAPES: Final = "Shape mismatch for '{name}' in layer {number}: expected {expected}, got {got}."
MSG_CLASSES: Final = (
    "Layer {number} consists of other modules than layer 0 ('{name}' is a {got} instead of a "
    "{expected}); scan_layers runs all layers with the code of the first"
)

_Tensors = dict[str, torch.Tensor]
_OneLayer = Callable[..., tuple[object, object]]
# For each first layer the functions to scan, by the modes (training or evaluation) of its modules.
_PURE_LAYERS: weakref.WeakKeyDictionary[nn.Module, dict[tuple[bool, ...], _OneLayer]] = (
    weakref.WeakKeyDictionary()
)


def scan_layers(
    layers: Iterable[nn.Module],
    input_data: object,
    partition_fn: PartitionFn = default_partition,
    is_layer_pure: bool = False,
) -> Tree:
    """``torch.nn.Sequential(*layers)(input_data)`` as one ``scan``, so that one layer is compiled for all.

    The layers must have the same modules, parameter names and shapes. All run the code of the first layer, with its
    numbers (such as dropout probabilities) and modes. Each takes what the layer before returns. Layers must not
    write to their buffers, as batch normalization does in training. ``partition_fn`` and ``is_layer_pure`` are
    ``partition_fn`` and ``is_fn_pure`` of ``scan``. Without layers, ``input_data`` is returned. Raises ValueError
    for layers that differ in structure.
    """
    every = list(layers)
    if not every:
        return input_data
    _check_classes(every)
    parameters = [dict(layer.named_parameters()) for layer in every]
    buffers = [dict(layer.named_buffers()) for layer in every]
    for tensors in (parameters, buffers):
        _check_shapes(tensors)
    stacked = tuple(
        pytree.tree_map(lambda *tensors: torch.stack(tensors), *tensors)
        for tensors in (parameters, buffers)
    )
    if not any(stacked):  # without parameters and buffers there is nothing to scan over
        return nn.Sequential(*every)(input_data)
    one = _one_layer(every[0], is_layer_pure)
    result, _ = scan(one, input_data, stacked, partition_fn, is_fn_pure=is_layer_pure)
    return result


def _one_layer(first: nn.Module, kept: bool) -> _OneLayer:
    """The function to scan; if ``kept``, the same one for the same layer in the same modes."""
    modes = tuple(module.training for module in first.modules())
    by_modes = _PURE_LAYERS.setdefault(first, {}) if kept else {}
    if modes in by_modes:
        return by_modes[modes]
    alive = weakref.ref(first)  # the dictionary must not keep its own key alive

    def one_layer(carry: Tree, tensors: tuple[_Tensors, _Tensors]) -> tuple[object, None]:
        layer = alive()
        assert layer is not None
        return torch.func.functional_call(layer, tensors, carry, strict=True), None

    by_modes[modes] = one_layer
    return one_layer


def _check_classes(layers: Sequence[nn.Module]) -> None:
    expected = {name: type(module) for name, module in layers[0].named_modules()}
    for number, layer in enumerate(layers[1:], start=1):
        got = {name: type(module) for name, module in layer.named_modules()}
        for name in expected.keys() & got.keys():
            if got[name] is not expected[name]:
                text = MSG_CLASSES.format(
                    number=number,
                    name=name,
                    got=got[name].__name__,
                    expected=expected[name].__name__,
                )
                raise ValueError(text)


def _check_shapes(tensors: Sequence[_Tensors]) -> None:
    expected = tensors[0]
    for number, got in enumerate(tensors[1:], start=1):
        missing, extra = expected.keys() - got.keys(), got.keys() - expected.keys()
        if missing or extra:
            text = MSG_KEYS.format(
                number=number,
                missing=f" Missing keys: {missing}." if missing else "",
                extra=f" Extra keys: {extra}." if extra else "",
            )
            raise ValueError(text)
        for name, tensor in got.items():
            if tensor.shape != expected[name].shape:
                text = MSG_SHAPES.format(
                    name=name, number=number, expected=expected[name].shape, got=tensor.shape
                )
                raise ValueError(text)
