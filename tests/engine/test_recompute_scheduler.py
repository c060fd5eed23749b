"""The scheduler classes on vLLM's real ones, with a model and workers that are made up."""

from __future__ import annotations

import itertools

import pytest
from driver import Driver
from engine_support import BLOCK_SIZE, SPEC, WINDOW, kv_cache_config
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from preempt_offload import AsyncRecomputeScheduler, RecomputeScheduler, compat

WAITING_FOR_LOAD = RequestStatus.WAITING_FOR_REMOTE_KVS


# ---- one name for both ----


@pytest.mark.parametrize("asynchronous", [False, True])
def test_one_name_is_right_with_and_without_async_scheduling(drive, asynchronous):
    scheduler = drive(asynchronous=asynchronous).scheduler
    assert type(scheduler) is (AsyncRecomputeScheduler if asynchronous else RecomputeScheduler)
    assert isinstance(scheduler, AsyncScheduler) is asynchronous


def test_the_config_may_come_as_the_first_argument(vllm_config):
    for asynchronous, expected in [
        (False, RecomputeScheduler),
        (True, AsyncRecomputeScheduler),
    ]:
        config = vllm_config(asynchronous=asynchronous)
        manager = StructuredOutputManager(config)
        made = RecomputeScheduler(config, kv_cache_config(["a"]), manager, BLOCK_SIZE)
        assert type(made) is expected
        assert made.vllm_config is config


def test_a_class_of_ones_own_is_left_alone(drive):
    class Own(RecomputeScheduler):
        pass

    assert type(drive(scheduler_cls=Own, asynchronous=True).scheduler) is Own


def test_the_async_name_is_always_async(drive):
    scheduler = drive(scheduler_cls=AsyncRecomputeScheduler, asynchronous=False).scheduler
    assert type(scheduler) is AsyncRecomputeScheduler


# ---- preserving ----


def preempt_one(driver, names=("first", "second"), num_tokens=40):
    """Runs two requests until the second is preempted; 7 blocks hold both no longer."""
    first = driver.add(names[0], num_tokens, first=1)
    second = driver.add(names[1], num_tokens, first=2)
    driver.step_until(lambda: second.num_preemptions)
    return first, second


def test_a_preempted_request_is_restored_and_not_computed_again(drive, log):
    driver = drive()
    first, second = preempt_one(driver)
    assert first.num_preemptions == 0
    computed = second.num_tokens - 1
    assert (
        f"Recompute preemption offload enabled for request second, computed_tokens={computed}"
        in (log.text)
    )
    driver.scheduler.finish_requests("first", RequestStatus.FINISHED_ABORTED)
    driver.step_until(lambda: second.status == RequestStatus.RUNNING)
    assert second.num_tokens - 1 == second.num_computed_tokens
    assert driver.offload.stats.restored_tokens == computed
    driver.step_until(second.is_finished)
    assert len(second.output_token_ids) == 60
    driver.step_until(lambda: not driver.scheduler.has_finished_requests())
    driver.assert_all_back()


def test_a_scheduler_without_the_connector_is_as_vllms(vllm_config, log):
    config = vllm_config(enable_prefix_caching=False)
    config.kv_transfer_config = None
    driver = Driver(config, 8, RecomputeScheduler)
    _, second = preempt_one(driver)
    assert not driver.scheduler.has_finished_requests()
    driver.scheduler.finish_requests("first", RequestStatus.FINISHED_ABORTED)
    driver.step_until(second.is_finished)
    assert len(second.output_token_ids) == 60
    (warning,) = log.warnings
    assert "No PreemptOffloadConnector is configured" in warning


def test_a_scheduler_with_another_connector_is_as_vllms(drive, log):
    driver = drive(transfer={"kv_connector": "DecodeBenchConnector"})
    assert driver.scheduler._offload is None
    assert driver.scheduler.reset_prefix_cache() is True
    assert not driver.scheduler.has_finished_requests()


def test_our_scheduler_finds_us_inside_multi_connector(drive):
    child = {"kv_connector": "PreemptOffloadConnector", "kv_role": "kv_both"}
    driver = drive({"connectors": [child]}, transfer={"kv_connector": "MultiConnector"})
    assert driver.scheduler._offload is driver.connector._connectors[0]


