"""Every private name of torch that the project uses, in one place. Seen in torch 2.11 to 2.15.

Those of torch.distributed are in ``torch_distributed_private``. The device guard is in ``device_guard``, which
must be importable on its own.
"""

from __future__ import annotations

import contextvars
import ctypes
import functools
import importlib
import sys
from collections.abc import Callable, Mapping
from types import FrameType, ModuleType
from typing import Any, Final, TypeVar

import torch
from torch import _tensor_str
from torch.utils import _foreach_utils, _python_dispatch

from xla_core.support import own_packages
from xla_core.support.once import Once
from xla_core.torch_bridge import error_texts
from xla_core.torch_bridge.operands import Operand

_INTERNAL: Final = frozenset({"torch", *own_packages.IMPORT_NAMES})

disabled_torch_function = torch._C._disabled_torch_function_impl  # torch 2.13

# A context manager inside which no class's __torch_function__ is called (torch 2.11 to 2.15).
without_torch_function = torch._C.DisableTorchFunctionSubclass

# Makes a tensor without memory whose device and dispatch keys are real: ``make_wrapper(kind, shape, strides,
# offset, memory_format, dtype, layout, device)``. By position, since by name takes a quarter longer (torch 2.11
# to 2.15).
make_wrapper = torch.Tensor._make_wrapper_subclass

# The same C++ tensor as one of a class, whose __torch_dispatch__ gets its operators (torch 2.13).
as_subclass = torch.Tensor._make_subclass

_data = (
    torch._C.TensorBase.data if hasattr(torch._C, "TensorBase") else torch.Tensor.data
)  # torch 2.13


# The number of the backward pass that the calling thread works for, -1 outside of one (torch 2.13).
current_backward = torch._C._current_graph_task_id


def context_of_backward() -> contextvars.Context | None:
    """The context in which the backward pass was called that this thread works for (torch 2.13)."""
    # every torch of the range has the two functions; None where its engine hands on no context
    key = "context"
    return torch._C._get_obj_in_tls(key) if torch._C._is_key_in_tls(key) else None


def after_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the backward pass ends that the calling thread works for (torch 2.13)."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def saved_tensors_have_hooks() -> bool:
    """Whether the calling thread is inside ``saved_tensors_hooks``, as checkpointed functions are (torch 2.13)."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


# The number that autograd will give to the next node of this thread's graph (torch 2.13).
next_sequence: Callable[[], int] = torch._C._autograd._get_sequence_nr


def backward_sequence() -> int | None:
    """The sequence number of the backward node that this thread computes, None outside of backward."""
    node = torch._C._current_autograd_node()  # torch 2.13
    return None if node is None else int(node._sequence_nr())


def sequence_of(node: Any) -> int:
    """The number that autograd gave to a node of its graph; accumulators of gradients are the last."""
    return int(node._sequence_nr())  # torch 2.13


def get_data(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor.data`` as C++ computes it: a detached alias."""
    return _data.__get__(tensor)


# Gives a tensor the C++ metadata (shape, dtype) of another; the Python object stays. A function of C's.
set_data: Callable[[torch.Tensor, torch.Tensor], None] = _data.__set__

# ``tensor.requires_grad`` as C++ has it. Functions of C's.
get_requires_grad: Callable[[torch.Tensor], bool] = torch._C.TensorBase.requires_grad.__get__
set_requires_grad: Callable[[torch.Tensor, bool], None] = torch._C.TensorBase.requires_grad.__set__


F = TypeVar("F", bound=Callable[..., Any])


def _in_place_of(original: Callable[..., object]) -> Callable[[F], F]:
    """A decorator: the function stands where torch's ``original`` stood, so it is pickled under that name.

    It has no ``__wrapped__``, through which TorchScript would read the source of ``original`` instead.
    """

    def named(function: F) -> F:
        functools.update_wrapper(function, original, functools.WRAPPER_ASSIGNMENTS[:4], ())
        del function.__dict__["__wrapped__"]
        return function

    return named


