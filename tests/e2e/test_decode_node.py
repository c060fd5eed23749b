"""``kv_role="kv_consumer"``: what cannot be preserved goes back to the proxy."""

import pytest

from harness import Engine, Job, jobs
from in_worker import fail_first_copies

CROWD = jobs(seed=13, lengths=[60 + 13 * i % 120 for i in range(24)], max_tokens=80)
CONSUMER = {"kv_role": "kv_consumer"}


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
def test_unpreserved_requests_are_returned_and_can_be_resent(
    model, undisturbed, record, async_scheduling
):
    with Engine(
        model,
        31,
        offload={"cpu_bytes_to_use_per_rank": 10 * 49152},
        transfer=CONSUMER,
        async_scheduling=async_scheduling,
    ) as engine:
        outcome = engine.run(CROWD)
        returned = [i for i, reason in outcome.stop_reasons.items() if reason == "recomputed"]
        # What a proxy does with them: the prompt and what has come so far, as a new prompt.
        resent = tuple(
            Job(CROWD[i].prompt + tuple(out), CROWD[i].max_tokens - len(out))
            for i, out in ((i, outcome.tokens[i]) for i in returned)
        )
        again = engine.run(resent[:4])
    record(outcome, CROWD)

    assert returned, "every request was preserved"
    assert outcome.stats.not_preserved == len(returned)
    assert outcome.restored_tokens > 0, "no request was preserved"
    assert outcome.recomputed_tokens == 0
    expected = undisturbed(CROWD)
    for i, tokens in outcome.tokens.items():
        if i in returned:
            assert outcome.finish_reasons[i] == "stop"
            assert tokens == expected[i][: len(tokens)]
        else:
            assert outcome.finish_reasons[i] == "length"
            assert tokens == expected[i]
    assert not any(again.stop_reasons.values())
    for i, job in zip(again.tokens, returned, strict=False):
        assert outcome.tokens[job] + again.tokens[i] == expected[job]


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def ample_engine(model, request):
    """An engine with host memory for all."""
    with Engine(
        model,
        31,
        offload={"offload_host_memory_ratio": 4},
        transfer=CONSUMER,
        async_scheduling=request.param,
    ) as engine:
        yield engine


def test_with_enough_host_memory_nothing_is_returned(ample_engine, undisturbed, record):
    outcome = ample_engine.run(CROWD)
    record(outcome, CROWD)
    assert outcome.preemptions
    assert outcome.restored_tokens > 0
    assert outcome.recomputed_tokens == 0
    assert outcome.tokens == undisturbed(CROWD)
    assert not any(outcome.stop_reasons.values())


def test_requests_whose_store_failed_are_returned(ample_engine, undisturbed, record, monkeypatch):
    failed = []
    device = ample_engine.worker._device
    monkeypatch.setattr(device, "begin", fail_first_copies(device.begin, "d2h", failed))
    outcome = ample_engine.run(CROWD)
    record(outcome, CROWD)
    returned = [i for i, reason in outcome.stop_reasons.items() if reason == "recomputed"]
    assert len(failed) == 3
    # A step's victims are stored by one copy, and share its fate.
    assert len(returned) >= 3
    assert outcome.restored_tokens > 0
    assert outcome.recomputed_tokens == 0
    expected = undisturbed(CROWD)
    for i, tokens in outcome.tokens.items():
        assert tokens == (expected[i][: len(tokens)] if i in returned else expected[i])
