"""Two workers in processes of their own: a request is Ready when both have stored it."""

import pytest

from harness import Engine, jobs

CROWD = jobs(seed=53, lengths=[60 + 9 * i % 140 for i in range(24)], max_tokens=60)


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def engine(model, request):
    with Engine(
        model,
        31,
        offload={"offload_host_memory_ratio": 4},
        transfer={"kv_load_failure_policy": "recompute"},
        async_scheduling=request.param,
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
    ) as engine:
        yield engine


@pytest.fixture
def in_workers(engine):
    """Puts faults into the workers, for the time of a test."""
    yield engine.in_workers
    engine.in_workers("copy_well")


@pytest.fixture
def reports(engine, monkeypatch):
    """By store: the ranks in each report, whether they succeeded, and the states after it."""
    reports = {}
    offload = engine.offload
    update = offload.update_connector_output

    def update_connector_output(reported, finished_recving):
        stores = reported.stores if reported is not None else {}
        requests = {event: list(offload._storing[event]) for event in stores}
        update(reported, finished_recving)
        for event, by_rank in stores.items():
            status = [offload.table.status(request_id) for request_id in requests[event]]
            states = {known and known[0] for known in status}
            reports.setdefault(event, []).append((by_rank, states))

    monkeypatch.setattr(offload, "update_connector_output", update_connector_output)
    return reports


def test_outputs_of_two_workers_equal_those_of_one(engine, undisturbed, record, reports):
    outcome = engine.run(CROWD)
    record(outcome, CROWD, kind="dense", mode="TP=2", async_scheduling=engine.is_async)
    assert outcome.tokens == undisturbed(CROWD)
    assert len(outcome.preemptions) >= 5
    assert outcome.restored_tokens > 0
    assert outcome.recomputed_tokens == 0
    stored, loaded = zip(*engine.in_workers("bytes_copied"), strict=True)
    assert stored[0] == stored[1] > 0
    assert loaded[0] == loaded[1] > 0
    assert reports
    for report in reports.values():
        assert report == [({0: True, 1: True}, {"Ready"})]


@pytest.mark.parametrize("late", [0, 1])
def test_a_request_is_ready_when_the_last_worker_has_stored_it(
    engine, undisturbed, record, reports, in_workers, late
):
    in_workers("report_late", late)
    outcome = engine.run(CROWD)
    record(outcome, CROWD)
    assert outcome.tokens == undisturbed(CROWD)
    assert outcome.restored_tokens > 0
    assert outcome.recomputed_tokens == 0
    assert reports
    for report in reports.values():
        assert report == [({1 - late: True}, {"Storing"}), ({late: True}, {"Ready"})]


def test_a_request_that_one_worker_failed_to_store_is_computed_anew(
    engine, undisturbed, record, reports, in_workers
):
    in_workers("fail_first_copies", 1, "d2h")
    outcome = engine.run(CROWD)
    record(outcome, CROWD)
    assert outcome.tokens == undisturbed(CROWD)
    assert outcome.restored_tokens > 0
    assert outcome.recomputed_tokens > 0
    events = sorted(reports)
    assert [reports[event] for event in events[:3]] == [[({0: True, 1: False}, {None})]] * 3
    for event in events[3:]:
        assert reports[event] == [({0: True, 1: True}, {"Ready"})]


def test_a_request_that_one_worker_failed_to_load_is_computed_anew(
    engine, undisturbed, record, in_workers
):
    in_workers("fail_first_copies", 1, "h2d")
    outcome = engine.run(CROWD)
    record(outcome, CROWD)
    assert outcome.tokens == undisturbed(CROWD)
    assert outcome.recomputed_tokens > 0
