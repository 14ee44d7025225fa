"""What a user may choose about an export."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass
class StableHLOExportOptions:
    """Choices for exporting and saving a model.

    ``include_human_readable_text``: keep the program as text, too.
    ``override_tracing_arguments``, ``override_tracing_kwargs``: the arguments that the traced sizes in
    signatures come from, in place of those that the model was exported with; they must fit it.
    ``save_weights``: write the weights when the bundle is saved.
    ``inline_all_constant``: False makes the numbers in the model's code (all but 0 and 1) arguments of
    the program, saved under ``constants``.
    ``export_weights``: False leaves the weights out of the bundle.
    ``custom_ops_allowed_in_graph``: namespaces of operators (``{"mylib"}``) that become ``custom_call``
    operations under their names.
    ``export_node_metadata``: give operations the FX node's metadata (module, source line) as location.
    ``return_mutations``: have the program also give the new values of the buffers and inputs that
    the model writes to: its result is then ``(result, {name: value})``. Each call begins with the saved values.
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
