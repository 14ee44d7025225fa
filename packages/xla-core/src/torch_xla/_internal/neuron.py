"""torch_xla._internal.neuron: the environment of AWS Neuron devices."""

from __future__ import annotations

from xla_core.plugins.neuron import NeuronPlugin as NeuronPlugin
from xla_core.plugins.neuron import configure_pjrt_environment as configure_pjrt_environment
from xla_core.plugins.neuron import get_master_worker_ip as get_master_worker_ip
from xla_core.plugins.neuron import get_visible_cores_list as get_visible_cores_list
from xla_core.plugins.neuron import initialize_env as initialize_env
from xla_core.plugins.neuron import num_local_processes as num_local_processes
from xla_core.plugins.neuron import remap_visible_cores as remap_visible_cores
from xla_core.plugins.neuron import set_envvar_defaults as set_envvar_defaults
from xla_core.plugins.neuron import set_rt_root_comm_id as set_rt_root_comm_id
