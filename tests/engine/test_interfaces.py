"""Every interface of vLLM that the package relies on is there, in the form it is used in.

The package reaches into vLLM where nothing is promised: it extends the scheduler's private
methods and counts on the order in which the model runners call a connector. What it counts
on is written down here as tables and compared with the vLLM that is installed, or that is
first on ``PYTHONPATH``; docs/vllm-versions.md tells how to use that for a new version.
"""

import ast
import functools
import importlib
import inspect
import textwrap

import pytest

from preempt_offload.connector import PreemptOffloadConnector
from preempt_offload.recompute_scheduler import AsyncRecomputeScheduler, RecomputeScheduler

SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
V1_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
V1_CONNECTOR = "vllm.v1.worker.kv_connector_model_runner_mixin:KVConnectorModelRunnerMixin"
V2_RUNNER = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
V2_CONNECTOR = "vllm.v1.worker.gpu.kv_connector:ActiveKVConnector"
CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1"
FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory"
CACHE_MANAGER = "vllm.v1.core.kv_cache_manager:KVCacheManager"
COORDINATOR = "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator"
SINGLE_TYPE = "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager"
BLOCK_POOL = "vllm.v1.core.block_pool:BlockPool"

# What the package calls. A tuple holds names of the same thing in different versions.
CALLS = [
    (SCHEDULER, "_preempt_request(self, request, timestamp)"),
    (SCHEDULER, "_free_request(self, request)"),
    (SCHEDULER, "update_from_output(self, scheduler_output, model_runner_output)"),
    (SCHEDULER, "has_finished_requests(self)"),
    (SCHEDULER, "reset_prefix_cache(self, reset_running_requests, reset_connector)"),
    (SCHEDULER, "_is_blocked_waiting_status(status)"),
    (SCHEDULER, "_inflight_prefill_reserved_blocks(self)"),
    (SCHEDULER, "_handle_stopped_request(self, request)"),
    (SCHEDULER, "_update_request_as_session(self, session, update)"),
    (SCHEDULER, "_enqueue_waiting_request(self, request)"),
    (
        SCHEDULER,
        (
            "_try_promote_blocked_waiting_request(self, request)",
            "_handle_blocked_waiting_request(self, request)",
        ),
    ),
    (CACHE_MANAGER, "get_block_ids(self, request_id)"),
    (CACHE_MANAGER, "evict_blocks(self, block_ids)"),
    (CACHE_MANAGER, "free(self, request)"),
    (
        CACHE_MANAGER,
        (
            "remove_skipped_blocks(self, request_id, total_computed_tokens)",
            "remove_skipped_blocks(self, request_id, processed_computed_tokens)",
        ),
    ),
    (
        COORDINATOR,
        "allocate_new_computed_blocks(self, request_id, new_computed_blocks,"
        " num_local_computed_tokens, num_external_computed_tokens)",
    ),
    (SINGLE_TYPE, "get_num_skipped_tokens(self, num_computed_tokens)"),
    (
        "vllm.v1.core.kv_cache_utils",
        "resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)",
    ),
    (BLOCK_POOL, "touch(self, blocks)"),
    (BLOCK_POOL, "free_blocks(self, blocks)"),
    ("vllm.v1.core.kv_cache_manager:KVCacheBlocks", "get_block_ids(self)"),
    ("vllm.v1.core.sched.request_queue:RequestQueue", "remove_requests(self, requests)"),
    ("vllm.v1.core.sched.request_queue:RequestQueue", "__iter__(self)"),
    ("vllm.v1.request:Request", "is_finished(self)"),
    ("vllm.v1.request:Request", "get_finished_reason(self)"),
    ("vllm.v1.request:Request", "take_events(self)"),
    (CONNECTOR, "__init__(self, vllm_config, role, kv_cache_config)"),
    (CONNECTOR, "_get_connector_metadata(self)"),
    (FACTORY, "register_connector(name, module_path, class_name)"),
    ("vllm.config", "get_current_vllm_config_or_none()"),
    ("vllm.distributed.kv_transfer", "get_kv_transfer_group()"),
]

