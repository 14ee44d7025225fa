"""``use_spmd(auto=True)``: chooses how parameters, optimizer state and data are split, from the first steps.

Each step that is about to run is examined, until one replaces parameters. The first step that multiplies with
parameters, for example an evaluation, leads to a choice; the first step that replaces parameters leads to a
second and final one. The choice is stored like an annotation of ``mark_sharding``, so that later steps need it
only for new data: values that no device has yet are split like the data of the step that led to the choice, if
they have the same dtype and a similar shape.
"""

from __future__ import annotations

import logging
import math
from typing import Final

import torch

from xla_core.contract.foreign_values import CoreTrace
from xla_core.contract.step_sharding import DATA, PARAMETER, ShardingChoice
from xla_core.extension_api import plugins, runtime
from xla_core.extension_api.backends import Recorder
from xla_core.extension_api.steps import products
from xla_core.support import counters
from xla_spmd.lowering import gradient_sharding
from xla_spmd.lowering.recorded_step import DevicesAsOne, Owners, RecordedStep
from xla_spmd.sharding.annotation import Annotation, checked_annotation
from xla_spmd.sharding.mesh import Mesh

logger = logging.getLogger(__name__)

MSG_NO_PLANNER: Final = (
    "use_spmd(auto=True) needs xla-plan, which estimates the costs of shardings: pip install xla-plan. Or call "
    "xr.use_spmd() and annotate large tensors with xs.mark_sharding(); XLA propagates their shardings"
)
MSG_PROCESSES: Final = (
    "use_spmd(auto=True) works in jobs of one process; this job has {count}. Run it in one process for the same "
    "devices (XLA_AOT_TOPOLOGY), print xs.debugging.automatic_sharding(), and mark tensors as it says"
)
# The kinds of steps, by how much they reveal about the training: each may replace a choice from the kind before.
_NOTHING, _PRODUCTS, _TRAINING = range(3)


class AutomaticSharding:
    """The automatic choice for the devices of one ``MeshBackend``.

    ``choice`` is None until a step has led to one. ``names`` are those of the step's inputs, in the order of
    ``choice.specs``.
    """

    def __init__(self, backend: DevicesAsOne) -> None:
        self._backend = backend
        self._chosen_from = _NOTHING  # the kind of step that led to the choice
        self._data: list[tuple[torch.dtype, tuple[int, ...], Annotation]] = []
        self.choice: ShardingChoice | None = None
        self.names: tuple[str, ...] = ()

    def prepare(self, trace: Recorder) -> None:
        """Split the inputs of a step that is about to run; first make a choice, if none was made for its kind.

        Raises RuntimeError if no choice can be made; the step then stays pending.
        """
        if self._chosen_from < _TRAINING and trace.inputs:
            self._examine(trace)
        for slot in range(len(trace.inputs) if self._data else 0):
            self._split_data(trace, slot)

    def _examine(self, trace: CoreTrace) -> None:
        """Make a choice if the step is of a kind from which none was made yet."""
        # the cheap tests come first: this runs before every step until one trains
        if self._chosen_from == _PRODUCTS and not _replaces_annotated(trace):
            return
        if not any(count for _, count in products(trace.cur.path())):
            return
        owners = Owners()
        step = RecordedStep(self._backend, trace, owners)
        kind = _TRAINING if step.trains else _PRODUCTS
        if kind <= self._chosen_from or all(one.role != PARAMETER for one in step.inputs):
            return
        self._choose(trace, step, owners)
        self._chosen_from = kind

    def _choose(self, trace: Recorder, step: RecordedStep, owners: Owners) -> None:
        if runtime.process_count() > 1:
            raise RuntimeError(MSG_PROCESSES.format(count=runtime.process_count()))
        choice = plugins.extensions().hook.xla_core_choose_shardings(step=step)
        if choice is None:
            raise RuntimeError(MSG_NO_PLANNER)
        counters.increment("CompileWithAutoSharding")
        data = []
        for slot, annotation in enumerate(step.annotations(choice.axes, choice.specs)):
            if annotation is None:
                continue
            storage = trace.touched[trace.input_storages[slot]]
            self._backend.reshard_input(trace, slot, annotation.text)
            storage.annotate(annotation)
            if step.inputs[slot].role == DATA:
                data.append((storage.meta.dtype, step.inputs[slot].shape, annotation))
            elif id(storage) in owners.leaves:
                gradient_sharding.watch(owners.leaves[id(storage)])
        self._data = data
        self.choice, self.names = choice, tuple(one.name for one in step.inputs)
        logger.warning(choice.report)

    def _split_data(self, trace: Recorder, slot: int) -> None:
        """Split an input that no device has yet like the data of the step that led to the choice, if similar."""
        storage = trace.touched[trace.input_storages[slot]]
        if getattr(storage, "annotation", None) is not None:
            return
        if not self._backend.has_no_layout(trace.inputs[slot]):
            return
        shape = tuple(storage.meta.shape)
        for dtype, data_shape, annotation in self._data:
            # another number of rows (a last batch), or another length of the rows
            similar = len(shape) == len(data_shape) and (
                shape[:1] == data_shape[:1] or shape[1:] == data_shape[1:]
            )
            if dtype == storage.meta.dtype and similar and not shape[0] % _parts(annotation):
                for_shape = checked_annotation(annotation.mesh, annotation.spec, shape)
                self._backend.reshard_input(trace, slot, for_shape.text)
                return


def _replaces_annotated(trace: Recorder) -> bool:
    """Whether a step replaces any of its annotated inputs."""
    storages = (trace.touched[position] for position in trace.input_storages)
    return any(
        s.is_pending_in(trace.epoch) and getattr(s, "annotation", None) is not None
        for s in storages
    )


def _parts(annotation: Annotation) -> int:
    """The number of parts into which the annotation splits the first dimension."""
    mesh: Mesh = annotation.mesh
    axes = annotation.spec[0] if annotation.spec else None
    names = axes if isinstance(axes, tuple) else (axes,)
    return math.prod(size for name, size in mesh.shape().items() if name in names)