def test_the_engine_goes_on_while_copies_are_under_way(drive):
    driver = drive()
    _, second = preempt_one(driver)
    driver.scheduler.finish_requests("first", RequestStatus.FINISHED_ABORTED)
    driver.hold_loads = True
    driver.step_until(lambda: second.status == WAITING_FOR_LOAD)
    driver.step()
    driver.scheduler.finish_requests("second", RequestStatus.FINISHED_ABORTED)
    driver.step()
    assert driver.scheduler.has_finished_requests()
    assert driver.offload.has_pending_transfers()
    driver.hold_loads = False
    driver.step()
    driver.step_until(lambda: not driver.scheduler.has_finished_requests(), at_most=2)
    driver.assert_all_back()


def test_a_request_aborted_while_it_is_stored_keeps_the_engine_going(drive):
    driver = drive()
    driver.add("first", 40, first=1)
    second = driver.add("second", 40, first=2)
    while not second.num_preemptions:
        output = driver.schedule()
        report = driver.execute(output)
        if not second.num_preemptions:
            driver.update(output, report)
    driver.scheduler.finish_requests(["first", "second"], RequestStatus.FINISHED_ABORTED)
    driver.scheduler.finished_req_ids = set()
    assert driver.scheduler.has_finished_requests(), "the store has not been reported yet"
    driver.update(output, report)
    assert not driver.scheduler.has_finished_requests()
    driver.assert_all_back()


def test_a_failed_store_is_recomputed(drive, log):
    driver = drive()
    driver.stores_ok = False
    _, second = preempt_one(driver)
    driver.scheduler.finish_requests("first", RequestStatus.FINISHED_ABORTED)
    driver.step_until(second.is_finished)
    assert len(second.output_token_ids) == 60
    assert driver.offload.stats.restored == 0
    assert "Storing request second failed" in log.text


@pytest.mark.parametrize(
    ("specs", "num_blocks"),
    [((SPEC,), 8), ((SPEC, SPEC), 15), ((WINDOW,), 6)],
    ids=["one group", "two groups", "a window"],
)
@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("reset", [False, True], ids=["", "after a reset"])
def test_a_failed_load_is_computed_again_or_fails_whatever_the_groups(
    drive, specs, num_blocks, policy, reset
):
    driver = drive(
        num_blocks=num_blocks,
        specs=specs,
        transfer={"kv_load_failure_policy": policy},
    )
    _, second = preempt_one(driver, num_tokens=20)
    driver.scheduler.finish_requests("first", RequestStatus.FINISHED_ABORTED)
    driver.loads_ok = False
    driver.hold_loads = True
    driver.step_until(lambda: second.status == WAITING_FOR_LOAD)
    if reset:
        assert driver.connector.reset_cache() is False
    driver.hold_loads = False
    num_tokens = second.num_tokens
    driver.step()
    if policy == "recompute":
        assert driver.step().num_scheduled_tokens == {"second": num_tokens}
        driver.step_until(second.is_finished)
        assert len(second.output_token_ids) == 60
    else:
        assert second.is_finished()
        assert driver.outputs["second"][-1].finish_reason == FinishReason.ERROR
    driver.step_until(lambda: not driver.scheduler.has_requests())
    driver.assert_all_back()


# ---- room for requests that are restored ----


def preempt_one_with_hits(driver):
    """Preempts the second request; the first ends when it has overwritten a part of it."""
    first, second = preempt_one(driver)
    driver.step_until(lambda: first.num_tokens > 4 * BLOCK_SIZE + 1)
    driver.scheduler.finish_requests("first", RequestStatus.FINISHED_ABORTED)
    return second


def make_hits_go_next(driver, request):
    """Makes the request's blocks in the prefix cache those that are allocated next."""
    pool = driver.manager.block_pool
    hits = set()
    for block_hash, group in itertools.product(request.block_hashes, range(2)):
        hits |= {block.block_id for block in pool.get_cached_block(block_hash, [group]) or ()}
    free = pool.free_block_queue.get_all_free_blocks()
    others = [block for block in free if block.block_id not in hits]
    pool.touch(others)
    pool.free_blocks(others)


