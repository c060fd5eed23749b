"""Schedulers: vLLM's own, which never asks us; priorities; and finding us by module path."""

import dataclasses

import pytest

from harness import BLOCK, Engine, jobs

CROWD = jobs(seed=37, lengths=[60 + 9 * i % 140 for i in range(24)], max_tokens=60)
FLAG = "--scheduler-cls preempt_offload.RecomputeScheduler"


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
def test_under_a_scheduler_that_never_asks_we_say_so(
    model, undisturbed, record, caplog, async_scheduling
):
    with Engine(
        model,
        31,
        offload={"offload_host_memory_ratio": 4},
        scheduler_cls=None,
        async_scheduling=async_scheduling,
    ) as engine:
        at_start = [r.getMessage() for r in caplog.records if FLAG in r.getMessage()]
        caplog.clear()
        outcome = engine.run(CROWD)
    record(outcome, CROWD)
    assert len(at_start) == 1
    at_run_time = [message for message in caplog.messages if FLAG in message]
    assert len(at_run_time) == 1
    assert "was preempted" in at_run_time[0]
    assert outcome.preemptions
    assert not outcome.restores
    assert outcome.tokens == undisturbed(CROWD)


def test_under_ours_no_such_warning(model, caplog):
    with Engine(
        model,
        31,
        offload={},
        transfer={"kv_connector_module_path": "preempt_offload"},
        enable_prefix_caching=True,
    ) as engine:
        # A reset preempts, too, and its victims are on purpose not preserved.
        first = []

        def reset_once():
            if engine.scheduler.running and not first:
                first.append(engine.core.reset_prefix_cache(reset_running_requests=True))

        outcome = engine.run(CROWD, before_step=reset_once)
    assert first == [True]
    assert outcome.restores
    assert not [message for message in caplog.messages if FLAG in message]


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
def test_a_victim_scheduled_in_the_same_step_leaves_no_false_hash(
    model, undisturbed, record, async_scheduling
):
    """Such a victim's newest blocks have a hash, but no forward has filled them."""
    # The first job computes its prompt in chunks of three blocks. In its sixth chunk it takes
    # the last blocks, and then the second, of higher priority, needs one: the first goes, with
    # 15 blocks computed and 18 hashed. When it comes back, vLLM must not find more than 15.
    # The third, which never needs a second block, is there because vLLM may let a request
    # that is alone compute more than a chunk.
    lengths = [18 * BLOCK + 12, 2 * BLOCK - 3, BLOCK - 20]
    low, high, other = jobs(seed=41, lengths=lengths, max_tokens=10)
    crowd = (
        low,
        dataclasses.replace(high, priority=-1, arrival=1),
        dataclasses.replace(other, priority=-2),
    )
    with Engine(
        model,
        22,
        offload={},
        fence=False,
        async_scheduling=async_scheduling,
        enable_prefix_caching=True,
        scheduling_policy="priority",
        long_prefill_token_threshold=3 * BLOCK,
        max_model_len=20 * BLOCK,
    ) as engine:
        outcome = engine.run(crowd)
    record(
        outcome,
        crowd,
        kind="dense",
        mode="priorities, a victim scheduled in the same step",
        async_scheduling=async_scheduling,
    )
    assert [(p.job, p.num_computed) for p in outcome.preemptions] == [(0, 15 * BLOCK)]
    assert outcome.recomputed_tokens == 0
    assert outcome.tokens == undisturbed(crowd)


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
def test_priorities_under_pressure(model, undisturbed, record, async_scheduling):
    """Restored requests of low priority must run, though those before them have no room."""
    low = [job for job in jobs(41, [300 + 31 * i for i in range(4)], 40) for _ in range(2)]
    high = [job for job in jobs(43, [40 + 7 * i for i in range(8)], 70) for _ in range(2)]
    crowd = tuple(
        [dataclasses.replace(job, priority=20 - i) for i, job in enumerate(low)]
        + [dataclasses.replace(job, priority=-i, arrival=2 + i) for i, job in enumerate(high)]
    )
    with Engine(
        model,
        21,
        offload={"offload_host_memory_ratio": 4, "enable_offload_prefix_caching": True},
        async_scheduling=async_scheduling,
        enable_prefix_caching=True,
        scheduling_policy="priority",
        max_num_seqs=6,
        scheduler_reserve_full_isl=False,
        max_num_batched_tokens=64,
        long_prefill_token_threshold=24,
    ) as engine:
        outcome = engine.run(crowd)
    record(
        outcome,
        crowd,
        kind="dense",
        mode="priorities, more requests than `max_num_seqs`",
        async_scheduling=async_scheduling,
    )
    assert len(outcome.preemptions) >= 10
    assert outcome.restored_tokens > 0
    # Every prompt comes twice, so a request may find more when it comes back than it had.
    assert outcome.recomputed_tokens <= 0
    assert outcome.tokens == undisturbed(crowd)