# What the package reads, or sets, on objects of vLLM.
ATTRIBUTES = {
    SCHEDULER: [
        "waiting",
        ("skipped_waiting", "kv_holding_waiting"),
        "requests",
        "connector",
        "vllm_config",
        "kv_cache_manager",
        "finished_recving_kv_req_ids",
        "failed_recving_kv_req_ids",
        "_inflight_prefills",
        "recompute_kv_load_failures",
        "num_spec_tokens",
        "need_mamba_block_aligned_split",
        "num_lookahead_tokens",
    ],
    "vllm.v1.request:Request": [
        "request_id",
        "status",
        "client_index",
        "stop_reason",
        "trace_headers",
        "block_hashes",
        "num_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_output_placeholders",
        "num_output_tokens",
        "num_prompt_tokens",
        "is_prefill_chunk",
        "kv_transfer_params",
        "skip_reading_prefix_cache",
    ],
    "vllm.v1.request:RequestStatus": [
        "PREEMPTED",
        "WAITING_FOR_REMOTE_KVS",
        "FINISHED_STOPPED",
        "FINISHED_ERROR",
    ],
    CACHE_MANAGER: ["coordinator", "block_pool"],
    COORDINATOR: ["single_type_managers", "block_pool"],
    SINGLE_TYPE: [
        "req_to_blocks",
        "block_size",
        ("allocate_new_computed_blocks", "add_local_computed_blocks"),
    ],
    "vllm.v1.core.kv_cache_utils:KVCacheBlock": ["block_id", "block_hash", "is_null"],
    BLOCK_POOL: ["hash_block_size"],
    "vllm.v1.kv_cache_interface:KVCacheConfig": [
        "num_blocks",
        "kv_cache_tensors",
        "kv_cache_groups",
        "needs_kv_cache_zeroing",
    ],
    "vllm.v1.kv_cache_interface:KVCacheTensor": ["size", ("shared_by", "layers")],
    "vllm.v1.kv_cache_interface:KVCacheGroupSpec": ["layer_names", "kv_cache_spec"],
    "vllm.v1.kv_cache_interface:AttentionSpec": ["block_size", "page_size_bytes"],
    "vllm.v1.kv_cache_interface:MambaSpec": ["block_size", "page_size_bytes", "mamba_cache_mode"],
    "vllm.v1.kv_cache_interface:UniformTypeKVCacheSpecs": ["block_size", "kv_cache_specs"],
    "vllm.v1.outputs:KVConnectorOutput": ["finished_recving", "kv_connector_worker_meta"],
    "vllm.v1.engine:EngineCoreOutput": [
        "request_id",
        "new_token_ids",
        "finish_reason",
        "stop_reason",
        "events",
        "kv_transfer_params",
        "trace_headers",
    ],
    "vllm.v1.engine:EngineCoreOutputs": ["outputs"],
    "vllm.v1.core.sched.output:SchedulerOutput": [
        "num_scheduled_tokens",
        "scheduled_spec_decode_tokens",
        "scheduled_new_reqs",
        "preempted_req_ids",
    ],
    "vllm.v1.outputs:ModelRunnerOutput": ["sampled_token_ids", "req_id_to_index"],
    "vllm.v1.core.sched.output:NewRequestData": ["req_id", "num_computed_tokens"],
    "vllm.config:KVTransferConfig": ["kv_role", "engine_id", "kv_connector_extra_config"],
    "vllm.config:VllmConfig": ["speculative_config", "device_config", "use_v2_model_runner"],
    "vllm.config:DeviceConfig": ["device_type"],
    "vllm.config:CacheConfig": ["block_size"],
    "vllm.config:SchedulerConfig": ["scheduler_cls", "async_scheduling"],
    "vllm.config:ParallelConfig": [
        "rank",
        "world_size",
        "local_world_size",
        "data_parallel_size",
        "data_parallel_size_local",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ],
    CONNECTOR: ["_kv_transfer_config"],
    FACTORY: ["_registry"],
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorRole": ["SCHEDULER", "WORKER"],
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorWorkerMetadata": ["aggregate"],
    "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector:MultiConnector": ["_connectors"],
}

