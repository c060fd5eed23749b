"""Which state is preserved of a request whose last step has verified drafts."""

import pytest
from unit_support import Request, Scene, scheduled

from preempt_offload.draft_states import DraftStates

# A block of attention and three of states: the request's own, and one for each of two drafts.
BLOCKS = ([10, 11, 12, 13], [0, 0, 20, 21, 22])


@pytest.fixture(params=[0, 4], ids=["mode none", "mode align"])
def aligned_tokens(request):
    return request.param


@pytest.fixture
def states(aligned_tokens):
    return DraftStates(asynchronous=False, aligned_tokens=aligned_tokens)


@pytest.fixture
def under_way(aligned_tokens):
    return DraftStates(asynchronous=True, aligned_tokens=aligned_tokens)


def test_without_drafts_the_state_is_that_of_all_tokens(states):
    states.note_step(scheduled("a", 8))
    assert states.find(Request("a", 10), 9) == (9, 9)


@pytest.mark.parametrize("accepted", [0, 1, 2])
def test_the_first_state_of_a_step_is_right_however_many_drafts_are(states, accepted):
    states.note_step(scheduled("a", 8, drafts=2))
    assert states.find(Request("a", 10 + accepted), 9 + accepted) == (9, 11)


@pytest.mark.parametrize(("accepted", "moved"), [(1, False), (2, True)])
def test_a_state_at_the_end_of_a_block_is_moved_to_the_front(
    states, aligned_tokens, accepted, moved
):
    states.note_step(scheduled("a", 9, drafts=2))
    expected = (12, 12) if moved and aligned_tokens else (10, 12)
    assert states.find(Request("a", 11 + accepted), 10 + accepted) == expected


def test_while_a_step_is_under_way_its_first_token_is_the_last_one_known(under_way):
    # It was scheduled as if both drafts of the step before were right; one was not.
    under_way.note_step(scheduled("a", 9, drafts=2))
    request = Request("a", num_tokens=9, num_output_placeholders=3)
    assert under_way.find(request, 11) == (9, 11)


def test_nobody_knows_yet_whether_a_step_under_way_will_move_its_state(under_way, aligned_tokens):
    under_way.note_step(scheduled("a", 9, drafts=2))
    request = Request("a", num_tokens=10, num_output_placeholders=3)
    assert under_way.find(request, 12) == (None if aligned_tokens else (10, 12))


def test_a_prompt_under_way_has_one_state(under_way):
    under_way.note_step(scheduled("a", 0, tokens=8))
    assert under_way.find(Request("a", 8, num_output_placeholders=1), 8) == (8, 8)


def test_where_a_past_step_began_is_not_known_with_async_scheduling(under_way):
    under_way.note_step(scheduled("a", 9, drafts=2))
    assert under_way.find(Request("a", num_tokens=11), 10) is None


def test_only_the_last_step_counts(states):
    states.note_step(scheduled("a", 8, drafts=2))
    states.note_step(scheduled("b", 3, drafts=2))
    assert states.find(Request("a", 11), 10) == (9, 11)
    states.note_step(scheduled("a", 10))
    assert states.find(Request("a", 12), 11) == (11, 11)
    states.note_step(scheduled("a", 11, drafts=2))
    states.forget("a")
    assert states.find(Request("a", 13), 12) == (12, 12)


# ---- in the scheduler role ----


@pytest.fixture
def scene(states):
    return Scene(block_tokens=(4, 4), state_groups=(1,), draft_states=states)


def test_the_state_is_stored_from_where_the_step_has_left_it(scene):
    # The step's last draft begins a block, and all of its states are in those from there on.
    scene.step(scheduled("a", 7, drafts=2))
    stored = scene.preserve(request := Request("a", 11), BLOCKS, 10)
    assert stored.store_pairs[:, :2].tolist() == [[0, 10], [0, 11], [1, 20]]
    assert scene.ask(request) == (8, True)
    scene.allocate(request, ([30, 31], [0, 33, 34, 35]), 8)
    loaded = scene.step()
    assert loaded.load_pairs[:, :2].tolist() == [[0, 30], [0, 31], [1, 33]]


def test_what_a_request_did_before_it_was_restored_is_forgotten(scene):
    scene.step(scheduled("a", 7, drafts=2))
    scene.preserve(request := Request("a", 11), BLOCKS, 10)
    scene.restore(request, ([30, 31], [0, 33, 34, 35]))
    # It loses its blocks before it has run.
    again = scene.preserve(request, ([30, 31], [0, 33, 34, 35]), 8)
    assert again.store_pairs[:, :2].tolist() == [[1, 33]]
    scene.step(scheduled("a", 7, drafts=2))
    scene.scheduler.request_finished("a")
    scene.assert_nothing_left()
    assert scene.scheduler._draft_states.find(Request("a", 5), 4) == (4, 4)


def test_a_request_without_a_state_known_to_be_right_is_not_preserved(log):
    states = DraftStates(asynchronous=True, aligned_tokens=0)
    scene = Scene(block_tokens=(4, 4), state_groups=(1,), draft_states=states)
    scene.step(scheduled("a", 7, drafts=2))
    assert scene.preempt(Request("a", 11), BLOCKS, 10) is False
    assert scene.scheduler.stats.not_preserved == 1
    assert "not known yet which of its states" in log.text
    scene.assert_nothing_left()
