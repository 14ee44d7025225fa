"""What AOTAutograd says of the graphs that it makes, and how the backend ``openxla`` runs a graph without it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch import fx

_DESCRIPTORS = "torch._functorch._aot_autograd.descriptors"  # torch 2.11 to 2.15


def merged_arguments(model: fx.GraphModule) -> list[str]:
    """The inputs of a graph that stand for several arguments, which share memory and are written to."""
    of = importlib.import_module(_DESCRIPTORS)
    merged = (of.ViewBaseAOTInput, of.SyntheticBaseAOTInput)
    return [
        n.name
        for n in model.graph.nodes
        if n.op == "placeholder" and isinstance(n.meta.get("desc"), merged)
    ]


def written_after(model: fx.GraphModule) -> set[Any]:
    """The descriptors of inputs to which the caller of a graph copies results of it."""
    updated = importlib.import_module(_DESCRIPTORS).InputMutationAOTOutput
    results = next(n for n in model.graph.nodes if n.op == "output").meta.get("desc")
    if not isinstance(results, (list, tuple)):
        return set()
    return {result.mutated_input for result in results if isinstance(result, updated)}


def kept_for_backward(model: fx.GraphModule) -> frozenset[int]:
    """The positions of results that only the backward graph gets."""
    of = importlib.import_module(_DESCRIPTORS)
    kept = (of.SavedForBackwardsAOTOutput, of.SavedForBackwardsNoVcCheckAOTOutput)
    results = next(n for n in model.graph.nodes if n.op == "output").meta.get("desc")
    if not isinstance(results, (list, tuple)):
        return frozenset()
    return frozenset(i for i, result in enumerate(results) if isinstance(result, kept))


def run_plainly_after(
    refusal: type[Exception], of_graph: type[Exception], told: Callable[[], None]
) -> None:
    """Let the backend ``openxla`` run Dynamo's graph as it is where its compiled form raises ``refusal``.

    After ``of_graph``, a kind of it, the compiled form is not tried again. ``told()`` is called before each such
    run. Dynamo's graph has the operators in the order of the user's function, writes in place included.
    """
    # torch 2.11 to 2.15: an object, which the registry of backends and the module share
    backend = importlib.import_module("torch._dynamo.backends.torchxla").openxla

    class WithPlainRuns(type(backend)):  # type: ignore[misc]
        def __call__(self, gm: Any, example_inputs: Any, **kwargs: Any) -> Callable[..., Any]:
            compiled = super().__call__(gm, example_inputs, **kwargs)

            def run(*args: Any) -> Any:
                nonlocal compiled
                if compiled is not None:
                    try:
                        return compiled(*args)
                    except of_graph:
                        compiled = None
                    except refusal:
                        pass
                told()
                return gm(*args)

            return run

    backend.__class__ = WithPlainRuns
