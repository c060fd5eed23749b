"""Copies that fail: the request is recomputed or failed, as the policy says; the engine goes on."""

import pytest

from harness import Engine, jobs
from in_worker import fail_first_copies

CROWD = jobs(seed=29, lengths=[60 + 9 * i % 140 for i in range(24)], max_tokens=60)


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("direction", ["d2h", "h2d"])
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_failed_copy(model, undisturbed, record, monkeypatch, policy, direction, async_scheduling):
    failed = []
    with Engine(
        model,
        31,
        offload={"offload_host_memory_ratio": 4},
        transfer={"kv_load_failure_policy": policy},
        async_scheduling=async_scheduling,
    ) as engine:
        device = engine.worker._device
        monkeypatch.setattr(device, "begin", fail_first_copies(device.begin, direction, failed))
        outcome = engine.run(CROWD)
    record(outcome, CROWD)
    assert len(failed) == 3
    assert outcome.restored_tokens > 0
    expected = undisturbed(CROWD)
    errors = {i for i, reason in outcome.finish_reasons.items() if reason == "error"}
    # Only a load that fails can fail a request: a failed store is a KV cache lost in time.
    assert bool(errors) == (direction == "h2d" and policy == "fail")
    assert all(outcome.tokens[i] == expected[i] for i in outcome.tokens if i not in errors)
    if not errors:
        assert outcome.recomputed_tokens > 0
