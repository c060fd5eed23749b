"""The connector as vLLM makes and calls it, in both of its roles."""

import dataclasses
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from engine_support import BLOCK_SIZE, SPEC, STATES, WINDOW, kv_cache_config, random_
from vllm.config import (
    KVTransferConfig,
    SpeculativeConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.v1 import kv_cache_interface
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.structured_output import StructuredOutputManager

from preempt_offload import (
    PreemptOffloadConnector,
    RecomputeScheduler,
    compat,
    connector,
    host_memory,
)
from preempt_offload.metadata import NOTHING, OffloadWorkerMetadata

SCHEDULER, WORKER = KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER
PAGE = SPEC.page_size_bytes

# Kinds of groups that vLLM takes together with context parallelism.
SPREADABLE = [pytest.param((SPEC,), id="one group")]
if hasattr(SPEC, "dcp_sharded"):
    whole = dataclasses.replace(SPEC, dcp_sharded=False)
    SPREADABLE += [
        pytest.param((SPEC, STATES), id="states"),
        pytest.param((SPEC, whole), id="not all are spread"),
    ]


class Ring(type(WINDOW)):
    """A cache whose blocks are written over and over, in any version."""

    prefix_cacheable = False


RINGS = [Ring]
if hasattr(kv_cache_interface, "CircularBufferSpec"):
    RINGS.append(kv_cache_interface.CircularBufferSpec)


def a_request(num_tokens, *, num_preemptions=0, block_hashes=()):
    """What the connector looks at of vLLM's request."""
    return SimpleNamespace(
        request_id="a",
        num_tokens=num_tokens,
        num_output_placeholders=0,
        num_output_tokens=1,
        is_prefill_chunk=False,
        num_preemptions=num_preemptions,
        block_hashes=block_hashes,
        skip_reading_prefix_cache=False,
        kv_transfer_params=None,
    )


@pytest.fixture
def make(vllm_config):
    """Makes the connector through vLLM's factory, in one role."""

    def make(
        role,
        extra=None,
        *,
        kv_cache=None,
        ranks=None,
        device_type=None,
        speculative=False,
        **config_args,
    ):
        config = vllm_config(extra, **config_args)
        if speculative:
            # Its checks need a model to draft with.
            config.speculative_config = object.__new__(SpeculativeConfig)
        for name, value in (ranks or {}).items():
            setattr(config.parallel_config, name, value)
        if device_type:
            config.device_config.device_type = device_type
        return KVConnectorFactory.create_connector(
            config, role, kv_cache or kv_cache_config(["a"], num_blocks=8)
        )

    return make


@pytest.mark.parametrize("role", [SCHEDULER, WORKER])
def test_each_role_is_that_role_alone(make, role):
    made = make(role)
    assert type(made) is PreemptOffloadConnector
    assert made.role is role
    assert (made.scheduler is not None) is (role is SCHEDULER)
    assert (made.worker is not None) is (role is WORKER)


def test_a_call_to_the_other_role_says_so(make):
    with pytest.raises(AssertionError, match="worker role"):
        make(WORKER).has_preempted_request("a")
    with pytest.raises(AssertionError, match="scheduler role"):
        make(SCHEDULER).register_kv_caches({})


def test_the_hooks_of_recompute_schedulers_have_their_names():
    assert PreemptOffloadConnector.requires_full_blocks_on_update_after_alloc is True
    for hook in ("update_state_before_preempt", "has_preempted_request", "has_pending_transfers"):
        assert callable(getattr(PreemptOffloadConnector, hook))


# ---- the config ----


@pytest.mark.parametrize("role", [SCHEDULER, WORKER])
@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({"cpu_bytes_to_use_per_rnk": 1}, "did you mean 'cpu_bytes_to_use_per_rank'"),
        ({"cpu_bytes_to_use": "16"}, "cpu_bytes_to_use must be a whole number, not '16'"),
        ({"offload_host_memory_ratio": 0}, "above zero"),
        ({"kv_load_failure_policy": "recompute"}, "top level of --kv-transfer-config"),
        ({"cpu_bytes_to_use_per_rank": PAGE - 1}, f"less than one KV block .* {PAGE} bytes"),
    ],
)
def test_config_errors_surface_when_the_connector_is_made(make, role, extra, text):
    with pytest.raises(ValueError, match=text):
        make(role, extra)


