"""``GraphInputMatcher``: which of a recorded program's inputs are a call's arguments."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from xla_core.torch_bridge.operands import Operand


class GraphInputMatcher:
    """Gives, for the arguments of a call, what a recorded program takes in their place, in its order.

    The program's inputs are told by ids: one that ``tensor_id_to_arg_idx`` knows is the argument of that
    number; any other is its value of when it was recorded, which the graph itself holds.
    ``xla_args_tensor_id`` are the ids of arguments, whose values are not kept.
    """

    __slots__ = ("arg_idxs", "graph_input_tensor_ids", "graph_input_xla_values")

    def __init__(
        self,
        tensor_id_to_arg_idx: Mapping[int, int],
        graph_input_tensor_ids: Sequence[int],
        graph_input_xla_values: Sequence[Operand],
        xla_args_tensor_id: Collection[int],
    ) -> None:
        self.graph_input_tensor_ids = list(graph_input_tensor_ids)
        self.graph_input_xla_values = [
            None if number in xla_args_tensor_id else value
            for number, value in zip(graph_input_tensor_ids, graph_input_xla_values, strict=True)
        ]
        self.arg_idxs = [tensor_id_to_arg_idx.get(number) for number in graph_input_tensor_ids]

    def __call__(self, args: Sequence[Operand]) -> list[Operand]:
        """The arguments and kept values that the program takes, in its order."""
        return [
            value if number is None else args[number]
            for number, value in zip(self.arg_idxs, self.graph_input_xla_values, strict=True)
        ]
