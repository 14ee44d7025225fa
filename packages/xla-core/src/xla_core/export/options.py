"""The options of an export."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass
class StableHLOExportOptions:
    """Options for exporting and saving a model.

    ``include_human_readable_text``: also keep the program as text.
    ``override_tracing_arguments``, ``override_tracing_kwargs``: example arguments whose sizes are written into the
    signatures, in place of those that the model was exported with (default); they must fit the model.
    ``save_weights``: write the weights when the bundle is saved.
    ``inline_all_constant``: if False, the numbers in the model's code (except 0 and 1) become arguments of the
    program, and are saved under ``constants``.
    ``export_weights``: if False, the bundle has no weights.
    ``custom_ops_allowed_in_graph``: namespaces of operators (``{"mylib"}``) that become ``custom_call`` operations
    with the operators' names.
    ``export_node_metadata``: write the FX node's metadata (module, source line) into the location of operations.
    ``return_mutations``: also return the new values of the buffers and inputs that the model writes to; the result
    is then ``(result, {name: value})``. Each call starts from the saved values.
    """

    include_human_readable_text: bool = True
    override_tracing_arguments: tuple[object, ...] | None = None
    override_tracing_kwargs: Mapping[str, object] | None = None
    save_weights: bool = True
    inline_all_constant: bool = True
    export_weights: bool = True
    custom_ops_allowed_in_graph: set[str] = dataclasses.field(default_factory=set)
    export_node_metadata: bool = False
    return_mutations: bool = False
