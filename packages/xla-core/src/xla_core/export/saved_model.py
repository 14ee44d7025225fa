"""Saves exported models as TensorFlow SavedModels, in which TensorFlow's operator for StableHLO has the program.

TensorFlow is imported only when one of these functions runs.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Final

import torch

from xla_core.contract.foreign_values import ForeignObject
from xla_core.export.bundle import (
    InputLocation,
    StableHLOFunc,
    StableHLOModelBundle,
    VariableSignature,
    VariableType,
)
from xla_core.export.module import StableHLOGraphModule, exported_program_to_stablehlo
from xla_core.export.options import StableHLOExportOptions
from xla_core.torch_bridge.operands import Operand, Operands

MSG_NO_TENSORFLOW: Final = (
    "{function} needs TensorFlow, which cannot be imported ({reason}); pip install tensorflow"
)

# tf.saved_model.DEFAULT_SERVING_SIGNATURE_DEF_KEY
SERVING_KEY: Final = "serving_default"
# the newest version of the operator XlaCallModule that takes programs for any platform
_CALL_VERSION: Final = 5

# TensorFlow's dtypes of numbers among the caller's arguments.
_NUMBERS: Final[Mapping[str, str]] = {"int": "int32", "float": "float32", "bool": "bool"}


def tensorflow(function: str) -> ModuleType:
    """The module ``tensorflow``. Raises ImportError, which names the ``function`` that needs it."""
    try:
        return importlib.import_module("tensorflow")
    except ImportError as error:
        raise ImportError(MSG_NO_TENSORFLOW.format(function=function, reason=error)) from error


def make_tf_function(
    stablehlo_program: StableHLOGraphModule, bundle: StableHLOModelBundle | None = None
) -> Callable[..., list[ForeignObject]]:
    """The first function of a program, as a function from TensorFlow tensors to a list of TensorFlow tensors.

    ``bundle`` has the weights, such as ``tf.Variable`` objects (default: the program's own). Raises ImportError
    without TensorFlow.
    """
    tf = tensorflow("make_tf_function")
    call_module = importlib.import_module("tensorflow.compiler.tf2xla.python.xla").call_module
    function = stablehlo_program._bundle.stablehlo_funcs[0]
    held = bundle or stablehlo_program._bundle
    places = {place.position: i for i, (place, _) in enumerate(_inputs(function))}
    results = function.meta.output_signature

    def call(*args: Operand) -> Operand:
        return call_module(
            [_argument(place, args, places, held) for place in function.meta.input_locations],
            version=_CALL_VERSION,
            Tout=[tf.as_dtype(s.dtype) for s in results],
            Sout=[_shape(s) for s in results],
            module=function.bytecode,
        )

    return call


def save_stablehlo_graph_as_tf(
    stablehlo_program: StableHLOGraphModule,
    path: str | os.PathLike[str],
    serving_key: str = SERVING_KEY,
    function_alias: str = "",
) -> None:
    """Write the first function of a program, with its weights as variables, as a SavedModel to ``path``.

    ``serving_key`` is the name of the signature to serve (default: ``serving_default``), ``function_alias`` a tag
    of the function for converters (default: none). The arguments are called ``args_0``, ``args_1``, ... in the
    caller's order, after flattening. Raises ImportError without TensorFlow.
    """
    tf = tensorflow("save_stablehlo_graph_as_tf")
    own = stablehlo_program._bundle
    weights = {
        name: tf.Variable(value, trainable=False, name=_variable_name(name))
        for name, value in own.state_dict.items()
    }
    constants = [tf.Variable(value, trainable=False) for value in own.additional_constants]
    held = StableHLOModelBundle(weights, constants, own.stablehlo_funcs)
    signature = [
        tf.TensorSpec(_shape(s), tf.as_dtype(_NUMBERS.get(s.dtype, s.dtype)), f"args_{p.position}")
        for p, s in _inputs(own.stablehlo_funcs[0])
    ]
    saved = tf.Module()
    saved.f = tf.function(make_tf_function(stablehlo_program, held), input_signature=signature)
    saved.held = [*weights.values(), *constants]
    tf.saved_model.save(
        saved,
        os.fspath(path),
        signatures={serving_key: saved.f.get_concrete_function(*signature)},
        options=tf.saved_model.SaveOptions(
            function_aliases={function_alias: saved.f} if function_alias else None
        ),
    )


def save_torch_module_as_tf_saved_model(
    torch_model: torch.nn.Module,
    args: Operands,
    saved_model_dir: str | os.PathLike[str],
    dynamic_shapes: object = None,
    serving_key: str = SERVING_KEY,
    function_alias: str = "",
) -> None:
    """Export a module for the example arguments ``args`` and write it as a SavedModel.

    ``dynamic_shapes`` (default: none) are those of ``torch.export.export``; ``serving_key`` and ``function_alias``
    those of ``save_stablehlo_graph_as_tf``. Raises ImportError without TensorFlow.
    """
    tensorflow("save_torch_module_as_tf_saved_model")
    exported = torch.export.export(torch_model, args, dynamic_shapes=dynamic_shapes)
    options = StableHLOExportOptions(include_human_readable_text=False)
    program = exported_program_to_stablehlo(exported, options)
    save_stablehlo_graph_as_tf(program, saved_model_dir, serving_key, function_alias)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command that writes a SavedModel of a directory of ``save_as_stablehlo``; returns its exit status."""
    parser = argparse.ArgumentParser(
        description="Write a TensorFlow SavedModel of an exported model."
    )
    parser.add_argument("input_dir", help="a directory that save_as_stablehlo wrote")
    parser.add_argument("output_dir", help="the directory of the SavedModel")
    parser.add_argument("-a", "--function_alias", default="", help="tag of the function")
    parser.add_argument("-k", "--serving_key", default=SERVING_KEY, help="name of the signature")
    chosen = parser.parse_args(arguments)
    program = StableHLOGraphModule.load(chosen.input_dir)
    save_stablehlo_graph_as_tf(
        program, chosen.output_dir, chosen.serving_key, chosen.function_alias
    )
    sys.stdout.write(f"{chosen.input_dir}: saved to {chosen.output_dir}\n")
    return 0


def _inputs(function: StableHLOFunc) -> list[tuple[InputLocation, VariableSignature]]:
    """The caller's arguments in order, with those that the program does not take."""
    meta = function.meta
    used = zip(meta.input_locations, meta.input_signature, strict=True)
    given = [
        (place, signature)
        for place, signature in (*used, *meta.unused_inputs)
        if place.type_ is VariableType.INPUT_ARG and signature.dtype != "NoneType"
    ]
    return sorted(given, key=lambda pair: pair[0].position)


def _argument(
    place: InputLocation,
    args: Sequence[Operand],
    places: Mapping[int, int],
    held: StableHLOModelBundle,
) -> object:
    if place.type_ is VariableType.INPUT_ARG:
        return args[places[place.position]]
    if place.type_ is VariableType.CONSTANT:
        return held.additional_constants[place.position]
    return held.state_dict[place.name]


def _shape(signature: VariableSignature) -> list[int | None]:
    return [None if i in signature.dynamic_dims else n for i, n in enumerate(signature.shape)]


def _variable_name(name: str) -> str:
    """``name`` changed to one that TensorFlow allows at the outermost scope."""
    cleaned = re.sub(r"[^\w.\\/>-]", "_", name)
    return cleaned if re.match(r"[A-Za-z0-9.]", cleaned) else f"k{cleaned}"