def test_no_block_of_a_restored_request_is_in_two_groups(drive):
    driver = drive(num_blocks=12, specs=(SPEC, WINDOW), enable_prefix_caching=True)
    _, second = preempt_one(driver)
    driver.scheduler.finish_requests("first", RequestStatus.FINISHED_ABORTED)
    # Else the last blocks of the first group would be allocated before the hits in the second.
    make_hits_go_next(driver, second)
    driver.step_until(lambda: second.status == WAITING_FOR_LOAD)
    assert second.num_computed_tokens == 40
    assert driver.offload.stats.restored_tokens == 8, "the first two blocks are hits"
    held = list(itertools.chain(*driver.manager.get_block_ids("second")))
    assert len(held) == 6
    assert len(set(held)) == 6
    driver.step_until(lambda: not driver.scheduler.has_requests())
    driver.assert_all_back()


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_restored_requests_that_hold_all_blocks_do_not_keep_each_other_from_running(drive, policy):
    """Two of four blocks each are restored into eight, and for their drafts both need a fifth."""
    driver = drive(
        {"offload_host_memory_ratio": 4}, num_blocks=9, drafts=4, scheduling_policy=policy
    )
    driver.add("first", 17, first=1)
    second, third = (driver.add(name, n, first=n) for name, n in (("second", 22), ("third", 55)))
    driver.step_until(lambda: third.num_preemptions and second.num_preemptions)
    driver.scheduler.finish_requests("first", RequestStatus.FINISHED_ABORTED)
    requests = (second, third)
    for request in requests:
        driver.step_until(request.is_finished)
        assert len(request.output_token_ids) == 60
    # Newer vLLM keeps room for the drafts of one; else one of them was preempted waiting.
    stats, preemptions = driver.offload.stats, sum(r.num_preemptions for r in requests)
    if not hasattr(driver.scheduler, "_spec_decode_step_blocks"):
        assert stats.preserved > preemptions
    assert stats.restored >= len(requests)
    driver.step_until(lambda: not driver.scheduler.has_requests())
    driver.assert_all_back()


# ---- a scheduler of somebody else's that asks ----


class Asking(Scheduler):
    """Asks the connector before it preempts, and does nothing else for it."""

    def _preempt_request(self, request, *args, **kwargs):
        self.connector.update_state_before_preempt(
            request,
            self.kv_cache_manager.get_block_ids(request.request_id),
            request.num_computed_tokens,
        )
        super()._preempt_request(request, *args, **kwargs)


@pytest.mark.parametrize("specs", [(SPEC,), (SPEC, WINDOW)], ids=["one group", "two groups"])
def test_of_somebody_elses_scheduler_hits_are_used_if_they_are_safe(drive, log, specs):
    driver = drive(
        num_blocks=1 + 7 * len(specs),
        specs=specs,
        scheduler_cls=Asking,
        enable_prefix_caching=True,
    )
    second = preempt_one_with_hits(driver)
    driver.step_until(second.is_finished)
    safe = len(specs) == 1 or compat.hits_are_claimed_first()
    assert driver.offload.stats.restored == safe
    assert ("Request second is left to vLLM's prefix cache" in log.text) is not safe
    assert len(second.output_token_ids) == 60
    driver.step_until(lambda: not driver.scheduler.has_requests())
    driver.assert_all_back()


def test_of_somebody_elses_scheduler_all_is_restored_that_has_no_hits(drive):
    driver = drive(num_blocks=15, specs=(SPEC, WINDOW), scheduler_cls=Asking)
    _, second = preempt_one(driver)
    driver.scheduler.finish_requests("first", RequestStatus.FINISHED_ABORTED)
    driver.step_until(second.is_finished)
    assert driver.offload.stats.restored == 1
    assert len(second.output_token_ids) == 60


@pytest.mark.parametrize(
    ("specs", "num_blocks"),
    [((SPEC, SPEC), 15), ((WINDOW,), 6)],
    ids=["two groups", "a window"],
)
def test_of_somebody_elses_scheduler_a_load_that_it_cannot_do_without_ends_the_engine(
    drive, specs, num_blocks
):
    driver = drive(
        num_blocks=num_blocks,
        specs=specs,
        scheduler_cls=Asking,
        transfer={"kv_load_failure_policy": "recompute"},
    )
    _, second = preempt_one(driver, num_tokens=20)
    driver.scheduler.finish_requests("first", RequestStatus.FINISHED_ABORTED)
    driver.loads_ok = False
    if compat.loads_fail_by_request():
        driver.step_until(second.is_finished)
        assert len(second.output_token_ids) == 60
    else:
        with pytest.raises(RuntimeError, match="restoring request second failed"):
            driver.step_until(second.is_finished)


