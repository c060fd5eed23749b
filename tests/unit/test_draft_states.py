"""Which state is preserved of a request whose last step has verified drafts."""

from types import SimpleNamespace

import pytest
from unit_support import Request, Scene

from preempt_offload.draft_states import DraftStates

# A block of attention and three of states: the request's own, and one for each of two drafts.
BLOCKS = ([10, 11, 12, 13], [0, 0, 20, 21, 22])


def a_step(*, drafts, accepted=0, request_id="a", finished=False):
    """What vLLM's scheduler said of a step with one request, and what came out of it."""
    output = SimpleNamespace(
        num_scheduled_tokens={request_id: 1 + drafts},
        scheduled_spec_decode_tokens={request_id: [-1] * drafts} if drafts else {},
    )
    result = SimpleNamespace(
        req_id_to_index={request_id: 0}, sampled_token_ids=[[7] * (1 + accepted)]
    )
    return output, result, {request_id: Request(request_id, 11, finished=finished)}


@pytest.fixture(params=[0, 4], ids=["mode none", "mode align"])
def aligned_tokens(request):
    return request.param


@pytest.fixture
def states(aligned_tokens):
    return DraftStates(aligned_tokens=aligned_tokens)


def test_without_drafts_the_state_is_that_of_all_tokens(states):
    states.note_outputs(*a_step(drafts=0))
    assert states.find(Request("a", 10), 9) == (9, 9)


@pytest.mark.parametrize("accepted", [0, 1, 2])
def test_the_first_state_of_a_step_is_right_however_many_drafts_are(states, accepted):
    states.note_outputs(*a_step(drafts=2, accepted=accepted))
    assert states.find(Request("a", 10 + accepted), 9 + accepted) == (9, 11)


@pytest.mark.parametrize(("accepted", "moved"), [(1, False), (2, True)])
def test_a_state_at_the_end_of_a_block_is_moved_to_the_front(
    states, aligned_tokens, accepted, moved
):
    states.note_outputs(*a_step(drafts=2, accepted=accepted))
    expected = (12, 12) if moved and aligned_tokens else (10, 12)
    assert states.find(Request("a", 11 + accepted), 10 + accepted) == expected


def test_while_a_step_is_under_way_its_first_token_is_the_last_one_known(states):
    states.note_outputs(*a_step(drafts=2, accepted=1))
    request = Request("a", num_tokens=9, num_output_placeholders=3)
    assert states.find(request, 11) == (9, 11)


def test_nobody_knows_yet_whether_a_step_under_way_will_move_its_state(states, aligned_tokens):
    request = Request("a", num_tokens=10, num_output_placeholders=3)
    assert states.find(request, 12) == (None if aligned_tokens else (10, 12))


def test_a_step_without_drafts_under_way_has_one_state(states):
    assert states.find(Request("a", 8, num_output_placeholders=1), 8) == (8, 8)


def test_only_the_last_step_counts(states):
    states.note_outputs(*a_step(drafts=2, accepted=1))
    states.note_outputs(*a_step(drafts=2, request_id="b"))
    assert states.find(Request("a", 11), 10) == (9, 11)
    states.note_outputs(*a_step(drafts=0))
    assert states.find(Request("a", 11), 10) == (10, 10)
    states.note_outputs(*a_step(drafts=2, accepted=1))
    states.forget("a")
    assert states.find(Request("a", 11), 10) == (10, 10)


def test_what_comes_out_for_a_request_that_has_ended_is_not_kept(states):
    output, result, _ = a_step(drafts=2, accepted=1)
    states.note_outputs(output, result, {})
    assert states.find(Request("a", 11), 10) == (10, 10)
    states.note_outputs(*a_step(drafts=2, accepted=1, finished=True))
    assert states.find(Request("a", 11), 10) == (10, 10)


def test_a_chunk_of_known_tokens_has_no_drafts(states):
    states.note_outputs(*a_step(drafts=2, accepted=1))
    assert states.find(Request("a", 30, is_prefill_chunk=True), 10) == (10, 10)


# ---- in the scheduler role ----


@pytest.fixture
def scene(states):
    scene = Scene(block_tokens=(4, 4), state_groups=(1,), draft_states=states)
    scene.scheduler.scheduler_cooperates()
    return scene


def test_the_state_is_stored_from_where_the_step_has_left_it(scene):
    # The step's last draft begins a block, and all of its states are in those from there on.
    scene.scheduler.draft_states.note_outputs(*a_step(drafts=2, accepted=2))
    stored = scene.preserve(request := Request("a", 11), BLOCKS, 10)
    assert stored.store_pairs[:, :2].tolist() == [[0, 10], [0, 11], [1, 20]]
    assert scene.ask(request) == (8, True)
    scene.allocate(request, ([30, 31], [0, 33, 34, 35]), 8)
    loaded = scene.step()
    assert loaded.load_pairs[:, :2].tolist() == [[0, 30], [0, 31], [1, 33]]


def test_what_a_request_did_before_it_was_restored_is_forgotten(scene):
    scene.scheduler.draft_states.note_outputs(*a_step(drafts=2, accepted=2))
    request = Request("a", 11)
    assert scene.preempt(request, BLOCKS, 10)
    # The step under way at that time comes out now.
    scene.scheduler.draft_states.note_outputs(*a_step(drafts=2, accepted=2))
    scene.report_store(scene.step().store_event)
    scene.restore(request, ([30, 31], [0, 33, 34, 35]))
    # It loses its blocks before it has run.
    again = scene.preserve(request, ([30, 31], [0, 33, 34, 35]), 8)
    assert again.store_pairs[:, :2].tolist() == [[1, 33]]
    scene.scheduler.draft_states.note_outputs(*a_step(drafts=2, accepted=2))
    scene.scheduler.request_finished("a")
    scene.assert_nothing_left()
    assert scene.scheduler.draft_states.find(Request("a", 5), 4) == (4, 4)


@pytest.mark.parametrize("placeholders", [0, 3], ids=["", "a step under way"])
def test_a_scheduler_that_tells_nothing_leaves_only_prompts_certain(log, states, placeholders):
    scene = Scene(block_tokens=(4, 4), state_groups=(1,), draft_states=states)
    request = Request("a", 11 - placeholders // 2, num_output_placeholders=placeholders)
    assert scene.preempt(request, BLOCKS, 10) is False
    assert scene.scheduler.stats.not_preserved == 1
    assert "not known which of its states" in log.text
    assert "RecomputeScheduler would tell" in log.text
    scene.assert_nothing_left()
    assert scene.preempt(Request("b", 11, num_output_tokens=0), BLOCKS, 10) is True
