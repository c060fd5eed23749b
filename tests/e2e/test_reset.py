"""Pauses and ``reset_prefix_cache``: after new weights, for example, no old KV may come back."""

import itertools

import pytest
from vllm.v1.core.sched.interface import PauseState

from harness import Engine, jobs
from preempt_offload import compat

CROWD = jobs(seed=19, lengths=[60 + 19 * i % 130 for i in range(24)], max_tokens=80)
RUNNING = {"reset_running_requests": True}


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def engine(model, request):
    with Engine(
        model,
        31,
        offload={"offload_host_memory_ratio": 4, "enable_offload_prefix_caching": True},
        async_scheduling=request.param,
        enable_prefix_caching=True,
    ) as engine:
        yield engine


@pytest.mark.parametrize("situation", ["Ready", "Mirrored", "loaded", "loading", "running"])
def test_running_requests_start_again_and_nothing_old_is_restored(
    engine, undisturbed, record, situation
):
    resets = []

    def someone_is():
        if situation in ("Ready", "Mirrored"):
            return engine.offload.table.counts()[situation] > 0 and not loads_under_way()
        if situation == "loading":
            return bool(loads_under_way())
        if situation == "running":
            return any(map(compat.outputs_under_way, engine.scheduler.running))
        waiting = itertools.chain(*compat.waiting_queues(engine.scheduler))
        loaded = any(request.status.name.endswith("KVS") for request in waiting)
        return loaded and not loads_under_way()

    def loads_under_way():
        return [job for job in range(len(CROWD)) if engine.state(job) == "Loading"]

    def reset_once():
        if resets or not someone_is():
            return
        waits_for_steps = engine.is_async and not engine.preempts_in_flight
        if situation == "loading" or (situation == "running" and waits_for_steps):
            # As without us, vLLM cannot reset while KV is being received, or while a step may
            # still write the blocks; but what comes in then must not be used either.
            with pytest.raises(RuntimeError, match="Failed to reset KV cache"):
                engine.core.reset_prefix_cache(**RUNNING)
        else:
            if waits_for_steps:
                engine.pause()
            assert engine.core.reset_prefix_cache(**RUNNING)
        # If any of this came back, outputs would differ.
        engine.worker._device._pool.fill_(0x41)
        resets.append(len(engine.preemptions))
        assert not any(
            count for state, count in engine.offload.table.counts().items() if state != "Loading"
        )
        pool = engine.offload.pool
        assert pool.num_evictable == 0

    if situation in ("loading", "running") and not engine.is_async:
        pytest.skip("between two steps of a synchronous engine nothing is under way")
    outcome = engine.run(CROWD, before_step=reset_once)
    record(outcome, CROWD)
    assert resets, f"no moment at which a request was {situation}"
    assert outcome.recomputed_tokens > 0
    assert len(outcome.preemptions) > resets[0], "nothing was preserved after the reset"
    assert outcome.tokens == undisturbed(CROWD)


def test_a_reset_that_vllm_refuses_keeps_everything(engine, undisturbed, record):
    """Running requests keep their KV then, so preserved ones may, too."""
    refused = []

    def reset():
        if engine.offload.table.counts()["Ready"] and not refused:
            before = engine.offload.table.counts()
            refused.append(engine.core.reset_prefix_cache())
            assert engine.offload.table.counts() == before

    outcome = engine.run(CROWD, before_step=reset)
    record(outcome, CROWD)
    assert refused == [False]
    assert outcome.tokens == undisturbed(CROWD)
    assert outcome.recomputed_tokens == 0


@pytest.mark.parametrize(
    "pause", [PauseState.PAUSED_ALL, PauseState.PAUSED_NEW], ids=["keep", "wait"]
)
def test_what_is_preserved_outlives_a_pause(engine, undisturbed, record, pause):
    preserved = []

    def pause_once():
        if engine.offload.table.counts()["Ready"] and not preserved:
            engine.pause(pause)
            assert not engine.offload.has_pending_transfers()
            preserved.append(engine.offload.table.counts()["Ready"])

    outcome = engine.run(CROWD, before_step=pause_once)
    record(outcome, CROWD)
    assert preserved[0] > 0
    assert outcome.tokens == undisturbed(CROWD)
    assert outcome.recomputed_tokens == 0
