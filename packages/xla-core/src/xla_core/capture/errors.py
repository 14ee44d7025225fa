"""The error for steps that cannot be captured, or can no longer be replayed, with its messages."""

from __future__ import annotations

from typing import Final

MSG_READ: Final = (
    "a captured step reads a value (.item(), print, .cpu(), a condition on a tensor) or syncs; return the "
    "tensor and read it outside"
)
MSG_RUNS: Final = (
    "{name}: a program runs inside the step (a graph of torch.compile, a captured function), which a replay "
    "would not run. Call what was compiled as it is, or outside"
)
MSG_NOT_STABLE: Final = (
    "{name}: two calls in a row recorded different programs: {got} where there was {expected}. A captured "
    "step must do the same every time"
)
MSG_FLOAT: Final = (
    "{name}: a Python number in operator {operator} was {old!r} in one call and is {new!r} in the next; a "
    "replay would repeat one of them. Pass it as a tensor (an argument, or one that you fill_())"
)
MSG_OTHER_TENSOR: Final = (
    "{name}: the step takes a tensor of {meta} that was another one in the call before. Write into it "
    "(copy_) instead of replacing it, or pass it as an argument"
)
MSG_HOST_VALUE: Final = (
    "{name}: a tensor of {meta} comes from the host inside the step, with another value in each call. Make "
    "it outside and pass it as an argument"
)
MSG_HOST_WRITE: Final = (
    "{name}: a value of the host is copied to the device inside the step and is not an operand there; a replay "
    "would not copy it. Pass it as an argument"
)
MSG_KEPT: Final = (
    "{name}: the step leaves a new tensor of {meta} behind (in an attribute, a list, a variable), which a "
    "replay would not. Return it, or write it into a tensor that was there before (copy_)"
)
MSG_RESULT: Final = (
    "{name}: the step returns {got}, which is not the same in every call; only tensors that it computes on "
    "{device} can differ"
)
MSG_CLASS: Final = (
    "{name}: the step returns a tensor of the class {cls}, a replay plain ones. Return "
    ".as_subclass(torch.Tensor), and make it a {cls} outside"
)
MSG_SIDE_EFFECT: Final = (
    "{name}: the step changes {what} (from {old} to {new}), which a replay would not. Do it outside"
)
MSG_REBOUND: Final = (
    "{name}: the step gives {what} another tensor, which a replay would not. Write into the one that is "
    "there (copy_), or return the new one"
)
MSG_PRINTS: Final = "{name}: the step prints, which a replay would not. Return what you want to see"
MSG_CLOSURE: Final = (
    "{name}: the step adds a step closure, which a replay would not. Call the function outside"
)
MSG_RANDOM: Final = (
    "{name}: the step sets a random state, or draws from a torch.Generator; a replay advances the "
    "device's own random numbers only. Seed outside"
)
MSG_OPTIMIZER: Final = (
    "{name}: {optimizer} changes {what} in its step, which a replay cannot: {why}. Make it with "
    "capturable=True, or pass a tensor as its lr"
)
MSG_OPTIMIZER_STEPS: Final = "{name}: optimizers take another number of steps in every call"
MSG_HYPERPARAMETER: Final = (
    "{name}: {key} of {optimizer} was {old!r} when the step was recorded and is {new!r}; it is a constant of "
    "the recorded program. Call reset() to record again"
)
MSG_NO_NUMBER: Final = (
    "{key} of an optimizer was a Python number when the step was recorded and is a {got}; call reset() to "
    "record the step again"
)
MSG_SCHEDULE: Final = (
    "{name}: {scheduler}.step() got an argument inside the step, which a replay would not know. Call it "
    "outside the captured function"
)
MSG_DEVICES: Final = "{name}: the step records on {other}, too; capture one for each device"
MSG_ALIASES: Final = (
    "{name}: two arguments share memory, or one is a tensor that the step holds itself; they did not when it "
    "was recorded. Pass a clone()"
)
MSG_CHANGED: Final = (
    "{name}: {what} was {old} when the step was recorded and is {new}. Set it back, or call reset() to record "
    "the step again"
)
MSG_REPLACED: Final = (
    "{name}: {what} is another tensor than the one that was recorded; the replay would go on with the old "
    "one. Write into it instead (copy_, load_state_dict), or call reset() to record the step again"
)
MSG_OTHER_OBJECT: Final = (
    "{name}: {what} is another object ({kind}) than when the step was recorded, or is gone. Pass what the step "
    "reads of it as an argument, or call reset() to record the step again"
)
MSG_HOOKS: Final = "{name}: {what} has other hooks than when the step was recorded. Call reset() to record it again"
MSG_ARGUMENT_GRADIENT: Final = (
    "{name}: the step gives an argument a gradient, which a replay would not. Return "
    "torch.autograd.grad() of it instead"
)
MSG_GRADIENT: Final = (
    "{name}: {what} has a gradient, which it had not when the step was recorded: there it was added to "
    "nothing. Call zero_grad() before the step, or inside it"
)
MSG_MANY: Final = (
    "{name}: {count} recordings for different arguments. Pass numbers as tensors and pad to few shapes, or "
    "raise max_recordings"
)
MSG_HOST_CHANGED: Final = (
    "{name}: {what} on the host has been written to since the step was recorded, which has its former value as a "
    "constant. Pass it as an argument, or call reset()"
)
MSG_HOST_WRITTEN: Final = (
    "{name}: the step writes to {what}, which is on the host, and a replay would not. Move it to the device, or do "
    "it outside"
)
MSG_REACHES: Final = (
    "{name}: its code names attributes that lead to more than {most} objects, which cannot all be watched for "
    "changes. Pass what it reads of them as arguments"
)
MSG_CHECK: Final = "{name}: recorded again, the step differs from what is replayed: {why}"
MSG_CHECK_VALUE: Final = "result {number} of {meta} has another value"
MSG_CHECK_OPTION: Final = "{option} is {got!r}; give a whole number of at least {least}"
MSG_DONATION: Final = (
    "{name}: memory cannot be given away (alias_with_buffer_donor_config) in a captured step; what it "
    "overwrites is reused anyway"
)
MSG_NEW_STATE: Final = (
    "{name}: {optimizer} makes its state in it, and each replay would begin with that again. Let it take "
    "a step before"
)
MSG_NOT_RECORDED: Final = "nothing was recorded yet: run the block of torch_xla's graph() first"
MSG_NO_PROGRAM: Final = "{name}: the step computes nothing on {device}; there is nothing to replay"


class CaptureError(RuntimeError):
    """A step cannot be captured, or a call would no longer do what was recorded.

    ``line`` is the file and the line of the user's program that is the reason, or None if it is not known.
    """

    def __init__(self, reason: str, line: tuple[str, int] | None = None) -> None:
        text = reason if line is None else f"{reason} ({line[0]}:{line[1]})"
        super().__init__(text)
        self.line = line


def refuse(message: str, line: tuple[str, int] | None = None, /, **details: object) -> CaptureError:
    """Make the error with this message; the caller raises it."""
    return CaptureError(message.format(**details), line)
