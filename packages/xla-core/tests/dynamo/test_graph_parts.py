"""Where a graph is cut is decided by the error that says that a value is needed, not by its words."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from torch_xla._dynamo.dynamo_bridge import extract_compiled_graph
from xla_core.dynamo.graph_partition import MSG_UNREADABLE


def reads(x):
    return x * x.sum().item()


calls = []


def complains(x):
    calls.append(x)
    raise RuntimeError(f"in the user's words: {MSG_UNREADABLE}")


fx.wrap("reads")
fx.wrap("complains")


def graph_of(function):
    graph = fx.Graph()
    x = graph.placeholder("x")
    middle = graph.call_function(function, (graph.call_function(torch.sin, (x,)),))
    graph.output((graph.call_function(torch.cos, (middle,)),))
    return fx.GraphModule(torch.nn.Module(), graph)


def test_a_graph_is_cut_where_a_value_is_read():
    x = torch.arange(4.0)
    (found,) = extract_compiled_graph(graph_of(reads), [x.to("xla")])(x.to("xla"))
    torch.testing.assert_close(found.cpu(), torch.cos(reads(torch.sin(x))))


def test_an_error_of_the_same_words_is_an_error():
    with pytest.raises(RuntimeError, match="in the user's words"):
        extract_compiled_graph(graph_of(complains), [torch.arange(4.0).to("xla")])
    assert len(calls) == 1  # nobody looked for another way
