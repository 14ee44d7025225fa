"""State of the process: what a long run adds to is a listed cache, or has a reason why it stays small."""

from __future__ import annotations

import ast

from source_tree import SOURCES, at, module_name, parsed

CONTAINERS = {
    "dict", "list", "set", "deque", "OrderedDict", "defaultdict", "Counter", "WeakKeyDictionary",
    "WeakValueDictionary", "WeakSet", "Table",
}  # fmt: skip
MEMOIZING = {"cache", "lru_cache"}
OPERATOR = "one entry per operator"
CODE = "filled while modules are imported, or by who registers something"
DEVICE = "one entry per device, at most"
OWNER = "goes with the object that it is about"
ONCE = "one entry at most"
LISTED = "listed with a bound by `caches.register`"
CALLS = "what the user put there and takes away"
RING = "a ring of so many records"
# Containers at module level, empty when the module is imported, that are no `caches.Bounded`.
REASONS = {
    "xla_core.api.compile_decorator": {"_known": OWNER},
    "xla_core.api.xla_model": {"_gradient_reducers": ONCE},
    "xla_core.attach.autoload": {"_failure": ONCE, "_handler_of": ONCE},
    "xla_core.builder.hlo_registry": {"operations": CODE},
    "xla_core.capture.optimizer_probe": {"_scratch": OWNER},
    "xla_core.compilation.compile_threads": {"_first": CODE},
    "xla_core.compilation.program_table": {"_programs": LISTED},
    "xla_core.compilation.progress_line": {"_under_way": OWNER},
    "xla_core.computations.body_recorder": {"_body_trees": DEVICE},
    "xla_core.computations.call_jax": {"_traced": LISTED},
    "xla_core.computations.scan": {"_pure": OWNER},
    "xla_core.computations.scan_layers": {"_PURE_LAYERS": OWNER},
    "xla_core.contract.events": {"_subscriptions": CALLS},
    "xla_core.dispatch.cpu_fallback": {"_warned": OPERATOR},
    "xla_core.dispatch.layouts": {"_sparse_handlers": OPERATOR},
    "xla_core.dispatch.random_numbers": {"_integers_of": "one entry per dtype"},
    "xla_core.dynamo.dynamo_backend": {"_to_tell": CODE},
    "xla_core.execution.generator": {"_known": OWNER},
    "xla_core.execution.index_checks": {"pending": DEVICE},
    "xla_core.execution.op_by_op": {"_programs": "its programs are in the listed table of programs"},
    "xla_core.execution.runtime": {"_followers": CODE},
    "xla_core.execution.step_closures": {"_pending": CALLS, "_async_pending": CALLS, "_runners": DEVICE},
    "xla_core.jax_bridge.jaxlib_runtime": {"_shardings": "ways to split values; goes with its client"},
    "xla_core.launching.buffer_donation": {"_marked": OWNER},
    "xla_core.launching.launch_queue": {"_living": OWNER, "_queues": OWNER},
    "xla_core.operators.lowering_registry": dict.fromkeys(
        ("_rules", "_views", "_multi_views", "_inspected", "_files", "_without_file"), CODE
    ),
    "xla_core.operators.plan": {"_reshape_rules": OPERATOR},
    "xla_core.operators.source_digests": {"_read": "one entry per file of a package with rules"},
    "xla_core.operators.tensor_meta": {"_interned": LISTED},
    "xla_core.plugins.discovery": {"_registered": CODE, "_installed": ONCE},
    "xla_core.plugins.torch_xla_plugins": {"_plugins": CODE},
    "xla_core.recording.random_state": {"_states": DEVICE, "_common": ONCE},
    "xla_core.recording.step_key": {"_SPELLED": CODE},
    "xla_core.recording.step_values": {"_plans": CODE},
    "xla_core.recording.untyped_storage": {"_stand_ins": OWNER},
    "xla_core.recording.xla_tensor": {
        "handlers": OPERATOR, "_overloads": OPERATOR, "_plain": OPERATOR, "_chosen": OPERATOR,
        "_pickled": OWNER, "_classes_on_xla": "one entry per class",
    },
    "xla_core.support.caches": {"_registered": CODE},
    "xla_core.support.counters": {
        "_counters": "one entry per name", "_metrics": "one entry per name", "_tallies": OWNER,
        "_followers": CALLS, "_sources": CODE,
    },
    "xla_core.support.flags": {"FLAGS": CODE},
    "xla_core.support.flight_ring": {"_ring": RING, "_ends": RING},
    "xla_core.testing.interrupts": {"left_out": "one entry per function, in tests"},
    "xla_core.varying.interpreter": {"_RULES": CODE},
    "xla_core.varying.padded_buffer": {"_living": OWNER},
    "xla_core.computations.recurrent": {"_libraries": CODE},
    "xla_core.pjrt.compile_options": {"_unknown": "options that the installed jaxlib lacks"},
    "xla_core.torch_bridge.aot_graphs": {"_libraries": CODE},
    "xla_core.torch_bridge.whole_operators": {"_libraries": CODE, "_kernels": CODE},
    "xla_core.torch_bridge.device_guard": {"_keep_alive": CODE},
    "xla_core.torch_bridge.reference_kernels": {"_libraries": CODE, "keep_whole": OPERATOR},
    "xla_core.torch_bridge.strided_gradients": {"_libraries": CODE},
    "xla_core.torch_bridge.torch_distributed_private": {"_to_be_imported": CODE},
    "xla_core.torch_bridge.torch_private": {"_libraries": CODE, "_waiting_for_dynamo": CODE},
    "xla_debug.live.analysis": {"_reported_slow": "one entry per metric"},
    "xla_debug.live.listeners": {"_undo": CODE},
    "xla_debug.stacks.stack_frames": {"_children": OWNER, "_backward_calls": ONCE},
    "xla_debug.steps.graphs": {"_numbers": OWNER},
    "xla_dist.collectives.model_collectives": {"_orders": "per device, of the steps in hand"},
    "xla_dist.job_health.thread_states": {"_runtime_threads": "the runtime's threads", "_others": ONCE},
    "xla_dist.processes.kv_store": {"_stores": "one entry per process group"},
    "xla_dist.processes.rendezvous": {"_rounds": "one entry per set of replicas"},
    "xla_dist.processes.session": {"_sessions": ONCE},
    "xla_dist.processes.thread_replicas": {"_teams": CALLS},
    "xla_dist.testing.faults": {"_logged": "one entry per fault, in tests"},
    "xla_pjrt_tpu.libtpu": {"_flags_in_force": ONCE},
    "xla_spmd.checkpoint.preemption": {"_former": ONCE},
    "xla_spmd.lowering.gradient_sharding": {"_leaves": OWNER},
}  # fmt: skip


