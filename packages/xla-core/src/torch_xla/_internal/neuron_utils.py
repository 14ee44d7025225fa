"""torch_xla._internal.neuron_utils: the NeuronCores that a process may use."""

from __future__ import annotations

from xla_core.plugins.neuron import convert_range as convert_range
from xla_core.plugins.neuron import get_visible_cores_list as get_visible_cores_list
from xla_core.plugins.neuron import remap_visible_cores as remap_visible_cores