def allow_list_kernels(tensor_class: type) -> None:
    """Let torch's optimizers use their ``foreach`` and ``fused`` forms for ``xla`` parameters."""
    # torch.optim hides its submodule behind a function of the same name
    modules: list[Any] = [_foreach_utils, importlib.import_module("torch.optim.optimizer")]
    # torch 2.13: both functions list device types; the optimizer module has them under its own names
    for name in ("_get_foreach_kernels_supported_devices", "_get_fused_kernels_supported_devices"):
        original = getattr(_foreach_utils, name)
        if "xla" not in original():
            listing_xla = _with_xla(original)
            for module in modules:
                setattr(module, name, listing_xla)
    for module in modules:
        if tensor_class not in module._foreach_supported_types:
            module._foreach_supported_types.append(tensor_class)
    _allow_capturable_lists()


def let_make_fx_take(tensor_class: type) -> None:
    """Let ``make_fx`` write down operators on tensors of a class that its function closes over.

    It leaves subclasses that it does not know to their own ``__torch_dispatch__``, and then loses what
    they do: the constants of a graph would be zeros in the place of results. ``torch.func.linearize`` is
    such a graph.
    """
    tracing: Any = importlib.import_module("torch.fx.experimental.proxy_tensor")
    # torch 2.11 to 2.15: looked up at each operator
    if tensor_class not in tracing.HANDLED_TYPES:
        tracing.HANDLED_TYPES = (*tracing.HANDLED_TYPES, tensor_class)


def _allow_capturable_lists() -> None:
    """Let ``capturable=True`` have its ``foreach`` form too, which is the default one."""
    name = "_get_capturable_supported_devices"  # torch 2.13: lists xla for single tensors only
    listed = getattr(sys.modules["torch.optim.optimizer"], name)
    listing_xla = _capturable_with_xla(listed)
    for module_name, module in list(sys.modules.items()):
        # each optimizer's module has it under its own name
        if module_name.startswith("torch.optim.") and getattr(module, name, None) is listed:
            setattr(module, name, listing_xla)


# TorchScript compiles this one when torch.distributed.optim is imported. It reads the source, so this is
# a function, not a lambda, and says its types.
def _capturable_with_xla(listed: Callable[[bool], list[str]]) -> Callable[..., list[str]]:
    @_in_place_of(listed)
    def _get_capturable_supported_devices(supports_xla: bool = True) -> list[str]:
        return listed(True)

    return _get_capturable_supported_devices


def _with_xla(listed: Callable[[], list[str]]) -> Callable[[], list[str]]:
    @_in_place_of(listed)
    def _get_kernels_supported_devices() -> list[str]:
        return [*listed(), "xla"]

    return _get_kernels_supported_devices


_libraries: list[torch.library.Library] = []  # a library's registrations end with the object


def register_factory_fallback(function: Any) -> None:
    """Call ``function(overload, *args, **kwargs)`` for operators that reach the XLA key itself."""
    if _libraries:
        return
    library = torch.library.Library("_", "IMPL")
    library.fallback(function, "XLA")  # torch 2.13
    # torch.tensor(data, device='xla') does the first two below the Python key, where a fallback that
    # gets a tensor subclass is not found. The third, which would be a view of an empty tensor, is how
    # torch.empty_like(on_meta, device='xla') arrives, as Module.to_empty() calls it.
    below = torch.library.Library("aten", "IMPL")
    aten = torch.ops.aten
    for overload in (
        aten._copy_from.default,
        aten._local_scalar_dense.default,
        aten.empty_permuted.default,
        # torch.tensor(data, device='xla') below a TorchDispatchMode (make_fx, a profiler): C++ then looks
        # for a function of this very operator, and ends in an internal assert where there is none
        aten.empty.memory_format,
        aten.empty_strided.default,
        *_defined_by_others(),
    ):
        below.impl(overload, functools.partial(function, overload), "XLA")
    _libraries.extend((library, below))


