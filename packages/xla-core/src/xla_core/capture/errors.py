"""The error for steps that cannot be captured, or can no longer be replayed, with its messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from xla_core.torch_bridge.operands import Operand

MSG_READ: Final = (
    "a captured step reads a value (.item(), print, .cpu(), a condition on a tensor) or syncs; return the "
    "tensor and read it outside"
)
MSG_RUNS: Final = (
    "{name}: the step calls a program that was compiled before (a function of torch.compile, another captured "
    "function); a replay would not run it. Capture the uncompiled function, or make the call outside the step"
)
MSG_NOT_STABLE: Final = (
    "{name}: two calls in a row recorded different programs: {got} where there was {expected}. A captured "
    "step must do the same every time"
)
MSG_FLOAT: Final = (
    "{name}: a Python number in operator {operator} was {old!r} in one call and is {new!r} in the next; a "
    "replay would repeat one of the two. Pass the number as a tensor: an argument, or a tensor that you fill_()"
)
MSG_OTHER_TENSOR: Final = (
    "{name}: the step uses a tensor of {meta} that was another object in the previous call. Write into the "
    "tensor (copy_) instead of replacing it, or pass it as an argument"
)
MSG_HOST_VALUE: Final = (
    "{name}: the step copies a tensor of {meta} from the host, with another value in each call. Make the "
    "tensor outside and pass it as an argument"
)
MSG_HOST_WRITE: Final = (
    "{name}: the step copies a value from the host to the device and then computes nothing with it; a replay "
    "would not copy it. Pass the value as an argument"
)
MSG_KEPT: Final = (
    "{name}: the step keeps a new tensor of {meta} in an attribute, a list or a variable; a replay would not. "
    "Return the tensor, or copy it (copy_) into one that existed before the step"
)
MSG_RESULT: Final = (
    "{name}: the step returns {got}, which differs from call to call; only tensors that the step computes on "
    "{device} may differ"
)
MSG_CLASS: Final = (
    "{name}: the step returns a tensor of the class {cls}; a replay returns plain tensors. Return "
    ".as_subclass(torch.Tensor), and convert the result to {cls} outside"
)
MSG_SIDE_EFFECT: Final = (
    "{name}: the step changes {what} from {old} to {new}; a replay would not. Do it "
    "outside the step"
)
MSG_REBOUND: Final = (
    "{name}: the step sets {what} to another tensor; a replay would not. Write into the present tensor "
    "(copy_), or return the new one"
)
MSG_PRINTS: Final = "{name}: the step prints; a replay would not. Return what you want to print"
MSG_CLOSURE: Final = (
    "{name}: the step adds a step closure; a replay would not. Call the function outside the step"
)
MSG_RANDOM: Final = (
    "{name}: the step sets a random state or draws from a torch.Generator; a replay advances only the "
    "device's own random state. Set random states outside the step"
)
MSG_OPTIMIZER: Final = (
    "{name}: {optimizer} changes {what} in its step; a replay cannot: {why}. Construct the optimizer with "
    "capturable=True, or pass a tensor as its lr"
)
MSG_OPTIMIZER_STEPS: Final = (
    "{name}: the number of optimizer steps differs from call to call; it must be the "
    "same in every call"
)
MSG_HYPERPARAMETER: Final = (
    "{name}: {key} of {optimizer} was {old!r} when the step was recorded and is now {new!r}; the recorded "
    "program contains it as a constant. Call reset() to record the step again"
)
MSG_NO_NUMBER: Final = (
    "{key} of an optimizer was a Python number when the step was recorded and is now a {got}; call reset() to "
    "record the step again"
)
MSG_SCHEDULE: Final = (
    "{name}: the step passes an argument to {scheduler}.step(); a replay would not know its value. Call "
    "{scheduler}.step() outside the captured function"
)
MSG_RATE: Final = (
    "{name}: the step reads {what}, and steps a schedule that changes it; a replay would go on with the value "
    "that was recorded. Read it outside the captured function"
)
MSG_DEVICES: Final = (
    "{name}: the step also records on {other}; capture one function for each device"
)
MSG_ALIASES: Final = (
    "{name}: two arguments share memory, or an argument is a tensor that the step itself uses; this was not so "
    "when the step was recorded. Pass a clone()"
)
MSG_CHANGED: Final = (
    "{name}: {what} was {old} when the step was recorded and is now {new}. Set it back, or call reset() to "
    "record the step again"
)
MSG_REPLACED: Final = (
    "{name}: {what} is no longer the tensor that was recorded, and a replay would go on with the old one. Write "
    "into the old tensor instead (copy_, load_state_dict), or call reset() to record the step again"
)
MSG_OTHER_OBJECT: Final = (
    "{name}: {what} is no longer the object ({kind}) that it was when the step was recorded. Pass what the step "
    "reads of it as an argument, or call reset() to record the step again"
)
MSG_STATE: Final = (
    "{name}: what {optimizer} keeps for its parameters (optimizer.state) is no longer in the tensors that were "
    "recorded, and a replay would go on with the old ones. Write into the old tensors instead (copy_), or call "
    "reset() to record the step again"
)
MSG_COUNTS: Final = (
    "{name}: the counts of steps that {optimizer} keeps for its parameters differ from each other otherwise than "
    "when the step was recorded, and numbers that depend on them were recorded for several parameters at once. "
    "Call reset() to record the step again"
)
MSG_HOOKS: Final = "{name}: {what} has other hooks than when the step was recorded. Call reset() to record it again"
MSG_ARGUMENT_GRADIENT: Final = (
    "{name}: the step sets the gradient of an argument; a replay would not. Return what "
    "torch.autograd.grad() gives for the argument instead"
)
MSG_RESULT_GRADIENT: Final = (
    "{name}: the step returns a tensor of {meta} that it made and gave a gradient; the result of a replay would "
    "have none. Return the gradient, too"
)
MSG_GRADIENT: Final = (
    "{name}: other ones of the parameters have gradients now than had when the step was recorded. Call reset() to "
    "record it again"
)
MSG_GRADIENT_CHANGE: Final = (
    "{name}: the step gave a parameter of {shape} a new gradient, cleared it or left it as it was in one call, and "
    "did something else of these in the next; a replay would repeat one of the two. Do the same in every call"
)
MSG_GRADIENT_KIND: Final = (
    "{name}: the gradient of a parameter of {shape} is not a tensor of the kind that was recorded ({expected}), "
    "but of another kind, or a view. Set it to such a tensor, or call reset() to record the step again"
)
MSG_MANY: Final = (
    "{name}: {count} recordings have been made for different arguments, or for parameters with and without "
    "gradients, as many as max_recordings allows. Pass numbers as tensors and pad to few shapes, or raise "
    "max_recordings"
)
MSG_HOST_CHANGED: Final = (
    "{name}: {what}, which is on the host, has changed since the step was recorded; the recorded program contains "
    "its old value as a constant. Pass it as an argument, or call reset() to record the step again"
)
MSG_HOST_WRITTEN: Final = (
    "{name}: the step writes to {what}, which is on the host; a replay would not. Move it to the device, or "
    "write to it outside the step"
)
MSG_REACHES: Final = (
    "{name}: the step's code can reach more than {most} objects through the attributes that it names, too many "
    "to watch for changes. Pass what the step reads of them as arguments"
)
MSG_CHECK: Final = (
    "{name}: the step was recorded again, as a check, and differs from the replayed one: {why}"
)
MSG_CHECK_VALUE: Final = "result {number} of {meta} has another value"
MSG_CHECK_OPTION: Final = "{option} is {got!r}; give a whole number of at least {least}"
MSG_DONATION: Final = (
    "{name}: a captured step cannot donate buffers by alias_with_buffer_donor_config; it already reuses the "
    "memory of what it overwrites"
)
MSG_NEW_STATE: Final = (
    "{name}: {optimizer} creates its state in the step, and each replay would create it anew. Let the optimizer "
    "take one step before the captured one"
)
MSG_NOT_RECORDED: Final = (
    "nothing has been recorded yet: run the block of torch_xla's graph() first"
)
MSG_NO_PROGRAM: Final = "{name}: the step computes nothing on {device}; there is nothing to replay"


class CaptureError(RuntimeError):
    """A step cannot be captured, or a call would no longer do what was recorded.

    ``line`` is the file and the line of the user's program that is the reason, or None if it is not known.
    """

    def __init__(self, reason: str, line: tuple[str, int] | None = None) -> None:
        text = reason if line is None else f"{reason} ({line[0]}:{line[1]})"
        super().__init__(text)
        self.line = line


class OtherGradientsError(CaptureError):
    """A recording expects other ones of ``parameters`` to have a gradient; another recording may fit."""

    def __init__(self, name: str, parameters: Sequence[Operand]) -> None:
        super().__init__(MSG_GRADIENT.format(name=name))
        self.parameters = parameters


def refuse(message: str, line: tuple[str, int] | None = None, /, **details: object) -> CaptureError:
    """Make the error with this message; the caller raises it."""
    return CaptureError(message.format(**details), line)
