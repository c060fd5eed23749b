"""Which state of a request is a right one, with speculative decoding.

A step that verifies drafts leaves a state after each of its tokens: the first in the block where
a step without drafts leaves its only one, the others in the blocks behind that. From which of
them the request goes on is known once drafts are accepted or rejected. But the first is always a
right one, because its token is the one that was sampled before; and it is the one that vLLM's
model runner reads when it begins with a request anew, as if all drafts had been rejected. So that
is the state to preserve: the few tokens after it are computed again.

With vLLM's cache mode "align" there is an exception. If all drafts are accepted and the last one
ends a block, the runner moves the state after it to the front.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class CertainState(NamedTuple):
    """A state that can be preserved.

    Attributes:
        num_tokens: Tokens that it is the state after.
        step_end: Tokens up to the end of the step that left it, drafts included. The state is in
            the block of the last of them.
    """

    num_tokens: int
    step_end: int


class DraftStates:
    """Follows which requests' last step has verified drafts.

    Args:
        asynchronous: Whether steps are scheduled while one is under way.
        aligned_tokens: Tokens per block of the state groups in cache mode "align"; 0 in others.
    """

    def __init__(self, *, asynchronous: bool, aligned_tokens: int) -> None:
        self._asynchronous = asynchronous
        self._aligned_tokens = aligned_tokens
        # By request, if its last step had drafts.
        self._verified: dict[str, CertainState] = {}

    def note_step(self, output: SchedulerOutput) -> None:
        """Notes a step that has been scheduled."""
        drafts, scheduled = output.scheduled_spec_decode_tokens, output.num_scheduled_tokens
        if not drafts and not self._verified:
            return
        cached = output.scheduled_cached_reqs
        for request_id, start in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            if request_id in drafts:
                end = start + scheduled[request_id]
                self._verified[request_id] = CertainState(end - len(drafts[request_id]), end)
            else:
                self._verified.pop(request_id, None)

    def forget(self, request_id: str) -> None:
        """Forgets the last step of a request: it has ended, or goes on from other blocks."""
        self._verified.pop(request_id, None)

    def find(self, request: Request, num_computed_tokens: int) -> CertainState | None:
        """The state to preserve of a request.

        Args:
            request: A request that loses its blocks.
            num_computed_tokens: Its tokens, once the step under way is through; if there is one,
                its drafts are counted.

        Returns:
            ``None`` if no state is known to be right.
        """
        verified = self._verified.get(request.request_id)
        if verified is None:
            return CertainState(num_computed_tokens, num_computed_tokens)
        if request.num_output_placeholders > 0:
            # What is known are the tokens up to the first of the step under way.
            state = CertainState(request.num_tokens, num_computed_tokens)
            return None if self._ends_block(state) else state
        if self._asynchronous:
            # That step was scheduled before anyone knew how many drafts of the one before count.
            return None
        if self._ends_block(verified) and num_computed_tokens == verified.step_end:
            return CertainState(num_computed_tokens, num_computed_tokens)
        return verified

    def _ends_block(self, state: CertainState) -> bool:
        return self._aligned_tokens > 0 and state.step_end % self._aligned_tokens == 0
