"""Schedulers: vLLM's own, which never asks us; priorities; and finding us by module path."""

import dataclasses

import pytest

from harness import Engine, jobs
from preempt_offload import compat

CROWD = jobs(seed=37, lengths=[60 + 9 * i % 140 for i in range(24)], max_tokens=60)
FLAG = "--scheduler-cls preempt_offload.RecomputeScheduler"


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
def test_under_a_scheduler_that_never_asks_we_say_so(
    model, undisturbed, record, caplog, async_scheduling
):
    with Engine(
        model,
        60,
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
        60,
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
def test_priority_victims_that_were_scheduled_in_the_same_step(
    model, undisturbed, record, monkeypatch, async_scheduling
):
    """Such a victim's newest blocks have a hash, but no forward has filled them."""
    # Long prompts of low priority come first, so they are scheduled first in every step;
    # those of high priority come later and take their blocks away. Every prompt comes twice,
    # so that a block with a false hash would be found.
    low = [job for job in jobs(41, [180 + 11 * i for i in range(6)], 40) for _ in range(2)]
    high = [job for job in jobs(43, [60 + 7 * i for i in range(8)], 70) for _ in range(2)]
    crowd = tuple(
        [dataclasses.replace(job, priority=20 - i) for i, job in enumerate(low)]
        + [dataclasses.replace(job, priority=-i, arrival=4 + i) for i, job in enumerate(high)]
    )
    evicted = []
    found = compat.uncomputed_cached_blocks

    def uncomputed_cached_blocks(*args):
        blocks = found(*args)
        evicted.extend(blocks)
        return blocks

    monkeypatch.setattr(compat, "uncomputed_cached_blocks", uncomputed_cached_blocks)
    with Engine(
        model,
        60,
        offload={"offload_host_memory_ratio": 4, "enable_offload_prefix_caching": True},
        async_scheduling=async_scheduling,
        enable_prefix_caching=True,
        scheduling_policy="priority",
        scheduler_reserve_full_isl=False,
        max_num_batched_tokens=64,
    ) as engine:
        outcome = engine.run(crowd)
    record(outcome, crowd)
    assert evicted, "no victim had a block that was hashed and not computed"
    assert outcome.restored_tokens > 0
    assert outcome.recomputed_tokens == 0
    assert outcome.tokens == undisturbed(crowd)