# ---- a scheduler that never asks ----


@pytest.mark.parametrize("stock", [Scheduler, AsyncScheduler])
def test_under_vllms_own_scheduler_the_first_preemption_is_warned_of(drive, log, stock):
    driver = drive(scheduler_cls=stock)
    log.clear()
    _, second = preempt_one(driver)
    driver.scheduler.finish_requests("first", RequestStatus.FINISHED_ABORTED)
    driver.step_until(second.is_finished)
    (warning,) = log.warnings
    assert "Request second was preempted" in warning
    assert "--scheduler-cls preempt_offload.RecomputeScheduler" in warning


def test_under_our_scheduler_nothing_is_warned_of(drive, log):
    driver = drive()
    _, second = preempt_one(driver)
    driver.scheduler.finish_requests("first", RequestStatus.FINISHED_ABORTED)
    driver.step_until(second.is_finished)
    assert not log.warnings


# ---- what cannot be preserved ----

TOO_SMALL = {"offload_host_memory_ratio": 0.25}


def test_what_cannot_be_preserved_is_recomputed_here(drive, log):
    driver = drive(TOO_SMALL)
    _, second = preempt_one(driver)
    assert "CPU cache" in log.text
    assert not second.is_finished()
    driver.scheduler.finish_requests("first", RequestStatus.FINISHED_ABORTED)
    driver.step_until(second.is_finished)
    assert len(second.output_token_ids) == 60
    assert second.get_finished_reason() == FinishReason.LENGTH


def test_on_a_decode_node_what_cannot_be_preserved_goes_back_to_the_proxy(drive, log):
    driver = drive(TOO_SMALL, transfer={"kv_role": "kv_consumer"})
    first, second = preempt_one(driver)
    assert second.is_finished()
    last = driver.outputs["second"][-1]
    assert last.finish_reason == FinishReason.STOP
    assert last.stop_reason == "recomputed"
    assert last.new_token_ids == []
    assert "Request second could not be preserved" in log.text
    assert not first.is_finished()
    driver.step_until(first.is_finished)
    driver.step_until(lambda: not driver.scheduler.has_finished_requests())
    driver.assert_all_back()


def test_on_a_decode_node_what_can_be_preserved_stays(drive):
    driver = drive(transfer={"kv_role": "kv_consumer"})
    _, second = preempt_one(driver)
    assert not second.is_finished()
    driver.scheduler.finish_requests("first", RequestStatus.FINISHED_ABORTED)
    driver.step_until(second.is_finished)
    assert driver.offload.stats.restored == 1


def tokens_under_way(request):
    """Tokens that steps under way will still bring, which vLLM 0.32 counts apart if preempted."""
    return request.num_output_placeholders + getattr(request, "num_stale_output_tokens", 0)


def step_until_preempted(driver, request, depth=2):
    """Returns the last ``depth`` steps, which are still under way."""
    driver.lift_fence()
    under_way = []
    while not request.num_preemptions:
        if len(under_way) == depth:
            driver.update(*under_way.pop(0))
        output = driver.schedule()
        under_way.append((output, driver.execute(output)))
    assert len(under_way) == depth
    return under_way


def preempt_one_in_flight(driver, depth):
    """Preempts the second request while its last ``depth`` steps are still under way."""
    driver.add("first", 40, first=1)
    second = driver.add("second", 40, first=2)
    under_way = step_until_preempted(driver, second, depth)
    assert tokens_under_way(second) == depth - 1
    return second, under_way


@pytest.mark.parametrize("depth", [2, 3])
def test_on_a_decode_node_a_request_is_returned_with_the_tokens_still_under_way(drive, depth):
    driver = drive(TOO_SMALL, transfer={"kv_role": "kv_consumer"}, asynchronous=True)
    second, under_way = preempt_one_in_flight(driver, depth)
    expected = second.num_tokens + tokens_under_way(second)
    for output, report in under_way[:-1]:
        assert not second.is_finished()
        driver.update(output, report)
    assert second.is_finished()
    assert second.num_tokens == expected
    *_, token, last = driver.outputs["second"]
    assert len(token.new_token_ids) == 1
    assert token.finish_reason is None
    assert (last.finish_reason, last.stop_reason) == (FinishReason.STOP, "recomputed")


