"""Consolidates the checkpoints of a sharded model's replicas into one checkpoint, without devices."""

from __future__ import annotations

import argparse
import sys
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import torch

from xla_core.extension_api.operators import Tree
from xla_dist.fsdp import names

MSG_COUNT: Final = (
    "{what}: the model was sharded over {wanted} replicas, but there are {got} state dicts"
)
MSG_NO_FILES: Final = (
    "no file matches {pattern}; ckpt_prefix is the common beginning of the files' paths"
)
MSG_RANKS: Final = "the files that match {pattern} have the ranks {got}, not 0 to {last}"


def consolidate_sharded_state_dicts(
    state_dict_list: Sequence[Mapping[str, object]], shard_metadata: Mapping[str, Tree]
) -> OrderedDict[str, torch.Tensor]:
    """The state dict of the original module, from the state dicts of all replicas, in the order of their ranks.

    ``shard_metadata`` is ``model.get_shard_metadata()`` of any replica. Raises ValueError if there is not one state
    dict for each replica.
    """
    world = shard_metadata["world_size"]
    if len(state_dict_list) != world:
        raise ValueError(
            MSG_COUNT.format(what="state_dict_list", wanted=world, got=len(state_dict_list))
        )
    whole: OrderedDict[str, torch.Tensor] = OrderedDict()
    for name, value in state_dict_list[0].items():
        prefix, shard = _split(name)
        if shard is None:
            whole[names.original_name(name)] = _buffer(name, value, shard_metadata)
            continue
        info = shard_metadata["shard_info"][prefix][shard]
        parts = [torch.as_tensor(state[name]) for state in state_dict_list]
        full = _joined(parts, info["_orig_size"])
        path = f"{prefix}.{info['_orig_name']}" if prefix else info["_orig_name"]
        whole.update(_parameters(path, full, shard_metadata["flatten_info"]))
    for alias, first in shard_metadata.get("shared_info", {}).items():
        whole[alias] = whole[first]
    return whole


def _split(name: str) -> tuple[str, str | None]:
    """The prefix and the name of a parameter's part; ``"", None`` if ``name`` is not that of a part."""
    words = name.split(".")
    for index, word in enumerate(words):
        if word.startswith(names.SHARD):
            return ".".join(words[:index]), ".".join(words[index:])
    return "", None


def _buffer(name: str, value: torch.Tensor, shard_metadata: Mapping[str, Tree]) -> torch.Tensor:
    info = shard_metadata.get("buffer_info", {}).get(name)
    return value if info is None else value.to(info["_orig_dtype"])


def _joined(parts: Sequence[torch.Tensor], size: torch.Size) -> torch.Tensor:
    joined = torch.cat(list(parts))
    if joined.dim() == 1:
        return joined[: size.numel()].view(size).clone()
    return joined[: size[0]].clone()


def _parameters(
    path: str, full: torch.Tensor, flatten_info: Mapping[str, names.FlatMetadata]
) -> dict[str, torch.Tensor]:
    """The parameter at ``path`` by its name, or the parameters in it by theirs if it is a flat parameter."""
    metadata = flatten_info.get(path.replace(names.INNER, ""))
    if metadata is None:
        return {names.original_name(path): full}
    prefix = names.original_name(path.rpartition(".")[0] + ".")
    return {
        names.original_name(prefix + name): value.clone()
        for name, value in names.pieces(full, metadata)
    }


def consolidate_sharded_model_checkpoints(
    ckpt_prefix: str, ckpt_suffix: str = "*.pth", save_path: str = "", save_model: bool = True
) -> tuple[OrderedDict[str, torch.Tensor], str | None]:
    """Consolidate the checkpoints in all files that match ``ckpt_prefix + ckpt_suffix``, and save the result.

    Each file contains the dict of one replica, with ``model`` and ``shard_metadata``. Returns the full state dict
    and the path of the saved ``{"model": ...}``, which is ``save_path`` (default: ``ckpt_prefix +
    "_consolidated.pth"``), or None unless ``save_model`` (default: True). Raises FileNotFoundError if no file
    matches, ValueError if there is not exactly one file for each replica.
    """
    pattern = ckpt_prefix + ckpt_suffix
    checkpoints = [torch.load(path, map_location="cpu") for path in _matching(pattern)]
    if not checkpoints:
        raise FileNotFoundError(MSG_NO_FILES.format(pattern=pattern))
    checkpoints.sort(key=lambda checkpoint: checkpoint["shard_metadata"]["rank"])
    metadata = checkpoints[0]["shard_metadata"]
    world = metadata["world_size"]
    if len(checkpoints) != world:
        raise ValueError(MSG_COUNT.format(what=pattern, wanted=world, got=len(checkpoints)))
    ranks = [checkpoint["shard_metadata"]["rank"] for checkpoint in checkpoints]
    if ranks != list(range(world)):
        raise ValueError(MSG_RANKS.format(pattern=pattern, got=ranks, last=world - 1))
    whole = consolidate_sharded_state_dicts([c["model"] for c in checkpoints], metadata)
    if not save_model:
        return whole, None
    path = save_path or f"{ckpt_prefix}_consolidated.pth"
    torch.save({"model": whole}, path)
    return whole, path


def _matching(pattern: str) -> list[Path]:
    path = Path(pattern)
    return sorted(path.parent.glob(path.name))


def main(arguments: Sequence[str] | None = None) -> None:
    """``python -m torch_xla.distributed.fsdp.consolidate_sharded_ckpts``."""
    parser = argparse.ArgumentParser(
        prog="consolidate_sharded_ckpts",
        description="Consolidate the checkpoints of all replicas into one.",
    )
    parser.add_argument("--ckpt_prefix", required=True, help="common beginning of the files' paths")
    parser.add_argument("--ckpt_suffix", default="*.pth", help="pattern of the rest (%(default)s)")
    parser.add_argument("--save_path", default="", help="default: CKPT_PREFIX_consolidated.pth")
    options = parser.parse_args(arguments)
    whole, path = consolidate_sharded_model_checkpoints(
        options.ckpt_prefix, options.ckpt_suffix, options.save_path
    )
    sys.stdout.write(f"saved {len(whole)} tensors to {path}\n")
