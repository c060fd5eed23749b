from types import SimpleNamespace

import pytest

from preempt_offload.observe import SchedulerObserver


def output(scheduled, *, new=(), preempted=None):
    new = [SimpleNamespace(req_id=i, num_computed_tokens=found) for i, found in new]
    return SimpleNamespace(
        num_scheduled_tokens=scheduled, scheduled_new_reqs=new, preempted_req_ids=preempted
    )


@pytest.fixture
def observed():
    """A scheduler with three steps to go, watched, and the outputs of those steps."""
    outputs = [
        output({"a": 10, "b": 6}, new=[("a", 0), ("b", 4)]),
        output({"a": 1}, preempted={"b"}),
        output({"a": 1, "b": 11}),
    ]
    scheduler = SimpleNamespace(schedule=iter(outputs).__next__)
    return SchedulerObserver(scheduler), scheduler, outputs


def test_the_scheduler_works_as_before(observed):
    _, scheduler, outputs = observed
    assert [scheduler.schedule() for _ in outputs] == outputs


def test_steps_tokens_and_preemptions_are_counted(observed):
    observer, scheduler, outputs = observed
    for _ in outputs:
        scheduler.schedule()
    assert observer.steps == 3
    assert observer.scheduled_tokens == {"a": 12, "b": 17}
    assert observer.found_tokens == {"a": 0, "b": 4}
    assert observer.preemptions == {"b": 1}


def test_tokens_that_went_through_the_model_again_are_recomputed(observed):
    observer, scheduler, outputs = observed
    for _ in outputs:
        scheduler.schedule()
    # "a" has 12 tokens to compute; "b" has 11, of which 4 were found and 10 computed before.
    assert observer.recomputed_tokens(12 + 11) == 10


def test_it_can_start_again(observed):
    observer, scheduler, _ = observed
    scheduler.schedule()
    observer.clear()
    assert (observer.steps, observer.recomputed_tokens(0)) == (0, 0)
    scheduler.schedule()
    assert (observer.steps, observer.scheduled_tokens) == (1, {"a": 1})