def test_a_request_preempted_in_flight_is_restored_with_the_token_that_came_out(drive):
    driver = drive(asynchronous=True)
    second, under_way = preempt_one_in_flight(driver, depth=2)
    for output, report in under_way:
        driver.update(output, report)
    assert tokens_under_way(second) == 0
    driver.scheduler.finish_requests("first", RequestStatus.FINISHED_ABORTED)
    driver.step_until(lambda: second.status == WAITING_FOR_LOAD, at_most=3)
    assert second.num_computed_tokens == second.num_tokens - 1
    driver.step_until(second.is_finished)
    assert len(second.output_token_ids) == 60


def test_whether_vllm_restores_a_request_that_awaits_prompt_logprobs_is_known(drive):
    driver = drive(
        num_blocks=11,
        scheduling_policy="priority",
        max_model_len=256,
        long_prefill_token_threshold=48,
    )
    known = driver.offload._keeps_prompt_logprobs
    driver.offload._keeps_prompt_logprobs = True
    victim = driver.add("victim", 144, first=1, priority=1, max_tokens=4)
    victim.skip_reading_prefix_cache = True
    driver.add("other", 15, first=2, priority=0)
    driver.step_until(lambda: victim.num_preemptions)
    assert victim.num_output_tokens == 0
    driver.scheduler.finish_requests("other", RequestStatus.FINISHED_ABORTED)
    driver.step_until(victim.is_finished)
    assert driver.offload.stats.restored == known


# ---- the device's prefix cache ----


def test_blocks_that_no_forward_has_filled_are_not_left_in_the_prefix_cache(drive):
    driver = drive(
        num_blocks=11,
        enable_prefix_caching=True,
        scheduling_policy="priority",
        max_model_len=256,
        long_prefill_token_threshold=48,
    )
    # Nine blocks for the victim, three in each step; one for the other, which needs a second
    # one in the third step, when the victim's last three blocks have their hashes already.
    victim = driver.add("victim", 144, first=1, priority=1)
    driver.add("other", 15, first=2, priority=0)
    driver.step()
    driver.step()
    assert victim.num_computed_tokens == 96
    output = driver.step()
    assert output.preempted_req_ids == {"victim"}
    assert output.num_scheduled_tokens == {"other": 1}
    cached = [
        driver.manager.block_pool.get_cached_block(block_hash, [0]) is not None
        for block_hash in victim.block_hashes
    ]
    assert cached == [True] * 6 + [False] * 3


# ---- reset ----


def test_a_reset_drops_kv_instead_of_preserving_it(drive):
    driver = drive(enable_prefix_caching=True)
    first, second = preempt_one(driver)
    driver.step()
    assert driver.connector.has_preempted_request("second")
    preserved = driver.offload.stats.preserved
    assert driver.scheduler.reset_prefix_cache(reset_running_requests=True) is True
    assert first.num_preemptions == 1
    assert driver.offload.stats.preserved == preserved
    assert not driver.connector.has_preempted_request("first")
    assert not driver.connector.has_preempted_request("second")
    driver.step_until(lambda: first.status == RequestStatus.RUNNING)
    driver.step_until(second.is_finished)
    assert driver.offload.stats.restored == 0
    # Preemptions after it are preserved again.
    _, fourth = preempt_one(driver, names=("third", "fourth"))
    driver.step_until(fourth.is_finished)
    assert driver.offload.stats.preserved == preserved + 1


def test_a_reset_on_a_decode_node_returns_nobody(drive):
    driver = drive(transfer={"kv_role": "kv_consumer"})
    driver.add("first", 40, first=1)
    driver.step()
    assert driver.scheduler.reset_prefix_cache(reset_running_requests=True) is True
    driver.step()
    assert driver.outputs["first"][-1].finish_reason is None
    assert not driver.scheduler.requests["first"].is_finished()


def test_a_reset_without_running_requests_forgets_what_is_preserved(drive):
    driver = drive()
    _, second = preempt_one(driver)
    driver.step()
    driver.scheduler.finish_requests("first", RequestStatus.FINISHED_ABORTED)
    assert driver.scheduler.reset_prefix_cache() is True
    assert not driver.connector.has_preempted_request("second")
    driver.step_until(second.is_finished)
    assert driver.offload.stats.restored == 0