def test_a_worker_refuses_a_pool_that_does_not_fit_into_memory(make, monkeypatch):
    monkeypatch.setattr(host_memory, "available_bytes", lambda root: 8 * PAGE - 1)
    with pytest.raises(ValueError, match="lower offload_host_memory_ratio"):
        make(WORKER)
    make(SCHEDULER)
    monkeypatch.setattr(host_memory, "available_bytes", lambda root: 8 * PAGE)
    make(WORKER)


def test_all_ranks_on_the_machine_count_as_when_none_had_allocated(make, monkeypatch):
    monkeypatch.setattr(host_memory, "available_bytes", lambda root: 8 * PAGE)
    monkeypatch.setattr(host_memory, "available_at_start", lambda: 16 * PAGE - 1)
    with pytest.raises(ValueError, match=rf"need {16 * PAGE} bytes .* for 2 rank"):
        make(WORKER, ranks={"world_size": 2})
    monkeypatch.setattr(host_memory, "available_at_start", lambda: 16 * PAGE)
    make(WORKER, ranks={"world_size": 2})


@pytest.fixture(params=["shared memory", "locked memory"])
def too_little(request, monkeypatch):
    """A machine on which the pool of eight pages is a little too large; what is said of it."""
    if request.param == "shared memory":
        shared = SimpleNamespace(f_blocks=8 * PAGE // 512 - 1, f_frsize=512)
        monkeypatch.setattr(host_memory, "os", SimpleNamespace(statvfs=lambda path: shared))
        return r"/dev/shm has only .* --shm-size=1g"
    limit = SimpleNamespace(
        RLIMIT_MEMLOCK=0, RLIM_INFINITY=-1, getrlimit=lambda which: (8 * PAGE - 1, 2**60)
    )
    monkeypatch.setattr(host_memory, "resource", limit)
    # A bit that no process has.
    monkeypatch.setattr(host_memory, "_CAP_IPC_LOCK", 63)
    return r"RLIMIT_MEMLOCK is .* --ulimit memlock=-1"


def test_pools_for_npus_must_fit_into_what_can_be_pinned(make, too_little):
    make(SCHEDULER, device_type="npu")
    with pytest.raises(ValueError, match=too_little):
        make(WORKER, device_type="npu")


def test_pools_for_cpus_are_not_pinned(make, too_little):
    make(WORKER, device_type="cpu")


def test_a_vllm_of_another_version_is_refused(make, monkeypatch):
    monkeypatch.setattr(connector.vllm, "__version__", "0.99.0")
    with pytest.raises(ImportError, match=r"supports vLLM 0\.23 to .* this is vLLM 0\.99\.0"):
        make(SCHEDULER)


@pytest.mark.parametrize(
    ("extra", "num_blocks"),
    [
        ({}, 8),
        ({"offload_host_memory_ratio": 2}, 16),
        ({"offload_host_memory_ratio": 0.25}, 2),
        ({"cpu_bytes_to_use_per_rank": 3 * PAGE}, 3),
        ({"cpu_bytes_to_use": 160 * PAGE}, 10),  # DP2TP8: over 16 ranks.
    ],
)
def test_the_budget_is_that_of_one_rank_and_logged_once(make, log, extra, num_blocks):
    ranks = {"world_size": 8, "data_parallel_size": 2}
    made = make(SCHEDULER, extra, ranks=ranks)
    assert made.scheduler.pool.capacity == num_blocks
    (line,) = [r.getMessage() for r in log.records if "uses" in r.getMessage()]
    assert f"{num_blocks} host blocks of {PAGE} bytes per rank" in line
    assert "over 16 rank(s)" in line
    log.clear()
    make(WORKER, extra, ranks=ranks)
    assert not log.records


@pytest.mark.parametrize(
    ("extra", "engine_id", "warned"),
    [
        ({"cpu_bytes_to_use": 20 * PAGE}, "id_dp1", True),
        ({"cpu_bytes_to_use": 20 * PAGE}, "id", False),
        ({"cpu_bytes_to_use_per_rank": 20 * PAGE}, "id_dp1", False),
        ({}, "id_dp1", False),
    ],
)
def test_bytes_that_vllm_keeps_us_from_dividing_are_warned_of(make, log, extra, engine_id, warned):
    make(SCHEDULER, extra, transfer={"engine_id": engine_id})
    assert bool(log.warnings) is warned
    if warned:
        (warning,) = log.warnings
        assert f"each rank takes {20 * PAGE} bytes" in warning
        assert "Use cpu_bytes_to_use_per_rank" in warning


def test_a_block_is_all_layers_of_the_rank(make):
    made = make(
        SCHEDULER,
        {"cpu_bytes_to_use_per_rank": 10 * PAGE},
        kv_cache=kv_cache_config(["a", "b"], ["c", "d"]),
    )
    assert made.scheduler.pool.capacity == 5


def test_a_store_is_complete_when_all_ranks_of_this_engine_have_it(make):
    # Those of other data parallel engines have other requests.
    made = make(SCHEDULER, ranks={"world_size": 2, "data_parallel_size": 4})
    request = a_request(17)
    assert made.update_state_before_preempt(request, ([1],), 16)
    made.build_connector_meta(None)
    for rank in (0, 1):
        assert made.get_num_new_matched_tokens(request, 0) == (None, False)
        report = OffloadWorkerMetadata({0: {rank: True}})
        made.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=report))
    assert made.get_num_new_matched_tokens(request, 0) == (16, True)


