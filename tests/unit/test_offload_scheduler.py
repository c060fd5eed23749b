"""The scheduler role, with vLLM's scheduler and the workers played by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from unit_support import ADVICE, Request, Scene

from preempt_offload.metadata import NOTHING, OffloadWorkerMetadata


@pytest.fixture
def scene():
    return Scene()


@pytest.fixture
def request_a():
    """A request of 11 tokens, of which the last is not computed: 3 blocks of 4 tokens."""
    return Request("a", num_tokens=11)


BLOCKS = ([10, 11, 12],)
NEW_BLOCKS = ([20, 21, 22],)


# ---- the whole life ----


def test_the_life_of_a_preempted_request(scene, request_a):
    scheduler = scene.scheduler
    assert scene.preempt(request_a, BLOCKS, 10) is True
    assert scheduler.has_preempted_request("a")
    assert scheduler.has_pending_transfers()
    assert scene.ask(request_a) == (None, False)

    meta = scene.step()
    assert meta.store_event == 0
    assert meta.store_pairs.dtype == np.uint32
    assert meta.store_pairs.tolist() == [[0, 10, 1], [0, 11, 2], [0, 12, 3]]
    assert (meta.load_requests, meta.load_pairs) == ((), None)
    assert scene.ask(request_a) == (None, False)

    scene.report_store(meta.store_event)
    assert not scheduler.has_pending_transfers()
    assert scheduler.has_preempted_request("a")
    assert scene.ask(request_a) == (10, True)

    scene.allocate(request_a, NEW_BLOCKS, 10)
    assert scene.state("a") == "Loading"
    assert scheduler.has_pending_transfers()
    assert not scheduler.has_preempted_request("a")
    meta = scene.step()
    assert (meta.store_event, meta.store_pairs) == (None, None)
    assert meta.load_requests == ("a",)
    assert meta.load_pairs.tolist() == [[0, 20, 1], [0, 21, 2], [0, 22, 3]]

    scene.report_loads("a")
    assert scene.state("a") == "Mirrored"
    assert not scheduler.has_pending_transfers()
    assert scene.ask(request_a, 10) == (0, False)

    scheduler.request_finished("a")
    scene.assert_nothing_left()


def test_nobody_knows_a_request_that_was_never_preempted(scene, request_a):
    assert not scene.scheduler.has_preempted_request("a")
    assert not scene.scheduler.has_pending_transfers()
    assert scene.ask(request_a) == (0, False)
    scene.allocate(request_a, BLOCKS, 0)
    scene.scheduler.request_finished("a")
    assert scene.step() is NOTHING
    scene.assert_nothing_left()


def test_nothing_computed_is_nothing_to_preserve(scene, request_a):
    assert scene.preempt(request_a, ([],), 0) is False
    assert not scene.scheduler.has_preempted_request("a")
    assert scene.step() is NOTHING


# ---- metadata ----


def test_a_step_without_work_costs_nothing(scene, request_a):
    assert scene.step() is NOTHING
    meta = scene.preserve(request_a, BLOCKS, 10)
    assert meta is not NOTHING
    assert scene.step() is NOTHING, "what was handed out once is not handed out again"


def test_one_step_carries_all_its_stores_under_one_event(scene, request_a):
    request_b = Request("b", num_tokens=5)
    assert scene.preempt(request_a, BLOCKS, 10)
    assert scene.preempt(request_b, ([13],), 4)
    meta = scene.step()
    assert meta.store_pairs.tolist() == [[0, 10, 1], [0, 11, 2], [0, 12, 3], [0, 13, 4]]
    scene.report_store(meta.store_event)
    assert scene.ask(request_a) == (10, True)
    assert scene.ask(request_b) == (4, True)


def test_each_step_with_stores_has_an_event_of_its_own(scene, request_a):
    request_b = Request("b", num_tokens=5)
    assert scene.preempt(request_a, BLOCKS, 10)
    first = scene.step()
    assert scene.preempt(request_b, ([13],), 4)
    second = scene.step()
    assert first.store_event != second.store_event
    scene.report_store(second.store_event)
    assert scene.ask(request_a) == (None, False)
    assert scene.ask(request_b) == (4, True)
    scene.report_store(first.store_event)
    assert scene.ask(request_a) == (10, True)


def test_one_step_carries_stores_and_loads(scene, request_a):
    scene.preserve(request_a, BLOCKS, 10)
    scene.allocate(request_a, NEW_BLOCKS, 10)
    request_b = Request("b", num_tokens=5)
    assert scene.preempt(request_b, ([13],), 4)
    meta = scene.step()
    assert meta.store_pairs.tolist() == [[0, 13, 4]]
    assert meta.load_requests == ("a",)
    assert meta.load_pairs.tolist() == [[0, 20, 1], [0, 21, 2], [0, 22, 3]]


def test_a_store_of_nothing_new_is_reported_all_the_same(scene):
    request = Request("a", num_tokens=9)
    scene.preserve(request, ([10, 11],), 8)
    scene.restore(request, ([20, 21],))
    assert scene.preempt(request, ([20, 21],), 8)
    meta = scene.step()
    assert meta.store_event == 1
    assert meta.store_pairs.shape == (0, 3)
    scene.report_store(meta.store_event)
    assert scene.ask(request) == (8, True)


# ---- asking ----


def test_asking_changes_nothing_however_often(scene, request_a):
    scene.preserve(request_a, BLOCKS, 10)
    stats = dataclasses.replace(scene.scheduler.stats)
    for _ in range(5):
        assert scene.ask(request_a) == (10, True)
        assert scene.ask(request_a, 4) == (6, True)
        assert scene.ask(request_a, 12) == (0, False)
    assert scene.state("a") == "Ready"
    assert scene.scheduler.stats == stats
    assert not scene.scheduler.has_pending_transfers()
    assert scene.step() is NOTHING


def test_a_request_with_a_step_under_way_has_to_wait(scene, request_a):
    scene.preserve(request_a, BLOCKS, 11)
    request_a.num_output_placeholders = 1
    assert scene.ask(request_a) == (None, False)
    request_a.num_output_placeholders = 0
    request_a.num_tokens = 12
    assert scene.ask(request_a) == (11, True)


@pytest.mark.parametrize(("num_tokens", "restored"), [(12, 10), (11, 10), (10, 9), (9, 8), (2, 1)])
def test_the_last_token_is_never_restored(scene, num_tokens, restored):
    # Of what was computed when it was preempted, drafts may have been rejected since.
    scene.preserve(Request("a", num_tokens=11), BLOCKS, 10)
    request = Request("a", num_tokens=num_tokens)
    assert scene.ask(request) == (restored, True)
    scene.allocate(request, NEW_BLOCKS, restored)
    positions = -(-restored // 4)
    assert scene.step().load_pairs[:, 1].tolist() == NEW_BLOCKS[0][:positions]


def test_a_request_of_one_token_has_nothing_to_restore(scene):
    request = Request("a", num_tokens=1)
    scene.preserve(request, ([10],), 1)
    assert scene.ask(request) == (0, False)


# ---- the device's own prefix cache ----


@pytest.mark.parametrize(
    ("hit", "loaded"), [(0, [20, 21, 22]), (4, [21, 22]), (8, [22])], ids=["none", "one", "two"]
)
def test_what_the_device_still_has_is_not_loaded(scene, request_a, hit, loaded):
    scene.preserve(request_a, BLOCKS, 10)
    assert scene.ask(request_a, hit) == (10 - hit, True)
    scene.allocate(request_a, NEW_BLOCKS, 10 - hit)
    assert scene.step().load_pairs[:, 1].tolist() == loaded
    assert scene.scheduler.stats.restored_tokens == 10 - hit


def test_the_hit_at_allocation_counts_not_the_one_when_asked(scene, request_a):
    scene.preserve(request_a, BLOCKS, 10)
    assert scene.ask(request_a, 8) == (2, True)
    assert scene.ask(request_a, 4) == (6, True)
    scene.allocate(request_a, NEW_BLOCKS, 6)
    assert scene.step().load_pairs[:, 1].tolist() == [21, 22]


def test_if_the_device_has_everything_the_request_is_mirrored(scene):
    request = Request("a", num_tokens=9)
    scene.preserve(request, ([10, 11],), 8)
    assert scene.ask(request, 8) == (0, False)
    scene.allocate(request, ([10, 11],), 0)
    assert scene.state("a") == "Mirrored"
    assert scene.step() is NOTHING
    assert scene.ask(request, 8) == (0, False)
    assert not scene.scheduler.has_preempted_request("a")
    scene.scheduler.request_finished("a")
    scene.assert_nothing_left()


def test_a_connector_that_was_not_chosen_loads_nothing(scene, request_a):
    # With MultiConnector another one may restore the request.
    scene.preserve(request_a, BLOCKS, 10)
    scene.allocate(request_a, NEW_BLOCKS, 0)
    assert scene.state("a") == "Mirrored"
    assert scene.step() is NOTHING


def test_the_allocation_after_the_load_is_no_load(scene, request_a):
    scene.preserve(request_a, BLOCKS, 10)
    scene.restore(request_a, NEW_BLOCKS)
    assert scene.state("a") == "Mirrored"
    assert scene.step() is NOTHING


def test_an_allocation_during_the_load_is_ignored(scene, request_a):
    scene.preserve(request_a, BLOCKS, 10)
    scene.allocate(request_a, NEW_BLOCKS, 10)
    scene.step()
    scene.allocate(request_a, NEW_BLOCKS, 0)
    assert scene.state("a") == "Loading"
    assert scene.step() is NOTHING


def test_lookahead_blocks_are_not_restored(scene, request_a):
    scene.preserve(request_a, ([10, 11, 12, 13],), 10)
    scene.allocate(request_a, ([20, 21, 22, 23, 24],), 10)
    assert scene.step().load_pairs[:, 1].tolist() == [20, 21, 22]


def test_null_blocks_of_a_sliding_window_keep_their_place(scene):
    request = Request("a", num_tokens=16)
    stored = scene.preserve(request, ([0, 0, 20, 21],), 15).store_pairs
    assert stored[:, 1].tolist() == [20, 21]
    loaded = scene.restore(request, ([0, 0, 30, 31],)).load_pairs
    assert loaded.tolist() == [[0, 30, stored[0, 2]], [0, 31, stored[1, 2]]]


# ---- restored, but not scheduled yet ----


@pytest.fixture
def landed(scene, request_a):
    """A scene where the load of request a is through, and request b is ready."""
    scene.preserve(Request("b", num_tokens=5), ([13],), 4)
    scene.preserve(request_a, BLOCKS, 10)
    scene.allocate(request_a, NEW_BLOCKS, 10)
    scene.step()
    scene.report_loads("a")
    return scene


@pytest.mark.parametrize("waiting", ["b", "never preempted"])
def test_others_wait_for_a_restored_request_that_holds_blocks_and_does_not_run(landed, waiting):
    assert landed.ask(Request(waiting, num_tokens=5)) == (None, False)


def test_a_restored_request_does_not_wait_for_itself(landed, request_a):
    assert landed.ask(request_a) == (0, False)


def test_others_may_come_once_it_is_scheduled(landed, request_a):
    landed.allocate(request_a, NEW_BLOCKS, 0)
    assert landed.ask(Request("b", num_tokens=5)) == (4, True)


def test_others_may_come_once_it_is_aborted(landed):
    landed.scheduler.request_finished("a")
    assert landed.ask(Request("b", num_tokens=5)) == (4, True)


def test_nobody_waits_for_a_request_aborted_during_its_load(scene, request_a):
    scene.preserve(request_a, BLOCKS, 10)
    scene.allocate(request_a, NEW_BLOCKS, 10)
    scene.step()
    scene.scheduler.request_finished("a")
    scene.report_loads("a")
    assert scene.ask(Request("b", num_tokens=5)) == (0, False)


def test_two_restored_requests_do_not_wait_for_each_other(landed, request_a):
    request_b = Request("b", num_tokens=5)
    landed.allocate(request_b, ([23],), 4)
    landed.step()
    landed.report_loads("b")
    assert landed.ask(request_a) == (0, False)
    assert landed.ask(request_b) == (0, False)
    landed.allocate(request_b, ([23],), 0)
    assert landed.ask(Request("c", num_tokens=5)) == (None, False)
    landed.allocate(request_a, NEW_BLOCKS, 0)
    assert landed.ask(Request("c", num_tokens=5)) == (0, False)


# ---- beside a connector that pulls from prefill nodes ----


@pytest.fixture
def remote():
    return Request("remote", num_tokens=5, kv_transfer_params={"do_remote_prefill": True})


def test_nothing_is_pulled_while_a_store_may_read_its_blocks(scene, request_a, remote):
    assert scene.ask(remote) == (0, False)
    scene.preempt(request_a, BLOCKS, 10)
    assert scene.ask(remote) == (None, False)
    event = scene.step().store_event
    assert scene.ask(remote) == (None, False)
    assert scene.ask(Request("local", num_tokens=5)) == (0, False)
    scene.report_store(event)
    assert scene.ask(remote) == (0, False)


def test_others_wait_for_a_pulled_request_that_holds_blocks_and_does_not_run(scene, remote):
    scene.ask(remote)
    scene.report_loads("remote")
    remote.kv_transfer_params["do_remote_prefill"] = False
    assert scene.ask(Request("other", num_tokens=5)) == (None, False)
    assert scene.ask(remote) == (0, False)
    scene.allocate(remote, ([10, 11],), 0)
    assert scene.ask(Request("other", num_tokens=5)) == (0, False)


def test_nobody_waits_for_a_request_aborted_while_it_was_pulled(scene, remote):
    scene.ask(remote)
    scene.scheduler.request_finished("remote")
    scene.report_loads("remote")
    assert scene.ask(Request("other", num_tokens=5)) == (0, False)


# ---- preempted again ----


def test_a_second_preemption_copies_only_new_blocks(scene, request_a):
    scene.preserve(request_a, BLOCKS, 10)
    scene.restore(request_a, NEW_BLOCKS)
    request_a.num_tokens = 14
    second = scene.preserve(request_a, ([20, 21, 22, 23],), 13)
    assert second.store_pairs[:, 1].tolist() == [22, 23]
    assert scene.scheduler.stats.mirrored_blocks == 2

    # Both generations of blocks come back together, each to its place.
    loaded = scene.restore(request_a, ([30, 31, 32, 33],)).load_pairs
    hosts = dict(loaded[:, 1:].tolist())
    assert [hosts[30], hosts[31]] == [1, 2]
    assert [hosts[32], hosts[33]] == second.store_pairs[:, 2].tolist()


def test_many_preemptions_hold_no_more_blocks_than_the_request_has(scene):
    request = Request("a", num_tokens=2)
    for num_computed_tokens in range(1, 31):
        request.num_tokens = num_computed_tokens + 1
        blocks = ([10 + i for i in range(-(-num_computed_tokens // 4))],)
        scene.preserve(request, blocks, num_computed_tokens)
        assert 16 - scene.num_available == len(blocks[0])
        scene.restore(request, blocks)
        assert 16 - scene.num_available == num_computed_tokens // 4
    # Every block is stored once when full, and before that once for each partial state.
    assert scene.scheduler.stats.stored_blocks == 30
    scene.scheduler.request_finished("a")
    scene.assert_nothing_left()


def test_rejected_drafts_are_not_mirrored(scene):
    # Preempted with three drafts in flight: 13 tokens stored, of which 11 turn out right.
    request = Request("a", num_tokens=10, num_output_placeholders=4)
    scene.preserve(request, ([10, 11, 12, 13],), 13)
    request.num_tokens, request.num_output_placeholders = 12, 0
    # Another connector restores it, and it is preempted again with all 12 tokens computed.
    scene.allocate(request, ([20, 21, 22],), 0)
    request.num_tokens = 13
    assert scene.preempt(request, ([20, 21, 22],), 12)
    assert scene.step().store_pairs[:, 1].tolist() == [22]


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("num_kept", [8, 10])
def test_a_session_that_has_not_kept_all_that_was_stored_is_forgotten(scene, num_kept, stored):
    session = Request("a", 9)
    assert scene.preempt(session, BLOCKS, 10)
    event = scene.step().store_event
    if stored:
        scene.report_store(event)
    session.num_tokens = num_kept + 1
    scene.scheduler.end_turn(session)
    session.num_tokens += 20
    assert scene.scheduler.has_preempted_request("a") == (num_kept == 10)
    if not stored:
        scene.report_store(event)
    restorable = scene.scheduler.get_num_new_matched_tokens(session, 0)
    assert restorable == ((10, True) if num_kept == 10 else (0, False))
    scene.scheduler.request_finished("a")
    scene.assert_nothing_left()


# ---- several workers ----


def test_a_request_is_ready_when_all_workers_have_stored_it(request_a):
    scene = Scene(world_size=2)
    assert scene.preempt(request_a, BLOCKS, 10)
    meta = scene.step()
    scene.report_store(meta.store_event, ranks=[1])
    assert scene.ask(request_a) == (None, False)
    assert scene.scheduler.has_pending_transfers()
    scene.report_store(meta.store_event, ranks=[0])
    assert scene.ask(request_a) == (10, True)
    assert not scene.scheduler.has_pending_transfers()


def test_workers_may_report_in_one_step(request_a):
    scene = Scene(world_size=2)
    assert scene.preempt(request_a, BLOCKS, 10)
    event = scene.step().store_event
    report = OffloadWorkerMetadata({event: {0: True}}).aggregate(
        OffloadWorkerMetadata({event: {1: True}})
    )
    scene.scheduler.update_connector_output(report, ())
    assert scene.ask(request_a) == (10, True)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_store_that_failed_on_one_worker_leaves_nothing(log, request_a, failing):
    scene = Scene(world_size=2)
    assert scene.preempt(request_a, BLOCKS, 10)
    meta = scene.step()
    for rank in (0, 1):
        assert scene.ask(request_a) == (None, False)
        scene.report_store(meta.store_event, ok=rank != failing, ranks=[rank])
    assert scene.ask(request_a) == (0, False)
    assert not scene.scheduler.has_preempted_request("a")
    scene.assert_nothing_left()
    assert "Storing request a failed; its KV is lost" in log.text


def test_a_load_that_failed_leaves_nothing(scene, request_a):
    scene.preserve(request_a, BLOCKS, 10)
    scene.allocate(request_a, NEW_BLOCKS, 10)
    scene.step()
    scene.report_loads("a", failed=["a"])
    assert scene.ask(request_a) == (0, False)
    scene.assert_nothing_left()


def test_a_load_that_failed_before_the_last_worker_was_through_leaves_nothing(request_a):
    scene = Scene(world_size=2)
    scene.preserve(request_a, BLOCKS, 10)
    scene.allocate(request_a, NEW_BLOCKS, 10)
    scene.step()
    scene.report_loads(failed=["a"])
    assert scene.scheduler.has_pending_transfers()
    scene.report_loads("a")
    scene.assert_nothing_left()


def test_a_failed_load_of_one_request_is_none_of_another(scene, request_a):
    request_b = Request("b", num_tokens=5)
    scene.preserve(request_a, BLOCKS, 10)
    scene.preserve(request_b, ([13],), 4)
    scene.allocate(request_a, NEW_BLOCKS, 10)
    scene.allocate(request_b, ([23],), 4)
    scene.step()
    scene.report_loads("a", "b", failed=["a"])
    assert scene.state("a") is None
    assert scene.state("b") == "Mirrored"


def test_requests_that_others_have_received_are_none_of_ours(scene, request_a):
    scene.preserve(request_a, BLOCKS, 10)
    scene.report_loads("a", "somebody's")
    assert scene.state("a") == "Ready"


# ---- aborted ----


def aborted_storing_planned(scene, request):
    assert scene.preempt(request, BLOCKS, 10)
    scene.scheduler.request_finished("a")
    scene.report_store(scene.step().store_event)


def aborted_storing_under_way(scene, request):
    assert scene.preempt(request, BLOCKS, 10)
    meta = scene.step()
    scene.scheduler.request_finished("a")
    assert scene.num_available == 13, "the copy still writes these blocks"
    scene.report_store(meta.store_event)


def aborted_storing_and_failed(scene, request):
    assert scene.preempt(request, BLOCKS, 10)
    meta = scene.step()
    scene.scheduler.request_finished("a")
    scene.report_store(meta.store_event, ok=False)


def aborted_ready(scene, request):
    scene.preserve(request, BLOCKS, 10)
    scene.scheduler.request_finished("a")


def aborted_loading_planned(scene, request):
    scene.preserve(request, BLOCKS, 10)
    scene.allocate(request, NEW_BLOCKS, 10)
    scene.scheduler.request_finished("a")
    assert scene.scheduler.has_pending_transfers()
    assert scene.step().load_requests == ("a",)
    scene.report_loads("a")


def aborted_loading_under_way(scene, request):
    scene.preserve(request, BLOCKS, 10)
    scene.allocate(request, NEW_BLOCKS, 10)
    scene.step()
    scene.scheduler.request_finished("a")
    assert scene.num_available == 13, "the copy still reads these blocks"
    scene.report_loads("a")


def aborted_loading_and_failed(scene, request):
    scene.preserve(request, BLOCKS, 10)
    scene.allocate(request, NEW_BLOCKS, 10)
    scene.step()
    scene.scheduler.request_finished("a")
    scene.report_loads("a", failed=["a"])


def aborted_mirrored(scene, request):
    scene.preserve(request, BLOCKS, 10)
    scene.restore(request, NEW_BLOCKS)
    scene.scheduler.request_finished("a")


@pytest.mark.parametrize(
    "story",
    [
        aborted_storing_planned,
        aborted_storing_under_way,
        aborted_storing_and_failed,
        aborted_ready,
        aborted_loading_planned,
        aborted_loading_under_way,
        aborted_loading_and_failed,
        aborted_mirrored,
    ],
)
@pytest.mark.parametrize("share_blocks", [False, True])
def test_all_blocks_of_an_aborted_request_come_back(request_a, story, share_blocks):
    request_a.block_hashes = [b"one", b"two"]
    scene = Scene(share_blocks=share_blocks)
    story(scene, request_a)
    scene.assert_nothing_left()
    assert scene.ask(request_a) == (0, False)
    assert scene.step() is NOTHING
    scene.scheduler.request_finished("a")
    scene.assert_nothing_left()


def test_an_id_may_be_used_again_once_its_old_copy_is_through(log, scene, request_a):
    assert scene.preempt(request_a, BLOCKS, 10)
    meta = scene.step()
    scene.scheduler.request_finished("a")
    again = Request("a", num_tokens=5)
    assert scene.preempt(again, ([13],), 4) is False
    assert "Request a cannot be preserved" in log.text
    assert scene.scheduler.stats.not_preserved == 1
    scene.report_store(meta.store_event)
    assert scene.preempt(again, ([13],), 4) is True
    scene.report_store(scene.step().store_event)
    assert scene.ask(again) == (4, True)


# ---- shortage ----


def test_a_shortage_is_logged_with_its_numbers_and_nothing_is_taken(log, request_a):
    scene = Scene(num_host_blocks=4)
    scene.preserve(Request("b", num_tokens=9), ([13, 14],), 8)
    log.clear()
    assert scene.preempt(request_a, BLOCKS, 10) is False
    (record,) = log.records
    assert record.levelname == "WARNING"
    text = record.getMessage()
    assert "CPU cache has 2 free blocks of 4" in text
    assert "request a (10 tokens) needs 3" in text
    assert scene.num_available == 2
    assert scene.ask(request_a) == (0, False)
    assert not scene.scheduler.has_preempted_request("a")
    assert scene.step() is NOTHING
    assert scene.scheduler.stats.not_preserved == 1


def test_mirrors_make_room_for_a_preempted_request(request_a):
    scene = Scene(num_host_blocks=4)
    request_b = Request("b", num_tokens=9)
    scene.preserve(request_b, ([13, 14],), 8)
    scene.restore(request_b, ([23, 24],))
    assert scene.state("b") == "Mirrored"
    assert scene.preempt(request_a, BLOCKS, 10) is True
    assert scene.state("b") is None
    # What is gone is stored again, next time.
    scene.report_store(scene.step().store_event)
    scene.scheduler.request_finished("a")
    meta = scene.preserve(request_b, ([23, 24],), 8)
    assert meta.store_pairs[:, 1].tolist() == [23, 24]


def test_a_shortage_in_one_step_spares_those_that_fit(request_a):
    scene = Scene(num_host_blocks=4)
    assert scene.preempt(request_a, BLOCKS, 10) is True
    assert scene.preempt(Request("b", num_tokens=9), ([13, 14],), 8) is False
    assert scene.preempt(Request("c", num_tokens=5), ([15],), 4) is True
    assert scene.step().store_pairs[:, 1].tolist() == [10, 11, 12, 15]


# ---- reset ----


def test_a_reset_forgets_a_ready_request(scene, request_a):
    scene.preserve(request_a, BLOCKS, 10)
    assert scene.scheduler.reset_cache() is True
    assert scene.ask(request_a) == (0, False)
    scene.assert_nothing_left()


def test_a_reset_forgets_a_mirrored_request(scene, request_a):
    scene.preserve(request_a, BLOCKS, 10)
    scene.restore(request_a, NEW_BLOCKS)
    assert scene.scheduler.reset_cache() is True
    scene.assert_nothing_left()
    assert len(scene.preserve(request_a, NEW_BLOCKS, 10).store_pairs) == 3


@pytest.mark.parametrize("planned", [True, False])
def test_a_reset_forgets_a_request_being_stored(scene, request_a, planned):
    assert scene.preempt(request_a, BLOCKS, 10)
    meta = None if planned else scene.step()
    assert scene.scheduler.reset_cache() is True
    assert scene.ask(request_a) == (0, False)
    assert not scene.scheduler.has_preempted_request("a")
    scene.report_store((meta or scene.step()).store_event)
    assert scene.ask(request_a) == (0, False)
    scene.assert_nothing_left()


@pytest.mark.parametrize("planned", [True, False])
def test_a_reset_says_that_loads_are_under_way(scene, request_a, planned):
    scene.preserve(request_a, BLOCKS, 10)
    scene.allocate(request_a, NEW_BLOCKS, 10)
    if not planned:
        scene.step()
    assert scene.scheduler.reset_cache() is False
    assert scene.scheduler.has_pending_transfers()
    if planned:
        assert scene.step().load_requests == ("a",)
    scene.report_loads("a")
    assert scene.scheduler.reset_cache() is True
    scene.assert_nothing_left()


def test_a_reset_of_nothing_is_done(scene):
    assert scene.scheduler.reset_cache() is True


# ---- sharing by hash ----


@pytest.fixture
def sharing():
    return Scene(share_blocks=True)


def hashed(request_id, num_tokens, *hashes):
    return Request(request_id, num_tokens, block_hashes=list(hashes))


def test_equal_prefixes_are_stored_once(sharing):
    first = sharing.preserve(hashed("a", 11, b"one", b"two"), BLOCKS, 10)
    second = sharing.preserve(hashed("b", 11, b"one", b"other"), ([13, 14, 15],), 10)
    assert second.store_pairs[:, 1].tolist() == [14, 15]
    assert sharing.scheduler.stats.shared_blocks == 1
    loaded = sharing.restore(hashed("b", 11), NEW_BLOCKS).load_pairs
    hosts = dict(loaded[:, 1:].tolist())
    assert hosts[20] == first.store_pairs[0, 2]


def test_a_partial_block_is_never_shared(sharing):
    # vLLM gives no hash to a partial block; one that is full by tokens but not computed has one.
    sharing.preserve(hashed("a", 9, b"one", b"two"), ([10, 11],), 7)
    second = sharing.preserve(hashed("b", 9, b"one", b"two"), ([12, 13],), 8)
    assert second.store_pairs[:, 1].tolist() == [13]


def test_a_block_with_tokens_not_known_yet_is_not_shared(sharing):
    # Computed counts a step in flight, whose token may yet change the block.
    sharing.preserve(hashed("a", 7, b"one", b"stale"), ([10, 11],), 8)
    second = sharing.preserve(hashed("b", 9, b"one", b"stale"), ([12, 13],), 8)
    assert second.store_pairs[:, 1].tolist() == [13]


def test_a_block_is_not_shared_before_it_is_stored(sharing):
    assert sharing.preempt(hashed("a", 9, b"one", b"two"), ([10, 11],), 8)
    assert sharing.preempt(hashed("b", 9, b"one", b"two"), ([12, 13],), 8)
    meta = sharing.step()
    assert meta.store_pairs[:, 1].tolist() == [10, 11, 12, 13]
    assert sharing.preempt(hashed("c", 9, b"one", b"two"), ([14, 15],), 8)
    assert len(sharing.step().store_pairs) == 2
    assert sharing.scheduler.stats.shared_blocks == 0


def test_a_block_whose_store_failed_is_not_shared(sharing):
    assert sharing.preempt(hashed("a", 9, b"one", b"two"), ([10, 11],), 8)
    sharing.report_store(sharing.step().store_event, ok=False)
    sharing.preserve(hashed("b", 9, b"one", b"two"), ([12, 13],), 8)
    assert sharing.scheduler.stats.shared_blocks == 0


def test_shared_blocks_outlive_their_request(sharing):
    sharing.preserve(hashed("a", 9, b"one", b"two"), ([10, 11],), 8)
    sharing.scheduler.request_finished("a")
    sharing.assert_nothing_left()
    second = sharing.preserve(hashed("b", 9, b"one", b"two"), ([12, 13],), 8)
    assert second.store_pairs.shape == (0, 3)
    assert sharing.scheduler.stats.shared_blocks == 2


@pytest.mark.parametrize("finished", [True, False])
def test_nothing_is_shared_across_a_reset(sharing, finished):
    sharing.preserve(hashed("a", 9, b"one", b"two"), ([10, 11],), 8)
    assert sharing.preempt(hashed("b", 5, b"three"), ([12],), 4)
    meta = sharing.step()
    if finished:
        sharing.scheduler.request_finished("a")
    assert sharing.scheduler.reset_cache() is True
    sharing.report_store(meta.store_event)
    again = sharing.preserve(hashed("c", 13, b"one", b"two", b"three"), ([14, 15, 16],), 12)
    assert again.store_pairs[:, 1].tolist() == [14, 15, 16]
    assert sharing.scheduler.stats.shared_blocks == 0


def test_without_prefix_caching_nothing_is_shared(scene):
    scene.preserve(hashed("a", 9, b"one", b"two"), ([10, 11],), 8)
    scene.preserve(hashed("b", 9, b"one", b"two"), ([12, 13],), 8)
    assert scene.scheduler.stats.stored_blocks == 4
    assert scene.scheduler.stats.shared_blocks == 0


def test_as_long_as_the_hash_size_is_unknown_nothing_is_shared():
    scene = Scene(share_blocks=True, hash_tokens=None)
    scene.preserve(hashed("a", 9, b"one", b"two"), ([10, 11],), 8)
    scene.preserve(hashed("b", 9, b"one", b"two"), ([12, 13],), 8)
    assert scene.scheduler.stats.shared_blocks == 0


def test_a_block_is_known_by_the_hash_of_its_last_tokens():
    # Groups of 4 and 8 tokens per block; a hash covers 2 tokens.
    scene = Scene(block_tokens=(4, 8), share_blocks=True, hash_tokens=2)
    hashes = [bytes([i]) for i in range(6)]
    scene.preserve(hashed("a", 13, *hashes), ([10, 11, 12], [13, 14]), 12)

    # Alike in the first 10 tokens: two blocks of the first group, one of the second.
    alike = [*hashes[:5], b"other"]
    second = scene.preserve(hashed("b", 13, *alike), ([20, 21, 22], [23, 24]), 12)
    assert sorted(second.store_pairs[:, 1].tolist()) == [22, 24]

    # Alike in the first 6 tokens: one block of the first group.
    alike = [*hashes[:3], b"another"]
    third = scene.preserve(hashed("c", 9, *alike), ([30, 31], [32]), 8)
    assert sorted(third.store_pairs[:, 1].tolist()) == [31, 32]


# ---- several groups ----


def test_groups_with_blocks_of_different_size():
    scene = Scene(block_tokens=(4, 16))
    request = Request("a", num_tokens=22)
    stored = scene.preserve(request, ([10, 11, 12, 13, 14, 15], [16, 17]), 21).store_pairs
    assert stored[:, :2].tolist() == [
        *([0, block] for block in range(10, 16)),
        *([1, block] for block in (16, 17)),
    ]
    assert scene.ask(request, 16) == (5, True)
    scene.allocate(request, ([20, 21, 22, 23, 24, 25], [26, 27]), 5)
    loaded = scene.step().load_pairs
    assert loaded[:, :2].tolist() == [[0, 24], [0, 25], [1, 27]]
    hosts = {(group, device): host for group, device, host in stored.tolist()}
    assert loaded[:, 2].tolist() == [hosts[0, 14], hosts[0, 15], hosts[1, 17]]
    scene.report_loads("a")
    assert 16 - scene.num_available == 21 // 4 + 21 // 16


def test_a_group_whose_blocks_end_where_no_hash_does_is_not_shared():
    # Groups of 4 and 8 tokens per block; a hash covers 8.
    scene = Scene(block_tokens=(4, 8), share_blocks=True, hash_tokens=8)
    scene.preserve(hashed("a", 9, b"one"), ([10, 11], [12]), 8)
    second = scene.preserve(hashed("b", 9, b"one"), ([20, 21], [22]), 8)
    assert second.store_pairs[:, 1].tolist() == [20, 21]


# ---- states: a block of the second group is what has become of all tokens so far ----

STATE_BLOCKS = ([10, 11, 12], [0, 0, 13])


@pytest.fixture
def states():
    return Scene(block_tokens=(4, 4), state_groups=(1,), share_blocks=True)


def test_a_state_is_restored_to_where_the_request_goes_on(states, request_a, log):
    stored = states.preserve(request_a, STATE_BLOCKS, 10)
    assert stored.store_pairs[:, :2].tolist() == [[0, 10], [0, 11], [0, 12], [1, 13]]
    # What the device still has of the first group makes no difference to the second.
    assert states.ask(request_a, 8) == (2, True)
    states.allocate(request_a, ([20, 21, 22], [0, 0, 23]), 2)
    loaded = states.step()
    assert loaded.load_pairs[:, :2].tolist() == [[0, 22], [1, 23]]
    assert loaded.load_pairs[:, 2].tolist() == stored.store_pairs[2:, 2].tolist()
    assert not [record for record in log.records if record.levelname == "WARNING"]


def test_only_the_newest_of_several_states_is_stored(states, request_a):
    stored = states.preserve(request_a, ([10, 11, 12], [13, 14, 15]), 10)
    assert stored.store_pairs[:, :2].tolist() == [[0, 10], [0, 11], [0, 12], [1, 15]]


@pytest.mark.parametrize("num_tokens", [10, 9, 2])
def test_a_state_past_the_tokens_that_were_kept_is_not_restored(states, log, num_tokens):
    request = Request("a", num_tokens=11)
    states.preserve(request, STATE_BLOCKS, 10)
    log.clear()
    # Drafts have been rejected since.
    request.num_tokens = num_tokens
    assert states.ask(request) == (0, False)
    states.allocate(request, ([20, 21, 22], [0, 0, 23]), 0)
    assert states.step() is NOTHING
    (record,) = log.records
    assert record.levelname == "WARNING"
    assert "Request a is not restored, because its states" in record.getMessage()
    assert "after 10 tokens" in record.getMessage()
    assert "computed again" in record.getMessage()
    states.scheduler.request_finished("a")
    states.assert_nothing_left()


def test_states_are_never_shared(states):
    states.preserve(hashed("a", 9, b"one", b"two"), ([10, 11], [0, 13]), 8)
    second = states.preserve(hashed("b", 9, b"one", b"two"), ([20, 21], [0, 23]), 8)
    assert second.store_pairs[:, :2].tolist() == [[1, 23]]


def test_a_state_is_not_there_for_the_next_preemption(states, request_a):
    states.preserve(request_a, STATE_BLOCKS, 10)
    states.restore(request_a, ([20, 21, 22], [0, 0, 23]))
    again = states.preserve(request_a, ([20, 21, 22], [0, 0, 23]), 10)
    assert again.store_pairs[:, :2].tolist() == [[0, 22], [1, 23]]


def test_where_nothing_can_be_preserved_nothing_is(request_a):
    scene = Scene(preserves=False)
    assert scene.preempt(request_a, BLOCKS, 10) is False
    assert scene.scheduler.stats.not_preserved == 1
    assert scene.step() is NOTHING
    assert scene.ask(request_a) == (0, False)
    scene.assert_nothing_left()


@pytest.mark.parametrize("keeps", [True, False])
def test_a_request_that_awaits_prompt_logprobs_is_preserved_if_they_are_kept(request_a, keeps):
    scene = Scene(keeps_prompt_logprobs=keeps)
    request_a.skip_reading_prefix_cache = True
    assert scene.preempt(request_a, BLOCKS, 10) is keeps
    assert scene.scheduler.stats.not_preserved == (not keeps)
    scene.scheduler.request_finished("a")
    if keeps:
        scene.report_store(scene.step().store_event)
    scene.assert_nothing_left()


# ---- what the scheduler of somebody else cannot do ----


def test_with_hits_that_could_be_mixed_up_nothing_is_restored(request_a, log):
    scene = Scene(trust_hits=False)
    scene.preserve(request_a, BLOCKS, 10)
    log.clear()
    assert scene.ask(request_a, 4) == (0, False)
    scene.allocate(request_a, NEW_BLOCKS, 0)
    (record,) = log.records
    assert "Request a is left to vLLM's prefix cache" in record.getMessage()
    assert "preempt_offload.RecomputeScheduler" in record.getMessage()
    # It may be preserved again.
    assert len(scene.preserve(request_a, BLOCKS, 10).store_pairs) == 1


def test_without_hits_there_is_nothing_to_mix_up(request_a, log):
    scene = Scene(trust_hits=False)
    scene.preserve(request_a, BLOCKS, 10)
    assert scene.ask(request_a) == (10, True)
    scene.restore(request_a, NEW_BLOCKS)
    assert not [record for record in log.records if "prefix cache" in record.getMessage()]


def test_hits_are_used_where_they_are_claimed_first(request_a):
    scene = Scene(trust_hits=False)
    scene.scheduler.scheduler_cooperates()
    scene.preserve(request_a, BLOCKS, 10)
    assert scene.ask(request_a, 4) == (6, True)


def test_a_failed_load_that_vllm_cannot_recover_from_says_who_can(request_a):
    scene = Scene(recovers=False)
    scene.preserve(request_a, BLOCKS, 10)
    scene.allocate(request_a, NEW_BLOCKS, 10)
    scene.step()
    with pytest.raises(RuntimeError, match=r"request a failed.*RecomputeScheduler can"):
        scene.report_loads("a", failed=("a",))


def test_a_scheduler_of_ours_is_told_whose_load_failed(request_a):
    scene = Scene(recovers=False)
    scene.scheduler.scheduler_cooperates()
    scene.preserve(request_a, BLOCKS, 10)
    scene.allocate(request_a, NEW_BLOCKS, 10)
    scene.step()
    assert scene.scheduler.take_unloaded_requests() == []
    scene.report_loads("a", failed=("a",))
    assert scene.scheduler.take_unloaded_requests() == ["a"]
    assert scene.scheduler.take_unloaded_requests() == [], "told once"
    scene.assert_nothing_left()


def test_nothing_is_kept_for_a_scheduler_that_never_takes_it(scene, request_a):
    scene.preempt(request_a, BLOCKS, 10)
    scene.report_store(scene.step().store_event, ok=False)
    scene.preserve(request_a, BLOCKS, 10)
    scene.allocate(request_a, NEW_BLOCKS, 10)
    scene.step()
    scene.report_loads("a", failed=("a",))
    assert scene.scheduler.take_lost_requests() == []
    assert scene.scheduler.take_unloaded_requests() == []
    scene.assert_nothing_left()


@pytest.mark.parametrize("cooperates", [True, False])
def test_the_mirror_of_a_request_that_is_lost_stays_only_if_its_end_will_be_told(
    request_a, cooperates
):
    scene = Scene(num_host_blocks=3)
    if cooperates:
        scene.scheduler.scheduler_cooperates()
    scene.preserve(request_a, BLOCKS, 10)
    scene.restore(request_a, NEW_BLOCKS)
    assert scene.preempt(request_a, ([20, 21, 22, 23, 24],), 18) is False
    assert scene.state("a") == ("Mirrored" if cooperates else None)
    scene.scheduler.request_finished("a")
    scene.assert_nothing_left()


def test_a_failed_load_is_told_even_if_a_reset_has_dropped_the_kv(scene, request_a):
    scene.scheduler.scheduler_cooperates()
    scene.preserve(request_a, BLOCKS, 10)
    scene.allocate(request_a, NEW_BLOCKS, 10)
    scene.step()
    assert scene.scheduler.reset_cache() is False
    scene.report_loads("a", failed=("a",))
    assert scene.scheduler.take_unloaded_requests() == ["a"]
    scene.assert_nothing_left()


def test_others_wait_for_a_request_loaded_across_a_reset(scene, request_a):
    scene.preserve(request_a, BLOCKS, 10)
    scene.allocate(request_a, NEW_BLOCKS, 10)
    scene.step()
    assert scene.scheduler.reset_cache() is False
    scene.report_loads("a")
    assert scene.ask(Request("b", num_tokens=5)) == (None, False)
    scene.allocate(request_a, NEW_BLOCKS, 0)
    assert scene.ask(Request("b", num_tokens=5)) == (0, False)


@pytest.mark.parametrize("reset", [True, False])
def test_nobody_is_told_of_a_failed_load_of_a_request_that_has_ended(request_a, reset):
    scene = Scene(recovers=False)
    scene.preserve(request_a, BLOCKS, 10)
    scene.allocate(request_a, NEW_BLOCKS, 10)
    scene.step()
    if reset:
        assert scene.scheduler.reset_cache() is False
    scene.scheduler.request_finished("a")
    scene.report_loads("a", failed=("a",))
    assert scene.scheduler.take_unloaded_requests() == []
    scene.assert_nothing_left()


# ---- a scheduler that never asks ----


def test_a_scheduler_that_never_asks_is_told_once_how_to(log, scene, request_a):
    assert scene.ask(request_a) == (0, False)
    assert not log.records, "not preempted yet"
    request_a.num_preemptions = 1
    assert scene.ask(request_a) == (0, False)
    (record,) = log.records
    assert record.levelname == "WARNING"
    assert "Request a was preempted" in record.getMessage()
    assert ADVICE in record.getMessage()
    for request_id in ("a", "b"):
        assert scene.ask(Request(request_id, num_tokens=5, num_preemptions=2)) == (0, False)
    assert len(log.records) == 1


def test_a_scheduler_that_asks_is_not_told(log, scene):
    scene.scheduler.scheduler_cooperates()
    scene.ask(Request("a", num_tokens=5, num_preemptions=1))
    assert not log.records


def test_a_scheduler_that_has_asked_is_not_told(log):
    scene = Scene(num_host_blocks=1)
    request = Request("a", num_tokens=9)
    assert scene.preempt(request, ([10, 11],), 8) is False
    log.clear()
    assert scene.ask(request) == (0, False)
    assert not log.records


# ---- what is seen of it ----


def test_counters_tell_what_happened(request_a):
    scene = Scene(num_host_blocks=5, share_blocks=True)
    request_a.block_hashes = [b"one", b"two"]
    scene.preserve(request_a, BLOCKS, 10)
    scene.restore(request_a, NEW_BLOCKS, 4)
    scene.preserve(hashed("b", 5, b"one"), ([13],), 4)
    assert scene.preempt(Request("c", num_tokens=50), (list(range(30, 40)),), 40) is False
    request_a.num_tokens = 12
    scene.preserve(request_a, NEW_BLOCKS, 11)
    stats = scene.scheduler.stats
    assert (stats.preserved, stats.not_preserved) == (3, 1)
    assert (stats.stored_blocks, stats.mirrored_blocks, stats.shared_blocks) == (4, 2, 1)
    assert (stats.restored, stats.restored_tokens) == (1, 6)


def test_operators_find_their_log_lines(log, scene, request_a):
    scene.preserve(request_a, BLOCKS, 10)
    scene.restore(request_a, NEW_BLOCKS, 4)
    assert [record.getMessage() for record in log.records] == [
        "Created preempt offload state for request a: 10 tokens, 3 blocks to copy, "
        "0 mirrored, 0 shared; 13 of 16 host blocks free",
        "Prepared preempt offload H2D load for request a: tokens 4 to 10, 2 blocks",
    ]
    assert {record.levelname for record in log.records} == {"INFO"}
    assert {record.name for record in log.records} == {"vllm.preempt_offload.offload_scheduler"}