def test_a_reset_that_vllm_refuses_forgets_nothing(drive):
    driver = drive(enable_prefix_caching=True)
    preempt_one(driver)
    driver.step()
    assert driver.scheduler.reset_prefix_cache() is False
    assert driver.connector.has_preempted_request("second")


def test_what_is_being_loaded_at_a_reset_is_computed_again(drive):
    driver = drive()
    _, second = preempt_one(driver)
    driver.scheduler.finish_requests("first", RequestStatus.FINISHED_ABORTED)
    driver.hold_loads = True
    driver.step_until(lambda: second.status == WAITING_FOR_LOAD)
    with pytest.raises(RuntimeError, match="remote KV transfer"):
        driver.scheduler.reset_prefix_cache(reset_running_requests=True)
    driver.hold_loads = False
    num_tokens = second.num_tokens
    driver.step()
    assert driver.step().num_scheduled_tokens == {"second": num_tokens}
    driver.step_until(second.is_finished)
    assert len(second.output_token_ids) == 60
    driver.step_until(lambda: not driver.scheduler.has_finished_requests())
    driver.assert_all_back()


def test_a_session_that_waits_for_input_keeps_its_kv_at_a_reset(drive):
    driver = drive()
    scheduler = driver.scheduler
    session = driver.add("session", 20, first=1, max_tokens=4, resumable=True)
    driver.step_until(lambda: session.status == RequestStatus.WAITING_FOR_STREAMING_REQ)
    kept = session.num_computed_tokens
    assert kept == 23
    tokens = list(session.all_token_ids)
    # vLLM cannot reset while it holds blocks.
    with pytest.raises(RuntimeError, match="Failed to reset KV cache"):
        scheduler.reset_prefix_cache(reset_running_requests=True)
    assert session.num_computed_tokens == kept

    driver.add("session", 5, first=2, max_tokens=4, resumable=True)
    assert list(session.all_token_ids) == tokens[:kept] + [2] * 5
    assert driver.step().num_scheduled_tokens == {"session": 5}
    driver.step_until(lambda: session.status == RequestStatus.WAITING_FOR_STREAMING_REQ)
    scheduler.finish_requests("session", RequestStatus.FINISHED_ABORTED)
    driver.step_until(lambda: not scheduler.has_requests())
    driver.assert_all_back()


# ---- sessions ----


@pytest.mark.parametrize("input_waits", [True, False])
def test_a_session_preempted_before_its_turn_ended_goes_on_with_its_kv(drive, input_waits):
    driver = drive(asynchronous=True)
    driver.add("first", 40, first=1)
    # The first wants a fourth block when it has 48 tokens and the session has 64: all blocks are
    # taken, and the last token of the session's turn is under way.
    session = driver.add("session", 56, first=2, max_tokens=9, resumable=True)
    more = {"first": 3, "max_tokens": 9, "resumable": True}
    under_way = step_until_preempted(driver, session)
    assert session.num_output_tokens < 9
    if input_waits:
        driver.add("session", 5, **more)
    kept = list(session.all_token_ids)
    for output, report in under_way:
        driver.update(output, report)
    if not input_waits:
        assert session.status == RequestStatus.WAITING_FOR_STREAMING_REQ
        driver.add("session", 5, **more)
    assert list(session.all_token_ids) == kept + [3] * 5
    driver.scheduler.finish_requests("first", RequestStatus.FINISHED_ABORTED)
    driver.step_until(lambda: session.status == RequestStatus.WAITING_FOR_STREAMING_REQ)
    assert driver.offload.stats.restored_tokens == len(kept)
    assert session.num_output_tokens == 9
    driver.scheduler.finish_requests("session", RequestStatus.FINISHED_ABORTED)
    driver.step_until(lambda: not driver.scheduler.has_requests())
    driver.assert_all_back()


