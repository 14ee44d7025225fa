"""What a process that measures runs: ``main(REQUEST, RESULT)``, the names of two files of JSON.

A request has a step, a topology, options, and either one ``mesh``, for which the step is compiled, or ``meshes``,
for which only the shapes of parameters are computed.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Final

from xla_core.contract.foreign_values import JsonObject, JsonValue
from xla_core.support.own_packages import IMPORT_NAMES
from xla_plan.steps.candidate import Candidate, Mesh
from xla_plan.steps.measure import measure, shapes

_NOT_THE_USERS: Final = frozenset(
    {*IMPORT_NAMES, "torch", "jax", "jaxlib"} | (sys.stdlib_module_names - {"__main__"})
)


def main(request: str, result: str) -> int:
    """Read the request, and write the figures or the error; returns the exit status."""
    question: dict[str, object] = json.loads(Path(request).read_text())
    try:
        answer = _answer(question)
    except Exception as error:
        traceback.print_exc()
        answer = {"error": described(error), "traceback": traceback.format_exc()}
    Path(result).write_text(json.dumps(answer))
    return int("error" in answer)


def described(error: BaseException) -> str:
    """An error in one line, with the innermost line of the user's code in its traceback."""
    text = f"{type(error).__name__}: {error}"
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        code = frame.f_code
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package and package not in _NOT_THE_USERS and code.co_filename != __file__:
            return f"{text} ({Path(code.co_filename).name}:{line}, in {code.co_name})"
    return text


def _answer(wanted: JsonObject) -> dict[str, object]:
    step, topology, options = wanted["step"], wanted["topology"], wanted["options"]
    if "meshes" in wanted:
        return shapes(step, [_mesh(m) for m in wanted["meshes"]], topology, options)
    return measure(
        step, Candidate(topology, _mesh(wanted["mesh"]), options), wanted.get("arguments", ())
    )


def _mesh(pairs: list[list[JsonValue]]) -> Mesh:
    return tuple((name, size) for name, size in pairs)
