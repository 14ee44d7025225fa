"""Pictures of shardings for the terminal: one cell per part, with the devices that hold it."""

from __future__ import annotations

import colorsys
import importlib.util
from typing import Final, TypedDict, Unpack

import numpy as np
import torch

from xla_core.extension_api import runtime
from xla_spmd.sharding.hlo_sharding import Sharding, ShardingType, parse
from xla_spmd.tensors.sharded_tensor import sharding_text, unwrap_sharded_tensor

RICH_ENABLED: Final = importlib.util.find_spec("rich") is not None
"""Whether the package rich is installed, which draws the pictures."""

MSG_RICH: Final = (
    "pictures of shardings need the package rich, which is not installed; "
    "pip install 'xla-spmd[visualize]'"
)
MSG_RANK: Final = (
    "{text} splits {count} dimensions; a picture shows at most two. Read the text, or look at the "
    "local_shards of the tensor"
)
MSG_MANUAL: Final = (
    "{text} does not say which part of the value a device holds: each device has its own value, as "
    "xs.enable_manual_sharding() returns it. Show the tensor before that, or the result of "
    "xs.disable_manual_sharding()"
)
MSG_NONE: Final = (
    "this tensor has no sharding to show: it is not annotated, or not computed yet; "
    "call mark_sharding() or torch_xla.sync() first"
)


class _Look(TypedDict, total=False):
    """The options of ``visualize_sharding``."""

    use_color: bool
    scale: float
    min_width: int
    max_width: int


def visualize_sharding(
    sharding: str,
    use_color: bool = True,
    scale: float = 1.0,
    min_width: int = 9,
    max_width: int = 80,
) -> object:
    """Print a picture of the HLO sharding ``sharding``, and return it as a ``rich.table.Table``.

    Each cell is a part of the value, and shows the kind and the numbers of the devices that hold it. ``use_color``
    (default: True) gives each cell its own color. ``scale`` (default: 1.0) stretches the cells. A cell is at least
    ``min_width`` characters wide (default: 9), and all together at most ``max_width`` (default: 80).

    Raises ValueError if the sharding splits more than two dimensions or is manual, and ImportError if the package
    rich is not installed.
    """
    table = _table(parse(sharding), sharding, use_color, scale, min_width, max_width)
    import rich.console

    rich.console.Console(width=max(max_width, 1)).print(table)
    return table


def visualize_tensor_sharding(t: torch.Tensor, **kwargs: Unpack[_Look]) -> object:
    """Print a picture of the sharding of ``t``, and return it. ``kwargs`` are those of ``visualize_sharding``.

    Raises ValueError if ``t`` has no sharding, and what ``visualize_sharding`` raises.
    """
    text = sharding_text(unwrap_sharded_tensor(t))
    if not text:
        raise ValueError(MSG_NONE)
    return visualize_sharding(text, **kwargs)


def cells(sharding: Sharding, text: str) -> list[list[list[int]]]:
    """The cells of a picture, as rows of cells: each cell is the list of the devices that hold the part.

    A value that is not split is one cell. Raises ValueError if more than two dimensions are split, or if the
    sharding is manual.
    """
    if sharding.type is ShardingType.MANUAL:
        raise ValueError(MSG_MANUAL.format(text=text))
    if sharding.type in (ShardingType.REPLICATED, ShardingType.MAXIMAL):
        devices = list(sharding.devices) or list(range(len(runtime.client().devices())))
        return [[devices]]
    grid = np.array(sharding.devices).reshape(*sharding.per_dimension, -1)
    split = [n for n in sharding.per_dimension if n > 1]
    if len(split) > 2:
        raise ValueError(MSG_RANK.format(text=text, count=len(split)))
    # a value of one dimension is shown as a row, like a printed tensor
    rows = sharding.per_dimension[0] if len(sharding.per_dimension) > 1 else 1
    if len(split) == 2:
        rows = split[0]
    elif len(split) == 1 and len(sharding.per_dimension) > 1:
        rows = split[0] if sharding.per_dimension[-1] == 1 else 1
    columns = int(np.prod(sharding.per_dimension)) // rows
    flat = grid.reshape(rows, columns, -1)
    return [[flat[r, c].tolist() for c in range(columns)] for r in range(rows)]


def _table(
    sharding: Sharding, text: str, use_color: bool, scale: float, min_width: int, max_width: int
) -> object:
    rows = cells(sharding, text)
    try:
        from rich import padding, style, table
    except ModuleNotFoundError as error:
        raise ImportError(MSG_RICH) from error
    count = len(rows[0])
    width = max(min(int(max_width * scale) // count - 3, int(min_width * scale * 2)), min_width)
    height = max(int(width * 0.25), 1)
    kind = runtime.device_type()
    picture = table.Table(show_header=False, show_lines=True, padding=0, highlight=not use_color)
    for r, row in enumerate(rows):
        line = []
        for c, devices in enumerate(row):
            label = f"{kind} {devices}"
            free = max(width - len(label), 0)
            color = _color(r * count + c, len(rows) * count) if use_color else None
            around = (height // 2, free - free // 2, height // 2, free // 2)
            colors = style.Style(bgcolor=color, color="black" if use_color else None)
            line.append(padding.Padding(label, around, style=colors))
        picture.add_row(*line)
    return picture


def _color(index: int, count: int) -> str:
    """Color ``index`` of ``count`` equally spaced hues, light enough for black text."""
    red, green, blue = colorsys.hls_to_rgb(index / max(count, 1), 0.7, 0.6)
    return f"#{int(red * 255):02x}{int(green * 255):02x}{int(blue * 255):02x}"
