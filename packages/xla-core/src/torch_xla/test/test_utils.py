"""torch_xla.test.test_utils: progress lines and TensorBoard summaries of example scripts."""

from __future__ import annotations

from xla_core.api.training_output import close_summary_writer as close_summary_writer
from xla_core.api.training_output import device_label as _get_device_spec
from xla_core.api.training_output import get_summary_writer as get_summary_writer
from xla_core.api.training_output import mp_test as mp_test
from xla_core.api.training_output import now as now
from xla_core.api.training_output import print_test_update as print_test_update
from xla_core.api.training_output import print_training_update as print_training_update
from xla_core.api.training_output import write_to_summary as write_to_summary