@pytest.mark.parametrize(("dcp", "pcp"), [(1, 1), (2, 1), (1, 3), (2, 3)])
@pytest.mark.parametrize("specs", SPREADABLE)
def test_a_block_covers_as_many_tokens_as_for_vllms_block_manager(vllm_config, specs, dcp, pcp):
    config = vllm_config(enable_prefix_caching=False)
    config.parallel_config.decode_context_parallel_size = dcp
    config.parallel_config.prefill_context_parallel_size = pcp
    kv_cache = kv_cache_config(*([f"{i}"] for i in range(len(specs))), spec=list(specs))
    block_size, hash_block_size = resolve_kv_cache_block_sizes(kv_cache, config)
    scheduler = RecomputeScheduler(
        vllm_config=config,
        kv_cache_config=kv_cache,
        structured_output_manager=StructuredOutputManager(config),
        block_size=block_size,
        hash_block_size=hash_block_size,
    )
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    tokens = compat.block_tokens(kv_cache, config)
    assert tokens == [manager.block_size for manager in managers]
    assert tokens[0] in (BLOCK_SIZE * dcp, BLOCK_SIZE * dcp * pcp)


def test_blocks_spread_over_ranks_are_stored_as_such(make):
    made = make(SCHEDULER, ranks={"decode_context_parallel_size": 2})
    request = a_request(97)
    assert made.update_state_before_preempt(request, ([1, 2, 3],), 96)
    assert len(made.build_connector_meta(None).store_pairs) == 3


def test_a_group_of_an_unknown_kind_is_refused_by_name(make):
    config = kv_cache_config(["a"])
    config.kv_cache_groups[0].kv_cache_spec = KVCacheSpec(block_size=16)
    with pytest.raises(ValueError, match=r"group 0 \(KVCacheSpec; layer 'a'\) .* know how"):
        make(SCHEDULER, kv_cache=config)


@pytest.mark.parametrize("ring", RINGS)
def test_a_ring_of_blocks_is_refused_by_name(make, ring):
    config = kv_cache_config(["a"], ["b"])
    config.kv_cache_groups[1].kv_cache_spec = ring(
        **{
            field.name: getattr(WINDOW, field.name)
            for field in dataclasses.fields(ring)
            if hasattr(WINDOW, field.name)
        }
    )
    with pytest.raises(ValueError, match=rf"group 1 \({ring.__name__}; layer 'b'\) .* know how"):
        make(SCHEDULER, kv_cache=config)


# ---- what cannot be preserved at all ----


def test_a_model_with_states_is_preserved(make, log):
    made = make(SCHEDULER, kv_cache=kv_cache_config(["a"], ["b"], spec=[SPEC, STATES]))
    assert not log.warnings
    request = a_request(17)
    assert made.update_state_before_preempt(request, ([1], [2]), 16)


def test_with_drafts_a_state_is_preserved(make, log):
    kv_cache = kv_cache_config(["a"], ["b"], spec=[SPEC, STATES])
    made = make(SCHEDULER, kv_cache=kv_cache, speculative=True)
    assert not log.warnings
    # A scheduler that tells which drafts were accepted.
    made.scheduler_cooperates()
    assert made.update_state_before_preempt(a_request(17), ([1], [2]), 16)