# torch 2.13: C++ defines these by others, and has their out= written through a reshaped alias of it, for
# which it needs memory (windows of Kaiser by a kernel of the CPU's). With a kernel of our own they arrive whole.
_RESHAPING: Final = ("chain_matmul", "inner", "kaiser_window", "kron", "linalg_matmul", "linalg_matrix_rank",
                     "linalg_multi_dot", "matmul", "tensordot")  # fmt: skip


def _defined_by_others() -> list[object]:
    packets = [getattr(torch.ops.aten, name) for name in _RESHAPING]
    forms = [getattr(packet, name) for packet in packets for name in packet.overloads()]
    return [f for f in forms if "window" in str(f) or any(a.is_out for a in f._schema.arguments)]


# torch 2.13: the key between the caller and autograd while torch.autocast('xla') is on
_AUTOCAST: Final = torch._C.DispatchKeySet(torch._C._parse_dispatch_key("AutocastXLA"))


_autocast: Final = Once()


def without_autocast() -> Any:
    """A context manager inside which ``torch.autocast('xla')`` casts nothing."""
    return torch._C._ExcludeDispatchKeyGuard(_AUTOCAST)  # torch 2.13


def register_autocast(kernels: Mapping[object, Callable[..., object]]) -> None:
    """Call ``kernels[overload]`` for these operators while autocast is on, and leave the others alone."""
    if not _autocast.begin():
        return
    library = torch.library.Library("_", "IMPL")
    library.fallback(torch.library.fallthrough_kernel, "AutocastXLA")
    casts = torch.library.Library("aten", "IMPL")
    for overload, kernel in kernels.items():
        casts.impl(overload, kernel, "AutocastXLA")
    _libraries.extend((library, casts))


_seeded: Final = Once()


def seed_with_torch(seed_all: Callable[[int], None]) -> None:
    """Let ``torch.manual_seed`` and ``torch.seed`` call ``seed_all(seed)`` too."""
    if not _seeded.begin():
        return
    # torch 2.13: the last of the functions with which they seed the devices that torch knows
    seed_custom = torch.random._seed_custom_device

    @_in_place_of(seed_custom)
    def seed_devices(seed: Any) -> None:
        seed_custom(seed)
        seed_all(int(seed))

    torch.random._seed_custom_device = seed_devices


GeneratorBase = torch._C.Generator  # torch 2.11 to 2.15: cannot be made for device xla


def make_generators_with(xla_generator: Callable[[Any], object]) -> None:
    """Let ``torch.Generator(device)`` be ``xla_generator(device)`` for ``xla`` devices.

    C++ makes all others, and asks a library that was linked in for those of XLA. ``torch.Generator`` stays a
    class: its instances and subclasses are those of torch's own.
    """
    if torch.Generator is not GeneratorBase:
        return

    class GeneratorType(type(GeneratorBase)):  # type: ignore[misc]
        def __call__(cls, device: Any = "cpu") -> Any:
            if cls is not Generator:
                return super().__call__(device)
            return (
                xla_generator(device)
                if torch.device(device).type == "xla"
                else GeneratorBase(device)
            )

        def __instancecheck__(cls, instance: object) -> bool:
            if cls is Generator:
                return isinstance(instance, GeneratorBase)
            return bool(super().__instancecheck__(instance))

        def __subclasscheck__(cls, other: Any) -> bool:
            if cls is Generator:
                return issubclass(other, GeneratorBase)
            return bool(super().__subclasscheck__(other))

    class Generator(GeneratorBase, metaclass=GeneratorType):  # type: ignore[misc, valid-type]
        __doc__ = GeneratorBase.__doc__
        __module__ = "torch"  # generators of the CPU are pickled by the name of this class
        __qualname__ = "Generator"

    torch.Generator = Generator  # type: ignore[misc, assignment]


