"""Environment variables: each declared once, README's table written from that, few read otherwise."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

from source_tree import ROOT, SOURCES, parsed

_PACKAGES = "packages/{}/src/{}/"
CORE, DEBUG, DIST = (_PACKAGES.format(f"xla-{p}", f"xla_{p}") for p in ("core", "debug", "dist"))
SPMD, TPU = (
    _PACKAGES.format("xla-spmd", "xla_spmd"),
    _PACKAGES.format("xla-pjrt-tpu", "xla_pjrt_tpu"),
)
# How often a file may name the environment itself, and why it does not ask a flag.
RAW = {
    f"{CORE}support/flags.py": (2, "what all flags are read by"),
    # the whole environment, handed to plugins and launchers as their options
    f"{CORE}execution/runtime.py": (1, "the plugin's options"),
    f"{CORE}execution/ordinals.py": (1, "the description of a job, before the client runs"),
    f"{CORE}plugins/discovery.py": (2, "the default of `options`"),
    f"{DIST}processes/launching.py": (5, "what child processes inherit; torchrun's LOCAL_RANK"),
    f"{DIST}processes/pjrt_names.py": (6, "sets the place of a process, as torch_xla's functions do"),
    f"{DIST}processes/child_process.py": (1, "sets what the launcher says, before anything reads it"),
    f"{TPU}environment.py": (1, "the default of `options`"),
    f"{TPU}processes.py": (6, "the options of a slice; sets the place of a process"),
    f"{TPU}libtpu.py": (4, "sets what libtpu reads while it is loaded"),
    f"{TPU}torch_xla_names.py": (1, "the options of libtpu"),
    # variables that belong to others, or that the caller names
    f"{CORE}multiprocess/job_setup.py": (5, "torchrun's variables, at the start of the process"),
    f"{DIST}processes/restarts.py": (1, "torchrun's count of restarts"),
    f"{CORE}jax_bridge/coordinator_process.py": (3, "a child's environment, and what jaxlib prints"),
    f"{CORE}plugins/neuron.py": (10, "sets what Neuron's runtime reads; torchrun's variables"),
    f"{CORE}torch_features/jax_coexistence.py": (4, "a variable of jax's, set while jax is imported"),
    f"{CORE}support/forked_programs.py": (5, "the environment of a program, whole"),
    f"{CORE}capture/reachable.py": (2, "variables that the user's code names"),
    f"{CORE}api/script_utils.py": (2, "variables that the caller names"),
    f"{DEBUG}cli/doctor.py": (2, "looks for names that nothing reads"),
    f"{SPMD}sharding/mode.py": (1, "sets the variable of the mode for child processes"),
    "packages/xla-plan/src/xla_plan/planning/plans.py": (1, "processes that measure inherit it"),
}  # fmt: skip


def table():
    spec = importlib.util.spec_from_file_location(
        "environment_table", ROOT / "tools" / "environment_table.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_readmes_table_is_what_is_declared():
    text = (ROOT / "README.md").read_text()
    tool = table()
    assert tool.BEGIN in text
    assert tool.written(text) == text, "python tools/environment_table.py"


def test_a_changed_default_shows():
    tool = table()
    text = (ROOT / "README.md").read_text()
    assert tool.written(text.replace("| `XLA_SYNC_WAIT` | `0`", "| `XLA_SYNC_WAIT` | `1`")) == text


def test_every_package_with_settings_is_in_the_table():
    homes = {path.parent.name for path in SOURCES if path.name == "settings.py"}
    homes = {name for name in homes if name.startswith("xla_")}
    named = {home.partition(".")[0] for home in table().HOMES.values()}
    assert homes <= named


def test_every_variable_that_sources_name_is_declared():
    names = r"(?:XLA|LTC|PJRT|PT|CPU|TPU|XPU|NEURON)_[A-Z0-9_]*[A-Z0-9]"
    others = {  # Neuron's, which are set and not read
        "NEURON_PJRT_PROCESS_INDEX", "NEURON_PJRT_PROCESSES_NUM_DEVICES", "NEURON_USE_LOAD_COLLECTIVES",
        "NEURON_GLOBAL_DEVICE_ID", "NEURON_GLOBAL_DEVICE_COUNT",
    }  # fmt: skip
    declared = {flag.name for flags in table().declared().values() for flag in flags}
    named = {
        node.value
        for path in SOURCES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if re.fullmatch(names, node.value)
    }
    assert named - others <= declared


def raw_uses(path: Path) -> int:
    """How often a file names ``os.environ``, or calls ``os.getenv``."""
    return sum(
        (isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv"))
        or (isinstance(node, ast.ImportFrom) and node.module == "os")
        for node in ast.walk(parsed(path))
    )


def test_the_environment_is_read_through_flags():
    found = {str(path.relative_to(ROOT)): raw_uses(path) for path in SOURCES}
    allowed = {path: count for path, (count, _why) in RAW.items()}
    assert {path: count for path, count in found.items() if count} == allowed
