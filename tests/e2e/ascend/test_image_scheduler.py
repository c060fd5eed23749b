"""The schedulers and the MultiConnector of vllm-ascend, with our connector, on a real engine."""

import importlib

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

import ascend_image
import test_aborts
from harness import Engine, jobs
from in_worker import fail_first_copies

CROWD = jobs(seed=7, lengths=[60 + 9 * i % 140 for i in range(24)], max_tokens=60, shared_prefix=40)
OURS = {
    "kv_connector": "PreemptOffloadConnector",
    "kv_connector_module_path": "preempt_offload",
    "kv_role": "kv_consumer",
    "kv_connector_extra_config": {"offload_host_memory_ratio": 4},
}
OTHER = {
    "kv_connector": "Idle",
    "kv_connector_module_path": __name__,
    "kv_role": "kv_consumer",
}


class Idle(KVConnectorBase_V1, SupportsHMA):
    """Is where a decode node has the connector that fetches KV from prefill nodes, and has none."""

    def start_load_kv(self, forward_context, **kwargs):
        pass

    def wait_for_layer_load(self, layer_name):
        pass

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        pass

    def wait_for_save(self):
        pass

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return 0, False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        assert num_external_tokens == 0

    def build_connector_meta(self, scheduler_output):
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request, block_ids):
        return False, None


class ImageEngine(Engine):
    """An engine of a decode node whose scheduler is vllm-ascend's."""

    def __init__(self, model, *, async_scheduling, transfer=None, **engine_args):
        prefix = "Async" if async_scheduling else ""
        super().__init__(
            model,
            31,
            transfer={"kv_role": "kv_consumer"} | (transfer or {}),
            async_scheduling=async_scheduling,
            scheduler_cls=f"{ascend_image.SCHEDULERS}.{prefix}RecomputeScheduler",
            **engine_args,
        )
        theirs = importlib.import_module(ascend_image.SCHEDULERS).RecomputeScheduler
        assert isinstance(self.scheduler, theirs)
        assert isinstance(self.scheduler, AsyncScheduler) == self.is_async == async_scheduling

    def settle(self):
        """Also ends what vllm-ascend 0.23 has returned, and then forgets.

        Such a request is in no queue and never ends, and vLLM goes on stepping for it.
        """
        scheduler = self.scheduler
        queued = {r.request_id for r in [*scheduler.waiting, *scheduler.skipped_waiting]}
        forgotten = scheduler.requests.keys() - queued - {r.request_id for r in scheduler.running}
        assert all(self.offload.table.status(request_id) is None for request_id in forgotten)
        self.core.abort_requests(list(forgotten))
        super().settle()


def returned_by(outcome):
    return {job for job, reason in outcome.stop_reasons.items() if reason == "recomputed"}


def check_outputs(outcome, expected, *, cut_short=()):
    assert outcome.tokens.keys() == expected.keys()
    for job, tokens in outcome.tokens.items():
        assert tokens == (expected[job][: len(tokens)] if job in cut_short else expected[job])


AMPLE, TIGHT = {"offload_host_memory_ratio": 4}, {"offload_host_memory_ratio": 0.15}
MODES = {
    "sync": {"async_scheduling": False},
    "async-prefix": {"async_scheduling": True, "enable_prefix_caching": True},
}


@pytest.fixture(scope="module")
def engine(model, request):
    with ImageEngine(model, **request.param) as engine:
        yield engine


def on_engines(**engine_args):
    """Runs a test in both modes; tests with equal arguments share their engines."""
    engines = [pytest.param(engine_args | mode, id=name) for name, mode in MODES.items()]
    return pytest.mark.parametrize("engine", engines, indirect=True, scope="module")


# Host memory for all; with a load policy other than vLLM's default.
on_ample_engines = on_engines(offload=AMPLE, transfer={"kv_load_failure_policy": "recompute"})
on_tight_engines = on_engines(offload=TIGHT | {"enable_offload_prefix_caching": True})


def check_restored(outcome, expected):
    assert len(outcome.preemptions) >= 5
    assert outcome.bytes_stored > 0
    assert outcome.restored_tokens > 0
    assert outcome.recomputed_tokens == 0
    check_outputs(outcome, expected)
    assert set(outcome.finish_reasons.values()) == {"length"}


@on_ample_engines
def test_requests_are_restored(engine, undisturbed, record):
    outcome = engine.run(CROWD)
    record(outcome, CROWD)
    check_restored(outcome, undisturbed(CROWD))
    assert outcome.stats.not_preserved == 0


@on_ample_engines
@pytest.mark.parametrize("direction", ["d2h", "h2d"])
def test_requests_whose_copies_fail_are_recomputed(
    engine, undisturbed, record, monkeypatch, direction
):
    failed = []
    device = engine.worker._device
    monkeypatch.setattr(device, "begin", fail_first_copies(device.begin, direction, failed))
    outcome = engine.run(CROWD)
    record(outcome, CROWD)
    assert len(failed) == 3
    assert outcome.restored_tokens > 0
    assert outcome.recomputed_tokens > 0
    check_outputs(outcome, undisturbed(CROWD))
    assert set(outcome.finish_reasons.values()) == {"length"}


@on_ample_engines
@pytest.mark.parametrize("state", test_aborts.STATES)
def test_abort(engine, undisturbed, record, state):
    test_aborts.test_abort(engine, undisturbed, record, state)


@on_tight_engines
def test_requests_that_cannot_be_preserved_are_returned(engine, undisturbed, record):
    outcome = engine.run(CROWD)
    record(outcome, CROWD)
    returned = returned_by(outcome)
    assert returned, "every request was preserved"
    assert outcome.stats.not_preserved == len(returned)
    assert {outcome.finish_reasons[job] for job in returned} == {"stop"}
    assert outcome.restored_tokens > 0, "no request was preserved"
    # From 0.26 on, what a step under way brings to a request that is returned is thrown away.
    assert 0 <= outcome.recomputed_tokens <= (len(returned) if engine.is_async else 0)
    check_outputs(outcome, undisturbed(CROWD), cut_short=returned)


@on_tight_engines
def test_requests_whose_load_fails_end_as_the_policy_says(engine, undisturbed, record, monkeypatch):
    failed = []
    device = engine.worker._device
    monkeypatch.setattr(device, "begin", fail_first_copies(device.begin, "h2d", failed, most=1))
    outcome = engine.run(CROWD)
    record(outcome, CROWD)
    errors = {job for job, reason in outcome.finish_reasons.items() if reason == "error"}
    assert len(failed) == 1
    assert errors
    check_outputs(outcome, undisturbed(CROWD), cut_short=returned_by(outcome) | errors)


@on_engines(offload={"connectors": [OTHER, OURS]}, transfer={"kv_connector": "MultiConnector"})
def test_requests_are_restored_by_a_child_of_its_multi_connector(engine, undisturbed, record):
    assert type(engine.scheduler.connector).__name__ == "AscendMultiConnector"
    outcome = engine.run(CROWD)
    record(outcome, CROWD)
    check_restored(outcome, undisturbed(CROWD))
    assert outcome.stats.not_preserved == 0
