"""Counts what a scheduler does, from outside: the judge in the demo and in the tests."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler


class SchedulerObserver:
    """Watches every ``SchedulerOutput`` of one scheduler; knows nothing of connectors.

    Attributes:
        scheduled_tokens: Tokens sent through the model, by request id.
        found_tokens: Tokens that a request did not have to compute when it was first
            scheduled, by request id: the device's prefix cache had them.
        preemptions: Preemptions, by request id.
        steps: Calls of ``schedule``.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduled_tokens: Counter[str] = Counter()
        self.found_tokens: Counter[str] = Counter()
        self.preemptions: Counter[str] = Counter()
        self.steps = 0
        schedule = scheduler.schedule

        def observed(*args: Any) -> SchedulerOutput:
            output = schedule(*args)
            self.steps += 1
            self.scheduled_tokens.update(output.num_scheduled_tokens)
            for request in output.scheduled_new_reqs:
                self.found_tokens.setdefault(request.req_id, request.num_computed_tokens)
            self.preemptions.update(output.preempted_req_ids or ())
            return output

        scheduler.schedule = observed

    def recomputed_tokens(self, num_tokens: int) -> int:
        """Tokens that went through the model more than once.

        Args:
            num_tokens: Prompt and output tokens of all requests but the last token of
                each, which is never fed to the model.
        """
        return self.scheduled_tokens.total() + self.found_tokens.total() - num_tokens

    def clear(self) -> None:
        """Starts to count again."""
        self.scheduled_tokens.clear()
        self.found_tokens.clear()
        self.preemptions.clear()
        self.steps = 0