def test_states_that_drafts_may_have_passed_are_warned_of_at_the_start(make, log):
    states = dataclasses.replace(STATES, mamba_cache_mode="all")
    kv_cache = kv_cache_config(["a"], ["b"], spec=[SPEC, states])
    made = make(SCHEDULER, kv_cache=kv_cache, speculative=True)
    (warning,) = log.warnings
    assert "No preempted request will be preserved" in warning
    assert "Use mode 'align'" in warning
    assert not made.update_state_before_preempt(a_request(17), ([1], [2]), 16)


def test_with_several_mtp_modules_nothing_is_computed_one_by_one(make, log, monkeypatch):
    """vLLM would put it off for ever."""
    monkeypatch.setattr(VllmConfig, "num_prefill_lookahead_tokens", 2, raising=False)
    kv_cache = kv_cache_config(["a"], ["b"], spec=[SPEC, STATES])
    made = make(SCHEDULER, kv_cache=kv_cache, speculative=True)
    (warning,) = log.warnings
    assert "with several MTP modules" in warning
    assert made.scheduler.draft_states is None
    assert not made.update_state_before_preempt(a_request(17), ([1], [2]), 16)


@pytest.mark.parametrize(
    ("specs", "second_runner", "warned"),
    [([SPEC, STATES], "1", True), ([SPEC, STATES], "0", False), ([SPEC, SPEC], "1", False)],
)
def test_blocks_zeroed_before_they_are_stored_are_warned_of_at_the_start(
    vllm_config, log, monkeypatch, specs, second_runner, warned
):
    config = vllm_config()
    # A config made with it would ask for Triton.
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", second_runner)
    kv_cache = kv_cache_config(["a"], ["b"], spec=specs)
    KVConnectorFactory.create_connector(config, SCHEDULER, kv_cache)
    assert bool(log.warnings) is warned
    if warned:
        (warning,) = log.warnings
        assert "Set VLLM_USE_V2_MODEL_RUNNER=0" in warning


# ---- which scheduler will run ----


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_stock_scheduler_is_warned_of_at_the_start(make, log, asynchronous):
    make(SCHEDULER, scheduler_cls=None, asynchronous=asynchronous)
    (warning,) = log.warnings
    assert "--scheduler-cls preempt_offload.RecomputeScheduler" in warning
    log.clear()
    make(WORKER, scheduler_cls=None)
    assert not log.warnings, "once is enough"


@pytest.mark.parametrize(
    "scheduler_cls",
    ["preempt_offload.RecomputeScheduler", "preempt_offload.AsyncRecomputeScheduler"],
)
def test_our_scheduler_is_not_warned_of(make, log, scheduler_cls):
    make(SCHEDULER, scheduler_cls=scheduler_cls)
    assert not log.warnings


def test_our_scheduler_given_as_a_class_is_not_warned_of(make, log):
    make(SCHEDULER, scheduler_cls=RecomputeScheduler)
    assert not log.warnings


# ---- both roles together, with what crosses between their processes ----


