"""Requests preempted within their prompt, or partly found in the device's prefix cache."""

import pytest

from harness import BLOCK, Engine, jobs


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
def test_preempted_in_the_middle_of_a_chunked_prefill(model, undisturbed, record, async_scheduling):
    # Prompts longer than a step's tokens, and a pool that runs out while some are half done.
    # Admission would normally wait for room for the whole prompt; without that reservation,
    # prompts are preempted as on a decode node that others push aside.
    crowd = jobs(seed=3, lengths=[90, 100, 110, 230, 225, 215], max_tokens=40)
    with Engine(
        model,
        18,
        offload={"offload_host_memory_ratio": 4},
        async_scheduling=async_scheduling,
        max_model_len=400,
        max_num_batched_tokens=32,
        scheduler_reserve_full_isl=False,
    ) as engine:
        outcome = engine.run(crowd)
    record(
        outcome,
        crowd,
        kind="dense",
        mode="chunked prefill, preempted in the prompt",
        async_scheduling=async_scheduling,
    )

    in_prefill = [p for p in outcome.preemptions if p.num_computed < len(crowd[p.job].prompt)]
    assert in_prefill, "no request was preempted before its prompt was through"
    assert outcome.tokens == undisturbed(crowd)
    assert outcome.recomputed_tokens == 0
    restored = {(restore.job, restore.end) for restore in outcome.restores}
    assert {(p.job, p.num_computed) for p in in_prefill} <= restored


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
def test_local_prefix_hits_of_every_extent(model, undisturbed, record, async_scheduling):
    """The device's prefix cache may still have none, some, or all full blocks of a victim."""
    crowd = jobs(seed=5, lengths=[40 + 37 * i % 160 for i in range(40)], max_tokens=100)
    with Engine(
        model,
        31,
        offload={"offload_host_memory_ratio": 4},
        async_scheduling=async_scheduling,
        enable_prefix_caching=True,
    ) as engine:
        outcome = engine.run(crowd)
    record(
        outcome,
        crowd,
        kind="dense",
        mode="prefix caching, some of a victim's blocks evicted",
        async_scheduling=async_scheduling,
    )

    extents = set()
    for restore in outcome.restores:
        full = restore.end // BLOCK * BLOCK
        extents.add({0: "none", full: "all"}.get(restore.start, "part"))
    assert extents == {"none", "part", "all"}
    assert outcome.tokens == undisturbed(crowd)
    assert outcome.recomputed_tokens == 0
