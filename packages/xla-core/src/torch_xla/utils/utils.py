"""torch_xla.utils.utils (xu): small helpers for scripts."""

from __future__ import annotations

from xla_core.api.script_utils import Cleaner as Cleaner
from xla_core.api.script_utils import DataWrapper as DataWrapper
from xla_core.api.script_utils import FnDataGenerator as FnDataGenerator
from xla_core.api.script_utils import LazyProperty as LazyProperty
from xla_core.api.script_utils import SampleGenerator as SampleGenerator
from xla_core.api.script_utils import TimedScope as TimedScope
from xla_core.api.script_utils import TmpFolder as TmpFolder
from xla_core.api.script_utils import as_list as as_list
from xla_core.api.script_utils import check_env_flag as check_env_flag
from xla_core.api.script_utils import eprint as eprint
from xla_core.api.script_utils import flatten_nested_tuple as flatten_nested_tuple
from xla_core.api.script_utils import for_each_instance as for_each_instance
from xla_core.api.script_utils import for_each_instance_rewrite as for_each_instance_rewrite
from xla_core.api.script_utils import get_free_tcp_ports as get_free_tcp_ports
from xla_core.api.script_utils import get_print_fn as get_print_fn
from xla_core.api.script_utils import getenv_as as getenv_as
from xla_core.api.script_utils import list_copy_append as list_copy_append
from xla_core.api.script_utils import null_print as null_print
from xla_core.api.script_utils import parallel_work as parallel_work
from xla_core.api.script_utils import shape as shape
from xla_core.api.script_utils import timed as timed
