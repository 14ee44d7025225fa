"""The parts of an exported model, and the directory that holds them, in the layout of torch_xla's loaders.

functions/NAME.meta      JSON: which arguments and weights are the arguments of the program
functions/NAME.bytecode  the program, portable StableHLO
functions/NAME.mlir      the program as text, if wanted
data/NAME                the weights, by their names in the model, as numpy files
constants/0, 1, ...      numbers that are further arguments of the program, as numpy files
"""

from __future__ import annotations

import dataclasses
import enum
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import ml_dtypes
import numpy as np

from xla_core.contract.foreign_values import JsonObject
from xla_core.export.options import StableHLOExportOptions

MSG_NO_BUNDLE: Final = (
    "{path} holds no exported model: there is no {missing}. Give a directory that "
    "save_as_stablehlo wrote"
)
MSG_BAD_META: Final = "{path} does not describe an exported function: {reason}"
MSG_BAD_NAME: Final = (
    "the weight {name!r} cannot be saved: its name is not a valid file name; rename it in the model"
)

_FUNCTIONS: Final = "functions"
_DATA: Final = "data"
_CONSTANTS: Final = "constants"

# numpy's files only know numpy's dtypes: arrays of these are read as plain bytes, and the meta has the dtype.
_EXTENDED: Final[Mapping[str, np.dtype]] = {
    name: np.dtype(getattr(ml_dtypes, name))
    for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2")
}


class VariableType(enum.Enum):
    """The kind of a program's argument."""

    INPUT_ARG = "input_arg"
    PARAMETER = "parameter"
    CONSTANT = "constant"


@dataclasses.dataclass
class VariableSignature:
    """The shape and the PyTorch dtype (``"float32"``) of an argument or a result.

    ``dynamic_dims`` are the dimensions that may have any size; there, ``shape`` has the size at the export.
    """

    shape: list[int]
    dtype: str
    dynamic_dims: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class InputLocation:
    """The caller's argument, the weight or the constant that is an argument of a program."""

    type_: VariableType
    position: int = -1
    name: str = ""

    @classmethod
    def parameter(cls, name: str) -> InputLocation:
        """The weight ``name``: a parameter, a buffer, or a constant tensor in the model's code."""
        return cls(VariableType.PARAMETER, name=name)

    @classmethod
    def input_arg(cls, position: int) -> InputLocation:
        """The caller's argument number ``position``, counted after flattening nested arguments."""
        return cls(VariableType.INPUT_ARG, position)

    @classmethod
    def constant(cls, position: int) -> InputLocation:
        """The bundle's constant number ``position``."""
        return cls(VariableType.CONSTANT, position)


@dataclasses.dataclass
class StableHLOFunctionMeta:
    """How to call one program.

    ``input_signature`` and ``input_locations`` have an item for each argument of the program, ``output_signature``
    for each result. ``unused_inputs`` are the caller's arguments that the program does not take.
    ``stablehlo_version`` is the oldest release of StableHLO that reads the program. The pytree specs are those of
    ``torch.utils._pytree``, as JSON.
    """

    name: str
    stablehlo_version: str
    input_signature: list[VariableSignature]
    output_signature: list[VariableSignature]
    input_locations: list[InputLocation]
    unused_inputs: list[tuple[InputLocation, VariableSignature]]
    input_pytree_spec: str | None = None
    output_pytree_spec: str | None = None


@dataclasses.dataclass
class StableHLOFunc:
    """A program: how to call it, its portable bytecode, and its text, or None without text."""

    meta: StableHLOFunctionMeta
    bytecode: bytes
    text: str | None


@dataclasses.dataclass
class StableHLOModelBundle:
    """Programs, and the weights and constants that they take in addition to the caller's arguments."""

    state_dict: dict[str, np.ndarray]
    additional_constants: list[np.ndarray]
    stablehlo_funcs: list[StableHLOFunc]


# -- writing --------------------------------------------------------------------------------------


def save(
    bundle: StableHLOModelBundle,
    directory: str | os.PathLike[str],
    options: StableHLOExportOptions | None = None,
) -> None:
    """Write ``bundle`` to ``directory``, which is created if needed; weights only if ``options.save_weights``.

    Raises ValueError for a weight whose name is not a valid file name.
    """
    options = options or StableHLOExportOptions()
    root = Path(directory)
    arrays = {f"{_CONSTANTS}/{i}": a for i, a in enumerate(bundle.additional_constants)}
    if options.save_weights:
        (root / _DATA).mkdir(parents=True, exist_ok=True)
        arrays |= {f"{_DATA}/{_checked(name)}": a for name, a in bundle.state_dict.items()}
    (root / _FUNCTIONS).mkdir(parents=True, exist_ok=True)
    (root / _CONSTANTS).mkdir(exist_ok=True)
    for name, array in arrays.items():
        with (root / name).open("wb") as file:
            np.save(file, np.asarray(array), allow_pickle=False)
    for function in bundle.stablehlo_funcs:
        _save_function(root / _FUNCTIONS, function)


