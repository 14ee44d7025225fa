"""``use_spmd(auto=True)``: the first steps that train decide how parameters, state and data are split.

A step that is about to run is looked at until one has replaced parameters. The first with products of parameters
decides (an evaluation, say), and the first that replaces parameters decides again. The decision is recorded
as ``mark_sharding`` would, so later steps need nothing but their data: values that no device has yet and that
look like those of the step that decided are split in the same way as they are used.
"""

from __future__ import annotations

import logging
import math
from typing import Any, Final

from xla_core.contract.step_sharding import DATA, PARAMETER, ShardingChoice
from xla_core.extension_api import plugins, runtime
from xla_core.extension_api.backends import Recorder
from xla_core.support import counters
from xla_spmd.lowering import gradient_sharding
from xla_spmd.lowering.recorded_step import DevicesAsOne, Owners, RecordedStep, products_of
from xla_spmd.sharding.annotation import Annotation, checked_annotation
from xla_spmd.sharding.mesh import Mesh

logger = logging.getLogger(__name__)

MSG_NOBODY: Final = (
    "use_spmd(auto=True) needs xla-plan, which estimates the costs of shardings: pip install xla-plan. Or call "
    "xr.use_spmd() and annotate what is large with xs.mark_sharding(); XLA propagates from there"
)
MSG_PROCESSES: Final = (
    "use_spmd(auto=True) decides in one process; this job has {count}. Let one process decide for the same devices "
    "(XLA_AOT_TOPOLOGY), print xs.debugging.automatic_sharding(), and mark tensors as it says"
)
# How much a step says of what is to be trained.
_NOTHING, _PRODUCTS, _TRAINING = range(3)


class AutomaticSharding:
    """What was decided for the devices of one ``MeshBackend``; ``choice`` is None before that."""

    def __init__(self, backend: DevicesAsOne) -> None:
        self._backend = backend
        self._known = _NOTHING
        self._data: list[tuple[Any, tuple[int, ...], Annotation]] = []
        self.choice: ShardingChoice | None = None
        self.names: tuple[str, ...] = ()

    def prepare(self, trace: Recorder) -> None:
        """Lay out the inputs of a step that is about to run; decide first, if it says more than any before.

        Raises RuntimeError where nothing can be decided; the step is pending as before then.
        """
        if self._known < _TRAINING and trace.inputs:
            self._look(trace)
        for slot in range(len(trace.inputs) if self._data else 0):
            self._lay_data(trace, slot)

    def _look(self, trace: Any) -> None:
        if self._known == _PRODUCTS and not _replaces(trace):
            return
        if not products_of(trace.cur.path()):
            return
        owners = Owners()
        step = RecordedStep(self._backend, trace, owners)
        says = _TRAINING if step.trains else _PRODUCTS
        if says <= self._known or all(one.role != PARAMETER for one in step.inputs):
            return
        self._decide(trace, step, owners)
        self._known = says

    def _decide(self, trace: Any, step: RecordedStep, owners: Owners) -> None:
        if runtime.process_count() > 1:
            raise RuntimeError(MSG_PROCESSES.format(count=runtime.process_count()))
        choice = plugins.extensions().hook.xla_core_choose_shardings(step=step)
        if choice is None:
            raise RuntimeError(MSG_NOBODY)
        counters.increment("CompileWithAutoSharding")
        data = []
        for slot, annotation in enumerate(step.annotations(choice.axes, choice.specs)):
            if annotation is None:
                continue
            storage = trace.touched[trace.input_storages[slot]]
            self._backend.lay_input(trace, slot, annotation.text)
            storage.annotate(annotation)
            if step.inputs[slot].role == DATA:
                data.append((storage.meta.dtype, step.inputs[slot].shape, annotation))
            elif id(storage) in owners.leaves:
                gradient_sharding.watch(owners.leaves[id(storage)])
        self._data = data
        self.choice, self.names = choice, tuple(one.name for one in step.inputs)
        logger.warning(choice.report)

    def _lay_data(self, trace: Recorder, slot: int) -> None:
        """Split a value that no device has yet as the data of the step that decided was."""
        buffer = trace.inputs[slot]
        storage = trace.touched[trace.input_storages[slot]]
        if getattr(storage, "annotation", None) is not None or not self._backend.is_whole(buffer):
            return
        shape = tuple(storage.meta.shape)
        for dtype, former, annotation in self._data:
            alike = len(shape) == len(former) and (
                shape[:1] == former[:1] or shape[1:] == former[1:]
            )
            if dtype == storage.meta.dtype and alike and not shape[0] % _parts(annotation):
                fresh = checked_annotation(annotation.mesh, annotation.spec, shape)
                self._backend.lay_input(trace, slot, fresh.text)
                return


def _replaces(trace: Recorder) -> bool:
    """Whether a step replaces any of its floating-point inputs that are split or whole by decision."""
    storages = (trace.touched[position] for position in trace.input_storages)
    return any(
        s.is_pending_in(trace.epoch) and getattr(s, "annotation", None) is not None
        for s in storages
    )


def _parts(annotation: Annotation) -> int:
    """Into how many parts the first dimension is split."""
    mesh: Mesh = annotation.mesh
    axes = annotation.spec[0] if annotation.spec else None
    names = axes if isinstance(axes, tuple) else (axes,)
    return math.prod(size for name, size in mesh.shape().items() if name in names)