def register_device_module(module: ModuleType) -> None:
    """Make ``module`` known as ``torch.xla``, unless there is one (torch 2.13)."""
    if not hasattr(torch, "xla"):
        torch._register_device_module("xla", module)


MSG_LATE_BACKWARD: Final = (
    "autograd counted its devices at this process's first backward pass, when the xla device was not there "
    "yet. Import torch_xla first, before any backward pass; or unset TORCH_DEVICE_BACKEND_AUTOLOAD, and the "
    "device registers itself at import torch"
)


def explain_late_backward() -> None:
    """Say in the error what to do when a backward pass ran before the device was registered.

    Nothing tells beforehand whether one did, and trying would start autograd's threads, after which
    a process must not fork.
    """
    # torch 2.11 to 2.15: defined in .graph, called under its name in torch.autograd; pickle looks in .graph
    run = torch.autograd.graph._engine_run_backward

    @_in_place_of(run)
    def explained(*args: Operand, **kwargs: object) -> Operand:
        try:
            return run(*args, **kwargs)
        except RuntimeError as error:
            if error_texts.is_backward_before_device(error):
                raise RuntimeError(MSG_LATE_BACKWARD) from error
            raise

    modules: tuple[Any, ...] = (torch.autograd, torch.autograd.graph)
    for module in modules:
        module._engine_run_backward = explained  # torch 2.11 to 2.15


def tensor_text(host: torch.Tensor, shown: torch.Tensor, name: str) -> str:
    """The text that torch prints for ``shown``, a ``name``, whose values are in the CPU tensor ``host``."""
    prefix = f"{name}("
    suffixes = [f"device='{shown.device}'"]
    if host.numel() == 0:
        if host.dim() != 1:
            suffixes.append(f"size={tuple(host.shape)}")
        body = "[]"
    else:
        body = _tensor_str._tensor_str(host, len(prefix))  # torch 2.13
    default = (torch.get_default_dtype(), torch.int64, torch.bool)
    if shown.dtype not in default or (host.numel() == 0 and shown.dtype != default[0]):
        suffixes.append(f"dtype={shown.dtype}")
    function = None if shown.is_leaf else shown.grad_fn
    if function is not None:
        suffixes.append(f"grad_fn=<{type(function).__name__}>")
    elif shown.requires_grad:
        suffixes.append("requires_grad=True")
    return _tensor_str._add_suffixes(prefix + body, suffixes, len(prefix), force_newline=False)


def asked_by_fake_tensors() -> bool:
    """Whether the caller of our caller is torch's code that makes fake tensors of real ones."""
    # torch 2.13: it hands the storage on to C++, as the object that torch itself made
    return sys._getframe(2).f_globals.get("__name__") == "torch._subclasses.meta_utils"


