import pytest

from preempt_offload._core import CompletionTracker, StateError


@pytest.fixture
def tracker():
    """Three workers; event 5 is open and worker 1 has reported it."""
    tracker = CompletionTracker(3)
    tracker.open(5)
    assert tracker.report(5, 1, True) is None
    return tracker


def test_the_last_report_decides(tracker):
    assert tracker.report(5, 2, True) is None
    assert tracker.num_open == 1
    assert tracker.report(5, 0, True) is True
    assert tracker.num_open == 0


@pytest.mark.parametrize("failing", [0, 2])
def test_one_failure_fails_the_event_but_not_before_the_last_report(tracker, failing):
    assert tracker.report(5, 0, failing != 0) is None
    assert tracker.report(5, 2, failing != 2) is False


def test_a_single_worker_decides_at_once():
    tracker = CompletionTracker(1)
    tracker.open(0)
    assert tracker.report(0, 0, True) is True


def test_events_are_independent(tracker):
    tracker.open(6)
    assert tracker.num_open == 2
    for rank in (0, 1):
        assert tracker.report(6, rank, False) is None
    assert tracker.report(5, 0, True) is None
    assert tracker.report(5, 2, True) is True
    assert tracker.report(6, 2, True) is False


def test_a_decided_event_may_be_opened_again(tracker):
    tracker.report(5, 0, True)
    tracker.report(5, 2, True)
    tracker.open(5)
    assert tracker.num_open == 1


WRONG_USE = {
    "event never opened": (lambda t: t.report(6, 0, True), StateError, ["event 6"]),
    "event open already": (lambda t: t.open(5), StateError, ["event 5"]),
    "unknown worker": (lambda t: t.report(5, 3, True), StateError, ["worker 3", "event 5", "0..3"]),
    "reported twice": (lambda t: t.report(5, 1, False), StateError, ["worker 1", "event 5"]),
    "negative event": (lambda t: t.open(-1), OverflowError, []),
    "negative rank": (lambda t: t.report(5, -1, True), OverflowError, []),
    "not a verdict": (lambda t: t.report(5, 0, 1), TypeError, ["int"]),
}


@pytest.mark.parametrize(("use", "error", "texts"), WRONG_USE.values(), ids=WRONG_USE)
def test_wrong_use_is_an_error_that_changes_nothing(tracker, use, error, texts):
    with pytest.raises(error) as caught:
        use(tracker)
    for text in texts:
        assert text in str(caught.value)
    assert tracker.num_open == 1
    assert tracker.report(5, 0, True) is None
    assert tracker.report(5, 2, True) is True


def test_a_report_after_the_decision_is_an_error(tracker):
    tracker.report(5, 0, True)
    tracker.report(5, 2, True)
    with pytest.raises(StateError, match="event 5"):
        tracker.report(5, 2, True)


def test_there_is_at_least_one_worker():
    with pytest.raises(ValueError, match=r"world_size .* 0"):
        CompletionTracker(0)
