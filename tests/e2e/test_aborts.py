"""Clients that go away, whatever state their request's KV is in."""

import pytest

from harness import Engine, jobs

CROWD = jobs(seed=17, lengths=[60 + 17 * i % 130 for i in range(24)], max_tokens=80)
# Copies on this engine are through within their step, so between two steps nobody is
# Storing or Loading; within a step, between its schedule() and its output, they are.
WITHIN_STEP = ("Storing", "Loading")
STATES = ("queued", "Storing", "Ready", "Loading", "Mirrored")
MOST_ABORTS = 4


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def engine(model, request):
    with Engine(
        model, 31, offload={"offload_host_memory_ratio": 2}, async_scheduling=request.param
    ) as engine:
        yield engine


@pytest.mark.parametrize("state", STATES)
def test_abort(engine, undisturbed, record, state):
    aborted = set()

    def abort_some():
        for job in range(len(CROWD)):
            request_id = engine.request_id(job)
            if request_id is None or job in aborted or len(aborted) == MOST_ABORTS:
                continue
            queued = not engine.scheduler.requests[request_id].num_computed_tokens
            if state == ("queued" if queued and not engine.state(job) else engine.state(job)):
                aborted.add(job)
                if state in WITHIN_STEP:
                    engine.abort_within_step(job)
                else:
                    engine.abort(job)

    hook = "after_schedule" if state in WITHIN_STEP else "before_step"
    outcome = engine.run(CROWD, **{hook: abort_some})
    record(outcome, CROWD)

    assert len(aborted) == MOST_ABORTS, f"hardly any request was ever {state}"
    assert outcome.restored_tokens > 0
    expected = undisturbed(CROWD)
    rest = [job for job in range(len(CROWD)) if job not in aborted]
    assert {job: outcome.tokens[job] for job in rest} == {job: expected[job] for job in rest}