def _save_function(folder: Path, function: StableHLOFunc) -> None:
    name = function.meta.name
    described = json.dumps(dataclasses.asdict(function.meta), default=lambda kind: kind.value)
    (folder / f"{name}.meta").write_text(described)
    (folder / f"{name}.bytecode").write_bytes(function.bytecode)
    text = folder / f"{name}.mlir"
    if function.text is not None:
        text.write_text(function.text)
    else:
        text.unlink(missing_ok=True)  # of a model that was saved there before


def _checked(name: str) -> str:
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError(MSG_BAD_NAME.format(name=name))
    return name


# -- reading --------------------------------------------------------------------------------------


def load(directory: str | os.PathLike[str]) -> StableHLOModelBundle:
    """Read the bundle in ``directory``, without running code from there.

    Raises FileNotFoundError if there is no bundle, ValueError if it is damaged.
    """
    root = Path(directory)
    metas = sorted((root / _FUNCTIONS).glob("*.meta"))
    if not metas:
        raise FileNotFoundError(MSG_NO_BUNDLE.format(path=root, missing=f"{_FUNCTIONS}/*.meta"))
    functions = [_load_function(path) for path in metas]
    dtypes = _dtypes(functions)
    constants = sorted(_files(root / _CONSTANTS), key=lambda path: int(path.name))
    return StableHLOModelBundle(
        state_dict={p.name: _load_array(p, dtypes.get(p.name)) for p in _files(root / _DATA)},
        additional_constants=[_load_array(p, dtypes.get(int(p.name))) for p in constants],
        stablehlo_funcs=functions,
    )


def _files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _load_function(path: Path) -> StableHLOFunc:
    try:
        meta = _parse_meta(json.loads(path.read_text()))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(MSG_BAD_META.format(path=path, reason=repr(error))) from error
    code, text = path.with_suffix(".bytecode"), path.with_suffix(".mlir")
    if not code.exists():
        raise FileNotFoundError(MSG_NO_BUNDLE.format(path=path.parent.parent, missing=code))
    return StableHLOFunc(meta, code.read_bytes(), text.read_text() if text.exists() else None)


class StableHLOJSONSerializer(json.JSONEncoder):
    """Writes ``StableHLOFunctionMeta`` and its parts: ``json.dumps(meta, cls=StableHLOJSONSerializer)``."""

    def default(self, o: object) -> object:
        """A dict of the fields of a dataclass, or the name of a kind of variable."""
        if dataclasses.is_dataclass(o) and not isinstance(o, type):
            return {f.name: getattr(o, f.name) for f in dataclasses.fields(o)}
        return o.value if isinstance(o, VariableType) else super().default(o)


def stablehlo_obj_hook(dct: JsonObject) -> object:
    """The object of a dict in the JSON text, for ``json.loads(text, object_hook=stablehlo_obj_hook)``."""
    if dct.keys() == {"shape", "dtype", "dynamic_dims"}:
        return VariableSignature(**dct)
    if dct.keys() == {"type_", "position", "name"}:
        return _parse_location(dct)
    if "stablehlo_version" in dct and "input_signature" in dct:
        unused = [(place, signature) for place, signature in dct["unused_inputs"]]
        return StableHLOFunctionMeta(**dct | {"unused_inputs": unused})
    return dct


def _parse_meta(fields: JsonObject) -> StableHLOFunctionMeta:
    return StableHLOFunctionMeta(
        **fields
        | {
            "input_signature": [VariableSignature(**s) for s in fields["input_signature"]],
            "output_signature": [VariableSignature(**s) for s in fields["output_signature"]],
            "input_locations": [_parse_location(a) for a in fields["input_locations"]],
            "unused_inputs": [
                (_parse_location(a), VariableSignature(**s)) for a, s in fields["unused_inputs"]
            ],
        }
    )


def _parse_location(fields: JsonObject) -> InputLocation:
    return InputLocation(VariableType(fields["type_"]), fields["position"], fields["name"])


def _dtypes(functions: list[StableHLOFunc]) -> dict[str | int, str]:
    """The dtypes in which the programs take weights, by name, and constants, by position."""
    return {
        place.name or place.position: signature.dtype
        for function in functions
        for place, signature in zip(
            function.meta.input_locations, function.meta.input_signature, strict=True
        )
        if place.type_ is not VariableType.INPUT_ARG
    }


def _load_array(path: Path, dtype: str | None) -> np.ndarray:
    array: np.ndarray = np.load(path, allow_pickle=False)
    extended = _EXTENDED.get(dtype or "")
    return array.view(extended) if extended is not None and array.dtype.kind == "V" else array