def test_rejected_drafts_are_not_restored_in_place_of_a_sessions_next_input(drive):
    driver = drive(asynchronous=True, drafts=2)
    driver.add("first", 40, first=1)
    more = {"first": 2, "max_tokens": 9, "resumable": True}
    session = driver.add("session", 40, **more)
    under_way = step_until_preempted(driver, session)
    # The step that is under way accepts no draft, and its token is the last one of the turn.
    session.max_tokens = session.num_output_tokens + 1
    for output, report in under_way:
        driver.update(output, report)
    assert session.status == RequestStatus.WAITING_FOR_STREAMING_REQ
    assert driver.offload.table.status("session") == ("Ready", session.num_tokens + 1)
    driver.add("session", 5, **more)
    driver.scheduler.finish_requests("first", RequestStatus.FINISHED_ABORTED)
    driver.step_until(lambda: session.status == RequestStatus.WAITING_FOR_STREAMING_REQ)
    assert driver.offload.stats.restored == 0
    driver.scheduler.finish_requests("session", RequestStatus.FINISHED_ABORTED)
    driver.step_until(lambda: not driver.scheduler.has_requests())
    driver.assert_all_back()


def test_no_hash_of_a_session_covers_a_token_that_it_has_not_kept(drive):
    driver = drive({"enable_offload_prefix_caching": True})
    session = driver.add("session", 28, first=1, max_tokens=4, resumable=True)
    driver.step_until(lambda: session.status == RequestStatus.WAITING_FOR_STREAMING_REQ)
    assert session.num_tokens == 2 * BLOCK_SIZE
    driver.add("session", 5, first=2, max_tokens=4, resumable=True)
    hashes = list(session.block_hashes)
    session.block_hashes.clear()
    session.update_block_hashes()
    assert hashes == session.block_hashes


@pytest.mark.parametrize("pause", list(PauseState), ids=lambda pause: pause.name)
def test_a_restored_request_and_a_session_do_not_keep_each_other_from_running(drive, pause):
    driver = drive({"offload_host_memory_ratio": 4}, num_blocks=10)
    scheduler = driver.scheduler

    def turn_is_over():
        return session.status == RequestStatus.WAITING_FOR_STREAMING_REQ

    session = driver.add("session", 20, first=1, max_tokens=4, resumable=True)
    driver.step_until(turn_is_over)
    driver.add("other", 16, first=2)
    second = driver.add("second", 65, first=3)
    driver.step_until(lambda: second.num_preemptions)
    scheduler.finish_requests("other", RequestStatus.FINISHED_ABORTED)
    driver.hold_loads = True
    driver.step_until(lambda: second.status == WAITING_FOR_LOAD)
    # While the second request is being restored, the session takes all other blocks; then neither
    # has one for its next token.
    driver.add("session", 30, first=1, max_tokens=4, resumable=True)
    driver.step_until(turn_is_over)
    assert driver.manager.block_pool.get_num_free_blocks() == 0
    driver.hold_loads = False
    driver.add("session", 20, first=1, max_tokens=4, resumable=True)
    if pause != PauseState.UNPAUSED:
        # Newer vLLM waits for requests that hold blocks if it is to let requests end first.
        scheduler.set_pause_state(pause)
        driver.step_until(lambda: not scheduler.has_requests())
        scheduler.set_pause_state(PauseState.UNPAUSED)
    driver.step_until(turn_is_over)
    assert second.num_computed_tokens == 0
    scheduler.finish_requests("session", RequestStatus.FINISHED_ABORTED)
    driver.step_until(second.is_finished)
    assert len(second.output_token_ids) == 60
    assert driver.offload.stats.restored == 2
    driver.step_until(lambda: not scheduler.has_requests())
    driver.assert_all_back()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_is_restored_and_finds_no_room_is_computed_again_after_a_reset(drive, asynchronous):
    driver = drive(
        {"offload_host_memory_ratio": 4},
        num_blocks=9,
        asynchronous=asynchronous,
        enable_prefix_caching=True,
    )
    scheduler = driver.scheduler
    driver.add("first", 40, first=1)
    second = driver.add("second", 40, first=2)
    driver.step_until(lambda: second.num_preemptions)
    scheduler.finish_requests("first", RequestStatus.FINISHED_ABORTED)
    driver.add("third", 16, first=3)
    driver.add("fourth", 30, first=4)

    def restored_without_room():
        # Its load takes until the others have taken the last free block.
        free = driver.manager.block_pool.get_num_free_blocks()
        driver.hold_loads = second.status == WAITING_FOR_LOAD and free > 0
        return second.status == RequestStatus.PREEMPTED and second.num_computed_tokens > 0

    driver.step_until(restored_without_room)
    assert scheduler.reset_prefix_cache(True, True) is True
    assert second.num_computed_tokens == 0
    driver.step_until(second.is_finished)
    driver.step_until(lambda: not scheduler.has_requests())
    driver.assert_all_back()


