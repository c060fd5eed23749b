"""Counts what a scheduler does, from outside: the judge in the demo and in the tests."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler


class SchedulerObserver:
    """Watches every ``SchedulerOutput`` of one scheduler; knows nothing of connectors.

    Attributes:
        scheduled_tokens: Tokens sent through the model, by request id.
        preemptions: Preemptions, by request id.
        steps: Calls of ``schedule``.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduled_tokens: Counter[str] = Counter()
        self.preemptions: Counter[str] = Counter()
        self.steps = 0
        schedule = scheduler.schedule

        def observed() -> SchedulerOutput:
            output = schedule()
            self.steps += 1
            self.scheduled_tokens.update(output.num_scheduled_tokens)
            self.preemptions.update(output.preempted_req_ids or ())
            return output

        scheduler.schedule = observed

    def recomputed_tokens(self, num_tokens: int) -> int:
        """Tokens sent through the model beyond once each.

        Args:
            num_tokens: Prompt and output tokens of all requests but the last token of
                each, which is never fed to the model. Tokens found in the prefix cache
                of the device are not counted by anyone, so they make this smaller.
        """
        return self.scheduled_tokens.total() - num_tokens
