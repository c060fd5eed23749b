"""Many requests under heavy pressure, in every mode: the outputs of an undisturbed run."""

import itertools
from collections import Counter

import pytest

from harness import BLOCK, Engine, jobs
from preempt_offload import compat

# 28 requests; half of the prompts' tokens are shared by all of them.
JOBS = jobs(seed=7, lengths=[60 + 9 * i % 140 for i in range(28)], max_tokens=90, shared_prefix=40)


MODES = [
    *itertools.product((False, True), (False, True), (False, True), (False,)),
    # So that any vLLM preempts requests with a step under way.
    (True, False, False, True),
    (True, True, True, True),
]
NAMES = ("async", "prefix", "share", "unfenced")
TITLES = ("prefix caching", "shared host blocks", "steps under way")


@pytest.mark.parametrize(
    ("async_scheduling", "prefix_caching", "share", "unfenced"),
    [
        pytest.param(*mode, id="-".join(itertools.compress(NAMES, mode)) or "plain")
        for mode in MODES
    ],
)
def test_outputs_equal_those_of_a_run_never_preempted(
    model, undisturbed, record, async_scheduling, prefix_caching, share, unfenced
):
    with Engine(
        model,
        31,
        offload={"offload_host_memory_ratio": 4, "enable_offload_prefix_caching": share},
        fence=not unfenced,
        async_scheduling=async_scheduling,
        enable_prefix_caching=prefix_caching,
    ) as engine:
        in_flight = engine.preempts_in_flight
        outcome = engine.run(JOBS)
        block_bytes = compat.block_bytes(engine.scheduler.kv_cache_config)
    on = [title for title, on in zip(TITLES, (prefix_caching, share, unfenced), strict=True) if on]
    mode = ", ".join(on) or "no prefix caching"
    record(outcome, JOBS, kind="dense", mode=mode, async_scheduling=async_scheduling)
    assert outcome.tokens == undisturbed(JOBS)
    assert all(reason == "length" for reason in outcome.finish_reasons.values())

    victims = Counter(preemption.job for preemption in outcome.preemptions)
    assert len(outcome.preemptions) >= 10
    assert max(victims.values()) >= 2, "no request was preempted more than once"
    assert any(p.step_under_way for p in outcome.preemptions) == in_flight
    assert in_flight or not unfenced
    assert outcome.stats.preserved == len(outcome.preemptions)
    assert outcome.restored_tokens > 0
    assert outcome.bytes_loaded > 0
    assert outcome.recomputed_tokens == 0
    # What the host has already, of the request itself or of one that it shares with, is not stored
    # once more.
    stats = outcome.stats
    needed = sum(-(-preemption.num_computed // BLOCK) for preemption in outcome.preemptions)
    assert stats.stored_blocks + stats.mirrored_blocks + stats.shared_blocks == needed
    assert outcome.bytes_stored == stats.stored_blocks * block_bytes > 0
    assert (stats.shared_blocks > 0) == share