# What vLLM must call on a connector, or we would not hear of it: by the code that calls it.
CALLED_HOOKS = {
    SCHEDULER: [
        ("bind_gpu_block_pool", "bind_kv_cache_manager"),
        "get_num_new_matched_tokens",
        "update_state_after_alloc",
        "build_connector_meta",
        "update_connector_output",
        "request_finished_all_groups",
    ],
    V1_RUNNER: ["handle_preemptions"],
    V1_CONNECTOR: [
        "start_load_kv",
        ("get_finished", "get_transfer_results"),
        "get_block_ids_with_load_errors",
        "build_connector_worker_meta",
    ],
    V2_CONNECTOR: [
        "register_kv_caches",
        "handle_preemptions",
        "start_load_kv",
        ("get_finished", "get_transfer_results"),
        "get_block_ids_with_load_errors",
        "build_connector_worker_meta",
    ],
}

# What else vLLM asks a connector: the base class answers as suits us, or we do nothing.
OTHER_HOOKS = {
    "bind_connector_metadata",
    "clear_connector_metadata",
    "finish_forward",
    "get_external_cache_hit_sources",
    "get_kv_connector_kv_cache_events",
    "get_kv_connector_stats",
    "get_loaded_kv_cache_group_ids",
    "has_pending_block_frees",
    "has_pending_push_work",
    "on_new_request",
    "prefer_cross_layer_blocks",
    "register_finished_partial_tail",
    "request_finished",
    "requires_kv_delivery",
    "reset_cache",
    "reset_capture_state",
    "set_host_xfer_buffer_ops",
    "shutdown",
    "supports_divergent_local_hybrid_hits",
    "take_events",
    "wait_for_save",
}
ON_A_CONNECTOR = {
    "connector",
    "self.connector",
    "kv_connector",
    "self.kv_connector",
    "get_kv_transfer_group()",
}

# Calls that must come in this order, in the text of a function.
ORDERS = [
    (
        f"{SCHEDULER}.schedule",
        [
            "_preempt_request",
            "get_num_new_matched_tokens",
            "allocate_slots",
            "update_state_after_alloc",
            "_build_kv_connector_meta",
        ],
    ),
    (
        f"{SCHEDULER}._preempt_request",
        [("free", "_free_request_blocks"), "prepend_request"],
    ),
    (
        f"{SCHEDULER}._update_from_kv_xfer_finished",
        ["update_connector_output", "finished_recving_kv_req_ids.add"],
    ),
    # Stores read their blocks before these are zeroed.
    (f"{V1_RUNNER}.execute_model", ["handle_preemptions", "_update_states"]),
    (
        f"{V1_CONNECTOR}._get_kv_connector_output",
        [
            "bind_connector_metadata",
            "start_load_kv",
            ("get_finished", "get_transfer_results"),
            "get_block_ids_with_load_errors",
            "build_connector_worker_meta",
            "clear_connector_metadata",
        ],
    ),
    (f"{V2_CONNECTOR}.pre_forward", ["handle_preemptions", "bind_connector_metadata"]),
    (
        f"{V2_CONNECTOR}.post_forward",
        [
            ("get_finished", "get_transfer_results"),
            "get_block_ids_with_load_errors",
            "build_connector_worker_meta",
            "clear_connector_metadata",
        ],
    ),
]


def alternatives(entry):
    return entry if isinstance(entry, tuple) else (entry,)


def find(path):
    """The object at ``module:name.name``."""
    module, _, names = path.partition(":")
    return functools.reduce(
        getattr, filter(None, names.split(".")), importlib.import_module(module)
    )


@functools.cache
def syntax_of(path):
    return ast.parse(textwrap.dedent(inspect.getsource(find(path))))


def attributes_of(cls):
    """Names that instances of ``cls`` have: the class's, fields, and what methods set."""
    names = set(dir(cls))
    for base in cls.__mro__[:-1]:
        names |= inspect.get_annotations(base).keys()
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError):
            continue  # written in C
        names |= {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and ast.unparse(node.value) == "self"
        }
    return names