def growing(tree: ast.Module) -> set[str]:
    """Containers at a module's top level that begin empty, and functions that remember results."""
    found = set()
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if is_empty(node.value):
                found |= {ast.unparse(target) for target in targets}
        elif isinstance(node, ast.FunctionDef) and (node.args.args or node.args.vararg):
            marks = [m.func if isinstance(m, ast.Call) else m for m in node.decorator_list]
            if any(ast.unparse(mark).rpartition(".")[2] in MEMOIZING for mark in marks):
                found.add(node.name)
    return found


def is_empty(value: ast.expr) -> bool:
    """Whether an expression makes a container without entries."""
    if isinstance(value, ast.Dict):
        return not value.keys
    if isinstance(value, ast.List):
        return not value.elts
    if isinstance(value, ast.Call) and not value.args:
        return ast.unparse(value.func).rpartition(".")[2] in CONTAINERS
    return False


def test_what_grows_at_module_level_is_listed_or_has_a_reason():
    found = {module_name(path): growing(parsed(path)) for path in SOURCES}
    reasons = {module: set(names) for module, names in REASONS.items() if names}
    assert {module: names for module, names in found.items() if names} == reasons


def test_a_container_and_a_memoized_function_are_found():
    tree = ast.parse(
        "import functools\n_a: dict[int, int] = {}\n_b = collections.OrderedDict()\n_c = {1: 2}\n"
        "@functools.cache\ndef f(x): ...\n@functools.cache\ndef g(): ...\n"
        "@caches.memoized('one')\ndef h(x): ...\n"
    )
    assert growing(tree) == {"_a", "_b", "f"}


def test_no_list_stands_for_a_flag():
    found = [
        at(path, node)
        for path in SOURCES
        for node in parsed(path).body
        if isinstance(node, ast.AnnAssign) and "list[bool]" in ast.unparse(node.annotation)
    ]
    assert not found, "support.once.Once says it"