def test_a_victim_that_an_older_step_ends_is_gone_from_every_queue(drive):
    """With three steps under way, two of them may have been scheduled before a preemption."""
    driver = drive({"offload_host_memory_ratio": 4}, num_blocks=8, asynchronous=True)
    driver.lift_fence()
    scheduler = driver.scheduler
    driver.add("first", 40, first=1)
    second = driver.add("second", 40, first=2)
    second.sampling_params._all_stop_token_ids = {7}
    second.sampling_params.stop_token_ids = [7]
    under_way = []
    while not second.is_finished():
        output = driver.schedule()
        under_way.append((output, driver.execute(output)))
        if len(under_way) == 3:
            output, report = under_way.pop(0)
            if second.num_preemptions and tokens_under_way(second) == 1:
                assert driver.passed_over(second)
                report.sampled_token_ids[report.req_id_to_index["second"]] = [7]
            driver.update(output, report)
    assert not any(second in queue for queue in compat.waiting_queues(scheduler))
    assert not driver.passed_over(second)
    for output, report in under_way:
        driver.update(output, report)
    driver.step_until(lambda: not scheduler.has_requests())
    driver.assert_all_back()


# ---- context parallelism ----


@pytest.fixture(
    params=[(2, 1), (1, 2), (2, 2), (4, 1)], ids=lambda size: "dcp{}-pcp{}".format(*size)
)
def spread(request, drive):
    """Makes a driver whose blocks are spread over ranks; also the tokens of such a block."""
    dcp, pcp = request.param

    def spread(extra=None, **config_args):
        driver = drive(
            extra,
            ranks={
                "decode_context_parallel_size": dcp,
                "prefill_context_parallel_size": pcp,
                "world_size": dcp * pcp,
            },
            max_model_len=1024,
            max_num_batched_tokens=1024,
            **config_args,
        )
        tokens = driver.manager.coordinator.single_type_managers[0].block_size
        assert tokens in (BLOCK_SIZE * dcp, BLOCK_SIZE * dcp * pcp)
        return driver, tokens

    return spread


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_blocks_spread_over_ranks_come_back_where_they_belong(spread, prefix_caching):
    driver, tokens = spread(enable_prefix_caching=prefix_caching)
    first = driver.add("first", 2 * tokens + tokens // 2, first=1, max_tokens=tokens)
    second = driver.add("second", 3 * tokens + tokens // 2, first=2, max_tokens=tokens)
    scheduled = 0
    store = load = None
    while not second.is_finished():
        held = driver.manager.get_block_ids("second")[0]
        output = driver.schedule()
        scheduled += output.num_scheduled_tokens.get("second", 0)
        meta = output.kv_connector_metadata
        if meta.store_event is not None:
            assert store is None
            store, computed = meta.store_pairs, second.num_tokens - 1
            num_stored = -(-computed // tokens)
            assert store[:, 1].tolist() == held[:num_stored]
        if meta.load_requests:
            load = meta.load_pairs
            local = num_stored - len(load)
            assert (
                load[:, 1].tolist() == driver.manager.get_block_ids("second")[0][local:num_stored]
            )
            assert load[:, 2].tolist() == store[local:, 2].tolist()
        driver.update(output, driver.execute(output))
    assert load is not None
    assert scheduled == second.num_tokens - 1
    assert first.is_finished() and first.num_preemptions == 0
    driver.step_until(lambda: not driver.scheduler.has_finished_requests())
    driver.assert_all_back()


def test_requests_share_spread_blocks_that_are_equal_on_all_ranks(spread):
    driver, tokens = spread({"enable_offload_prefix_caching": True}, num_blocks=20)
    # The third differs from the others in what the last of the ranks has of the second block.
    common = {"first": 2 * tokens, "second": 2 * tokens, "third": 2 * tokens - 1}
    requests = [
        driver.add(name, num_tokens, first=7, tail=[i] * tokens)
        for i, (name, num_tokens) in enumerate(common.items())
    ]
    driver.step()
    shared = [0]
    for request in requests:
        block_ids = driver.manager.get_block_ids(request.request_id)
        assert driver.connector.update_state_before_preempt(
            request, block_ids, request.num_computed_tokens
        )
        driver.step()
        shared.append(driver.offload.stats.shared_blocks)
    assert shared == [0, 0, 2, 3]