def hooks_used_by(path):
    """Names that the code at ``path`` takes from a connector."""
    return {
        node.attr
        for node in ast.walk(syntax_of(path))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ON_A_CONNECTOR
    }


def calls_in(path):
    """What is called in the code at ``path``, as written there, from top to bottom."""
    calls = [node for node in ast.walk(syntax_of(path)) if isinstance(node, ast.Call)]
    calls.sort(key=lambda call: (call.end_lineno, call.end_col_offset))
    return ["." + ast.unparse(call.func) for call in calls]


def fits(owner, call):
    """Whether the call, written as an expression, is one that ``owner`` has and accepts."""
    expression = ast.parse(call, mode="eval").body
    function = getattr(find(owner), expression.func.id, None)
    if function is None:
        return False
    try:
        inspect.signature(function).bind(*(ast.unparse(argument) for argument in expression.args))
    except TypeError:
        return False
    return True


def takes_arguments_of(method, replaced):
    """Whether ``method`` may be called in every way that ``replaced`` may."""
    parameters = inspect.signature(method).parameters
    if {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} <= {
        parameter.kind for parameter in parameters.values()
    }:
        return True
    theirs = list(inspect.signature(replaced).parameters)
    return list(parameters)[: len(theirs)] == theirs


@pytest.mark.parametrize(("owner", "call"), CALLS, ids=lambda value: alternatives(value)[0])
def test_what_the_package_calls_accepts_the_call(owner, call):
    assert any(fits(owner, form) for form in alternatives(call)), (
        f"{owner} does not accept {' or '.join(alternatives(call))}"
    )


@pytest.mark.parametrize("owner", ATTRIBUTES)
def test_objects_have_the_attributes_that_the_package_uses(owner):
    there = attributes_of(find(owner))
    missing = [name for name in ATTRIBUTES[owner] if there.isdisjoint(alternatives(name))]
    assert not missing, f"{owner} has no {missing}"


@pytest.mark.parametrize("caller", CALLED_HOOKS)
def test_the_connector_is_asked_what_it_must_hear_of(caller):
    used = hooks_used_by(caller)
    silent = [hook for hook in CALLED_HOOKS[caller] if used.isdisjoint(alternatives(hook))]
    assert not silent, f"{caller} no longer calls {silent} on a connector"


@pytest.mark.parametrize("caller", CALLED_HOOKS)
def test_nothing_is_asked_of_a_connector_that_nobody_has_looked_at(caller):
    known = OTHER_HOOKS.union(*(alternatives(h) for hooks in CALLED_HOOKS.values() for h in hooks))
    unknown = hooks_used_by(caller) - known
    assert not unknown, f"{caller} asks a connector for {sorted(unknown)}: see what it wants"
    missing = [hook for hook in hooks_used_by(caller) if not hasattr(PreemptOffloadConnector, hook)]
    assert not missing, f"{caller} asks for {missing}, which the connector does not have"


@pytest.mark.parametrize(
    "ours", [PreemptOffloadConnector, RecomputeScheduler, AsyncRecomputeScheduler]
)
def test_methods_that_replace_vllms_take_the_same_arguments(ours):
    assert not inspect.isabstract(ours), f"{ours.__name__} lacks {ours.__abstractmethods__}"
    differing = {
        f"{cls.__name__}.{name}": f"vLLM's is {inspect.signature(replaced)}"
        for cls in ours.__mro__
        if cls.__module__.startswith("preempt_offload.")
        for name, method in vars(cls).items()
        if inspect.isfunction(method) and not name.startswith("__")
        if inspect.isfunction(replaced := getattr(super(cls, ours), name, None))
        if not takes_arguments_of(method, replaced)
    }
    assert not differing


@pytest.mark.parametrize(("function", "order"), ORDERS, ids=[path for path, _ in ORDERS])
def test_calls_come_in_the_order_that_the_package_counts_on(function, order):
    calls = calls_in(function)
    for wanted in order:
        place = next(
            (
                i
                for i, call in enumerate(calls)
                if any(call.endswith("." + name) for name in alternatives(wanted))
            ),
            None,
        )
        assert place is not None, f"{function} does not call {wanted} where it must: {order}"
        del calls[: place + 1]
