"""What AOTAutograd says of the graphs that it makes, and how graphs run on ``xla`` tensors, with it and without.

And what Dynamo leaves alone beside graphs.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from torch import fx
from torch.utils import _pytree as pytree

from xla_core.torch_bridge.operands import Operand

_DESCRIPTORS = "torch._functorch._aot_autograd.descriptors"  # torch 2.11 to 2.15
_CHECK: Final = "aten::_linalg_check_errors"

MSG_NOT_RECORDED: Final = (
    "{operator} of an xla tensor was called while __torch_dispatch__ is turned off, so nothing can record it; "
    "call it outside of torch._C._DisableTorchDispatch()"
)

MSG_INDUCTOR: Final = (
    "inductor, torch.compile's default backend, has no code for xla tensors; compile for this device with "
    'torch.compile(..., backend="openxla")'
)

F = TypeVar("F", bound=Callable[..., Any])

# torch 2.11 to 2.15: sets what is called for each Python frame of this thread, and returns what was
_set_frame_callback: Final = torch._C._dynamo.eval_frame.set_eval_frame

_libraries: list[torch.library.Library] = []  # a library's registrations end with the object


def untraced(function: F) -> F:
    """A decorator: Dynamo does not trace what ``function`` calls.

    Where a compiled function calls an operator outside of a graph, Dynamo looks at each Python frame, jax's and
    plugins' included: it would compile those too, and jax does not work inside of that.
    """

    @functools.wraps(function)
    def call(*args: Operand, **kwargs: Any) -> Any:
        callback = _set_frame_callback(None)
        try:
            return function(*args, **kwargs)
        finally:
            _set_frame_callback(callback)

    return call  # type: ignore[return-value]


def step_over_code(packages: Sequence[str], traced: Sequence[str], inlined: Sequence[str]) -> None:
    """Have Dynamo step over the code of ``packages`` and ``inlined``.

    It still traces the modules ``traced`` of ``packages``, and what a compiled function calls of ``inlined``.
    """
    rules: Any = importlib.import_module("torch._dynamo").trace_rules
    _skip_code(rules, (*packages, *inlined), traced)
    _inline_code(rules, inlined)


def _skip_code(rules: Any, packages: Sequence[str], traced: Sequence[str]) -> None:
    """Have Dynamo step over the code of ``packages`` except that of the modules ``traced``."""
    # torch 2.11 to 2.15: files are skipped by how their paths begin
    ours: list[str] = []
    for folder in _folders(packages):
        kept = [
            folder.parent.joinpath(*module.split(".")).with_suffix(".py")
            for module in traced
            if module.startswith(f"{folder.name}.")
        ]
        ours.extend(_around(folder, kept))
    rules.SKIP_DIRS.extend(ours)
    rules.SKIP_DIRS_RE = _Skipped(rules.SKIP_DIRS_RE, tuple(ours))


class _Skipped:
    """A pattern that also matches paths that begin in certain ways.

    The pattern that Dynamo would make of all of them takes 20 ms.
    """

    def __init__(self, pattern: re.Pattern[str], beginnings: tuple[str, ...]) -> None:
        self.pattern, self.beginnings = pattern, beginnings

    def match(self, path: str) -> object:
        return path.startswith(self.beginnings) or self.pattern.match(path)


def _inline_code(rules: Any, packages: Sequence[str]) -> None:
    """Have Dynamo trace the code of ``packages`` where a compiled function calls it; elsewhere it steps over it."""
    # torch 2.11 to 2.15: how the paths of files begin that are skipped as frames and not as callees.
    # init_process_group clears the cache.
    original = rules.get_mod_inlinelist.__wrapped__
    ours = frozenset(f"{folder}/" for folder in _folders(packages))
    rules.get_mod_inlinelist = functools.cache(lambda: original() | ours)


def _folders(packages: Sequence[str]) -> Iterator[Path]:
    """Where those of ``packages`` are that are installed. None is imported for it."""
    for package in packages:
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            yield Path(spec.origin).parent


def _around(folder: Path, kept: Sequence[Path]) -> Iterator[str]:
    """How the paths of all files in ``folder`` begin that are not among ``kept``."""
    for path in sorted(folder.iterdir()):
        if path.is_dir() and any(path in file.parents for file in kept):
            yield from _around(path, kept)
        elif path not in kept:
            yield f"{path}/" if path.is_dir() else str(path.with_suffix(""))


def merged_arguments(model: fx.GraphModule) -> list[str]:
    """The inputs of a graph that stand for several arguments, which share memory and are written to."""
    of = importlib.import_module(_DESCRIPTORS)
    merged = (of.ViewBaseAOTInput, of.SyntheticBaseAOTInput)
    return [
        n.name
        for n in model.graph.nodes
        if n.op == "placeholder" and isinstance(n.meta.get("desc"), merged)
    ]


def written_after(model: fx.GraphModule) -> set[object]:
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
    refusal: type[Exception], of_graph: type[Exception], on_plain_run: Callable[[], None]
) -> None:
    """Let the backend ``openxla`` run Dynamo's graph as it is where its compiled form raises ``refusal``.

    After ``of_graph``, a kind of it, the compiled form is not tried again. ``on_plain_run()`` is called before
    each such run. Dynamo's graph has the operators in the order of the user's function, writes in place included.
    """
    # torch 2.11 to 2.15: an object, which the registry of backends and the module share
    backend = importlib.import_module("torch._dynamo.backends.torchxla").openxla

    class WithPlainRuns(type(backend)):  # type: ignore[misc]
        def __call__(self, gm: Any, example_inputs: object, **kwargs: object) -> Callable[..., Any]:
            _keep_true_strides(gm)
            compiled = super().__call__(gm, example_inputs, **kwargs)

            def run(*args: Operand) -> Operand:
                nonlocal compiled
                if compiled is not None:
                    try:
                        return compiled(*args)
                    except of_graph:
                        compiled = None
                    except refusal:
                        pass
                on_plain_run()
                return gm(*args)

            return run

    backend.__class__ = WithPlainRuns


# The position of the offset among the arguments of what makes windows in Dynamo's graphs.
_WINDOWS: Final = {
    "as_strided": 3, "as_strided_": 3, torch.as_strided: 3, torch.as_strided_copy: 3,
    torch.as_strided_scatter: 4,
}  # fmt: skip


def _keep_true_strides(gm: Any) -> None:
    """Write offsets into a graph where ``as_strided`` has none.

    Tensors that stand in for those of the device have true strides, except for the graph's arguments. Without an
    offset, strides would count as those that the device's tensors report (``strided_gradients``).
    """
    changed = False
    for node in gm.graph.nodes:
        position = _WINDOWS.get(node.target)
        if position is None or len(node.args) > position or "storage_offset" in node.kwargs:
            continue
        seen = node.args[0] if node.args else node.kwargs.get("input")
        if getattr(seen, "op", "placeholder") != "placeholder":
            offset = int(seen.meta["example_value"].storage_offset())  # torch 2.11 to 2.15
            node.kwargs = {**node.kwargs, "storage_offset": offset}
            changed = True
    if changed:
        gm.recompile()


def run_effects_in_order(tensor_class: type) -> None:
    """Let operators with side effects (a check of a result) run in graphs on tensors of a class."""
    # torch 2.11 to 2.15: graphs pass a token from one such operator to the next
    effects: Any = importlib.import_module("torch._higher_order_ops.effects")
    if effects._get_effect(_CHECK) is None:  # torch 2.11: graphs lose it, as it has no result
        effects._register_effectful_op(_CHECK, effects._EffectType.ORDERED)

    def run(token: Any, op: Any, *args: Operand, **kwargs: Any) -> tuple[Operand, ...]:
        results = op(*args, **kwargs)
        several = isinstance(results, tuple)
        return (token, *results) if several else (token, results)

    effects.with_effects.py_impl(tensor_class)(run)


def run_writing_operators(tensor_class: type) -> None:
    """Let graphs call custom operators that write to arguments (``mutates_args``) on tensors of a class."""
    # torch 2.11 to 2.15: graphs give them copies to write to, which become results
    module: Any = importlib.import_module("torch._higher_order_ops.auto_functionalize")
    module.auto_functionalized.py_impl(tensor_class)(module.auto_functionalized_dense)
    module.auto_functionalized_v2.py_impl(tensor_class)(module.auto_functionalized_v2_dense)


def refuse_inductor(device_type: str) -> None:
    """Let the backend ``inductor`` say what to use for arguments on a device for which it generates no code."""
    wrapper: Any = torch._TorchCompileInductorWrapper  # torch 2.11 to 2.15
    compile_graph = wrapper.__call__

    @functools.wraps(compile_graph)
    def __call__(self: object, model_: object, inputs_: Any, **options: object) -> Any:
        if any(isinstance(i, torch.Tensor) and i.device.type == device_type for i in inputs_):
            raise RuntimeError(MSG_INDUCTOR)
        return compile_graph(self, model_, inputs_, **options)

    wrapper.__call__ = __call__


def number_stand_ins(device_type: str, current_index: Callable[[], int]) -> None:
    """Let stand-ins of what ``device=device_type`` makes in a graph be on the current device, as those of cuda are.

    Without a number they count as on another device than the graph's arguments.
    """
    stand_in: Any = importlib.import_module("torch._subclasses.fake_tensor").FakeTensor
    normalize = getattr(stand_in, "_normalize_fake_device", None)  # torch 2.13
    if normalize is None:
        return

    @functools.wraps(normalize)
    def _normalize_fake_device(device: torch.device) -> Any:
        if device.type == device_type and device.index is None:
            return torch.device(device_type, current_index())
        return normalize(device)

    stand_in._normalize_fake_device = staticmethod(_normalize_fake_device)


def let_first_runs_pass(tensor_class: type) -> None:
    """Let operators of higher order reach tensors of a class in the first run of a compiled graph.

    A mode is on then that looks for aliases among the results of custom operators. It leaves subclasses that
    it does not know to themselves by returning NotImplemented, which counts as the result of these operators.
    """
    wrappers = importlib.import_module("torch._functorch._aot_autograd.runtime_wrappers")
    mode = getattr(wrappers, "_AnalyzeCustomOpInputOutputMode", None)  # torch 2.11 to 2.15
    if mode is None:
        return
    dispatch = mode.__torch_dispatch__

    @functools.wraps(dispatch)
    def __torch_dispatch__(
        self: object, func: Any, types: object, args: Operand = (), kwargs: Any = None
    ) -> Any:
        if isinstance(func, torch._ops.HigherOrderOperator) and any(
            isinstance(a, tensor_class) for a in pytree.tree_leaves((args, kwargs))
        ):
            return func(*args, **(kwargs or {}))  # the mode is off while it is asked
        return dispatch(self, func, types, args, kwargs)

    mode.__torch_dispatch__ = __torch_dispatch__


def let_stand_ins_change_shape(tensor_class: type) -> None:
    """Let views in place (``t_``, ``unsqueeze_``, ...) reach the stand-ins with which graphs are made.

    AOTAutograd's functional tensors call ``as_strided_`` of themselves, below the key of ``__torch_dispatch__``,
    to get a new shape. PyTorch has a kernel for that which changes sizes and strides alone, for the keys of all
    devices but this one. Tensors of ``tensor_class`` have memory, and are refused.
    """
    if _libraries:
        return
    change = torch.ops.aten.as_strided_.default
    key_with_kernel = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)  # torch 2.11 to 2.15

    def as_strided_(
        tensor: torch.Tensor, size: object, stride: object, storage_offset: object = None
    ) -> torch.Tensor:
        if isinstance(tensor, tensor_class):
            raise RuntimeError(MSG_NOT_RECORDED.format(operator="as_strided_"))
        return change.redispatch(key_with_kernel, tensor, size, stride, storage_offset)  # type: ignore[no-any-return]

    library = torch.library.Library("aten", "IMPL")
    library.impl(change, as_strided_, "XLA")
    _libraries.append(library)