def asked_by_autograd() -> bool:
    """Whether autograd itself called the operator in a backward pass, and not a function of a user's in it.

    Between the two are frames of torch's Python code and of ours. Nothing is below autograd's in its own threads.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module == "torch.autograd.graph" and frame.f_code.co_name == "_engine_run_backward":
            return True  # torch 2.11 to 2.15: it calls the engine
        # a user's dispatch mode hands on what autograd calls
        if (
            module.partition(".")[0] not in _INTERNAL
            and frame.f_code.co_name != "__torch_dispatch__"
        ):
            return False
        frame = frame.f_back
    return True


# -- torch.compile ----------------------------------------------------------------------------------


_waiting_for_dynamo: dict[Callable[[], None], None] = {}


def when_dynamo_is_used(prepare: Callable[[], None]) -> None:
    """Call ``prepare()`` before Dynamo looks at anything: now, or at the first ``torch.compile``."""
    # importing Dynamo takes a second or two, which programs without torch.compile need not spend
    if "torch._dynamo" in sys.modules:
        prepare()
        return
    first = not _waiting_for_dynamo
    _waiting_for_dynamo[prepare] = None
    if not first:
        return
    original = torch.compile

    @functools.wraps(original)
    def compile(*args: Operand, **kwargs: object) -> Any:
        torch.compile = original
        for one in _waiting_for_dynamo:
            one()
        return original(*args, **kwargs)

    torch.compile = compile


def let_dynamo_take(tensor_type: type) -> None:
    """Let Dynamo trace tensors of a class with the metaclass ``tensor_type`` like torch's own.

    Dynamo takes a subclass whose ``__torch_dispatch__`` is torch's disabled one; what is asked of
    the class while this thread compiles is answered so, and nothing else changes.
    """
    _while_dynamo_compiles(*_disguise(tensor_type))
    # torch 2.13: without this, what comes out of a graph would be cast to torch.Tensor
    builder: Any = importlib.import_module("torch._dynamo.variables.builder")
    infer = builder.infer_subclass_type

    def infer_subclass_type(value: Operand) -> object:
        return None if type(type(value)) is tensor_type else infer(value)

    builder.infer_subclass_type = infer_subclass_type
    # torch 2.13: writes to arguments stay in the graph, whose program can then reuse their memory
    backend = importlib.import_module("torch._dynamo.backends.torchxla").openxla
    backend.kwargs.setdefault("keep_inference_input_mutations", True)


def _disguise(tensor_type: type) -> tuple[Callable[[Operand], None], Callable[[Operand], None]]:
    """What to call where Dynamo begins to compile, so that the class passes for torch's own, and where it ends."""
    context = importlib.import_module("torch._guards").CompileContext  # torch 2.13
    disabled = torch._C._disabled_torch_dispatch_impl  # torch 2.13

    def seen_by_dynamo(cls: object) -> object:
        # Dynamo also runs real code while it compiles (an optimizer makes its state): tensors are then
        # made as always.
        asked_by = sys._getframe(1).f_globals.get("__name__", "")
        # So do operators of higher order when a graph is run to be compiled: torch._ops looks for handlers.
        of_torch = asked_by.startswith("torch.") and asked_by != "torch._ops"
        if of_torch and context.current_compile_id() is not None:
            return disabled
        return cls.__dict__["__torch_dispatch__"].__func__

    def start(_args: Operand) -> None:
        tensor_type.__torch_dispatch__ = property(seen_by_dynamo)  # type: ignore[attr-defined]

    def end(_args: Operand) -> None:
        if "__torch_dispatch__" in tensor_type.__dict__:
            del tensor_type.__torch_dispatch__  # type: ignore[attr-defined]

    return start, end


def _while_dynamo_compiles(
    start: Callable[[Operand], None], end: Callable[[Operand], None]
) -> None:
    """Call ``start`` and ``end`` around each compilation, also after ``torch._dynamo.reset()``."""
    callbacks = importlib.import_module("torch._dynamo.callback").callback_handler  # torch 2.13
    clear = callbacks.clear

    def register() -> None:
        callbacks.register_start_callback(start)
        callbacks.register_end_callback(end)

    def clear_others() -> None:
        clear()
        register()

    register()
    callbacks.clear = clear_others  # torch._dynamo.reset() clears all callbacks


def dynamo_backend(name: str) -> Callable[..., Any]:
    """A backend of ``torch.compile`` by its name (torch 2.9: ``torch._dynamo.lookup_backend``)."""
    backend: Callable[..., object] = importlib.import_module("torch._dynamo").lookup_backend(name)
    return backend


def without_dispatch_modes() -> Any:
    """A context manager inside which no TorchDispatchMode is on, torch.compile's own included.

    The one that it has on at a graph's first run refuses operators of higher order on tensor subclasses.
    """
    return _python_dispatch._disable_current_modes()  # torch 2.13


_malloc_trim: Any = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, musl has not


def release_free_memory() -> None:
    """Give memory that is free inside this process back to the system, where the C library can.

    glibc keeps freed blocks of up to 32 MB for later ones of other sizes: they add up.
    """
    if _malloc_trim is not None:
        _malloc_trim(0)