def test_a_request_goes_to_the_host_and_comes_back(make):
    config = {"cpu_bytes_to_use_per_rank": 3 * PAGE, "enable_offload_prefix_caching": True}
    scheduler, worker = make(SCHEDULER, config), make(WORKER, config)
    cache = random_(torch.empty(8, PAGE // 4))
    worker.register_kv_caches({"a": cache})
    device_pool = BlockPool(8, enable_caching=True, hash_block_size=16)
    scheduler.bind_gpu_block_pool(device_pool)
    assert scheduler.scheduler.hash_tokens == 16
    request = a_request(41, num_preemptions=1, block_hashes=[b"one", b"two"])

    def step():
        """One step of the engine: the connector's calls, in vLLM's order."""
        meta = pickle.loads(pickle.dumps(scheduler.build_connector_meta(None)))
        worker.handle_preemptions(meta)
        worker.bind_connector_metadata(meta)
        worker.start_load_kv(None)
        worker.wait_for_layer_load("a")
        worker.save_kv_layer("a", cache, None)
        worker.wait_for_save()
        sending, recving = worker.get_finished(set())
        assert sending is None
        output = KVConnectorOutput(
            finished_recving=recving,
            invalid_block_ids=worker.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=pickle.loads(
                pickle.dumps(worker.build_connector_worker_meta())
            ),
        )
        worker.clear_connector_metadata()
        assert not output.invalid_block_ids
        scheduler.update_connector_output(output)
        return meta

    original = cache.clone()
    assert scheduler.update_state_before_preempt(request, ([1, 2, 3],), 40) is True
    assert scheduler.has_preempted_request("a")
    assert scheduler.has_pending_transfers()
    assert scheduler.get_num_new_matched_tokens(request, 0) == (None, False)
    step()
    assert not scheduler.has_pending_transfers()
    cache.zero_()

    assert scheduler.get_num_new_matched_tokens(request, 0) == (40, True)
    blocks = KVCacheBlocks((tuple(device_pool.get_new_blocks(5)),))
    scheduler.update_state_after_alloc(request, blocks, 40)
    assert scheduler.has_pending_transfers()
    assert not scheduler.has_preempted_request("a")
    assert scheduler.reset_cache() is False
    meta = step()
    restored = [block.block_id for block in blocks.blocks[0]][:3]
    assert meta.load_pairs[:, 1].tolist() == restored
    assert torch.equal(cache[restored].view(torch.int32), original[1:4].view(torch.int32))
    assert not scheduler.has_pending_transfers()
    assert len(pickle.dumps(step())) == len(pickle.dumps(NOTHING))

    assert scheduler.reset_cache() is True
    assert scheduler.scheduler.pool.num_free == 3


def test_a_load_restores_every_group(make):
    made = make(SCHEDULER, kv_cache=kv_cache_config(["a", "b"], ["c"], ["d"]))
    request = a_request(17)
    assert made.get_loaded_kv_cache_group_ids(request) == (0, 1, 2)


@pytest.mark.parametrize("method", ["request_finished", "request_finished_all_groups"])
def test_a_finished_request_is_forgotten_and_vllm_may_free_its_blocks(make, method):
    made = make(SCHEDULER)
    request = a_request(17)
    assert made.update_state_before_preempt(request, ([1],), 16)
    assert getattr(made, method)(request, []) == (False, None)
    assert not made.has_preempted_request("a")


def test_reports_of_other_connectors_are_none_of_ours(make):
    made = make(SCHEDULER)
    made.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=object()))
    made.update_connector_output(KVConnectorOutput(finished_recving={"somebody's"}))
    assert not made.has_pending_transfers()


def test_a_load_error_reaches_vllm(make):
    worker = make(WORKER)
    worker.register_kv_caches({"a": torch.empty(8, PAGE // 4)})
    scheduler = make(SCHEDULER)
    request = a_request(17)
    scheduler.update_state_before_preempt(request, ([1],), 16)
    scheduler.build_connector_meta(None)
    report = OffloadWorkerMetadata({0: {0: True}})
    scheduler.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=report))
    meta = scheduler.build_connector_meta(None)
    wrong = type(meta)(None, None, ("a",), np.array([[0, 5, 99]], np.uint32))
    worker.bind_connector_metadata(wrong)
    worker.start_load_kv(None)
    assert worker.get_finished(set()) == (None, {"a"})
    assert worker.get_block_ids_with_load_errors() == {5}
    assert worker.build_connector_worker_meta().failed_loads == {"a"}


def test_multi_connector_takes_us_as_a_child(make):
    child = {"kv_connector": "PreemptOffloadConnector", "kv_role": "kv_both"}
    made = make(
        SCHEDULER,
        {"connectors": [child]},
        transfer={"kv_connector": "MultiConnector"},
    )
    (ours,) = made._connectors
    assert isinstance(ours, PreemptOffloadConnector)
    assert ours.scheduler.pool.capacity == 8


def test_load_failure_policy_inside_a_child_is_told_where_it_belongs(make):
    child = {
        "kv_connector": "PreemptOffloadConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }
    extra = {"connectors": [child]}
    transfer = KVTransferConfig(
        kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config=extra
    )
    whole = SimpleNamespace(kv_transfer_config=transfer)
    # As in a worker, where vLLM tells everybody the config that the user gave.
    with (
        set_current_vllm_config(whole),
        pytest.raises(ValueError, match=r"kv_load_failure_policy .* top level"),
    ):
        make(SCHEDULER, extra, transfer={"kv_connector": "MultiConnector"})


def test_the_connector_needs_its_transfer_config(vllm_config):
    config = vllm_config()
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="PreemptOffloadConnector", kv_role="kv_both"
    )
    assert PreemptOffloadConnector(config, SCHEDULER, kv_cache_config(["a"])).scheduler is not None
    config.kv_transfer_config = None
    with pytest.raises(ValueError, match="kv_transfer_config"):
        PreemptOffloadConnector(config, SCHEDULER, kv_cache_config(["a"]))
