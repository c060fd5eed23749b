"""Which state of a request is a right one, with speculative decoding.

A step that verifies drafts leaves a state after each of its tokens: the first in the block where
a step without drafts leaves its only one, the others in the blocks behind that. From which of
them the request goes on is known once drafts are accepted or rejected. But the first is always a
right one, because its token is the one that was sampled before; and it is the one that vLLM's
model runner reads when it begins with a request anew, as if all drafts had been rejected. So that
is the state to preserve: the few tokens after it are computed again, one by one, because the runner
takes a few tokens at once for drafts, and would go on from the state after the first of them.

With vLLM's cache mode "align" there is an exception. If all drafts are accepted and the last one
ends a block, the runner moves the state after it to the front.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput
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
    """Follows what became of the drafts in the last step of each request.

    Args:
        aligned_tokens: Tokens per block of the state groups in cache mode "align"; 0 in others.
    """

    def __init__(self, *, aligned_tokens: int) -> None:
        self._aligned_tokens = aligned_tokens
        # Drafts accepted and drafts verified, by request, if its last step had any.
        self._verified: dict[str, tuple[int, int]] = {}

    def note_outputs(
        self, output: SchedulerOutput, result: ModelRunnerOutput, requests: Mapping[str, Request]
    ) -> None:
        """Notes a step that is through.

        Args:
            output: What was scheduled.
            result: What came out.
            requests: Those that the scheduler has.
        """
        drafts = output.scheduled_spec_decode_tokens
        if not drafts and not self._verified:
            return
        for request_id in output.num_scheduled_tokens:
            request = requests.get(request_id)
            if request_id in drafts and request is not None and not request.is_finished():
                sampled = result.sampled_token_ids[result.req_id_to_index[request_id]]
                self._verified[request_id] = max(len(sampled) - 1, 0), len(drafts[request_id])
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
        if request.num_output_placeholders > 0:
            # The last token known is the first one of the step under way.
            certain = min(num_computed_tokens, request.num_tokens)
            if certain < num_computed_tokens and self._ends_block(num_computed_tokens):
                return None
            return CertainState(certain, num_computed_tokens)
        accepted, verified = self._verified.get(request.request_id, (0, 0))
        if request.is_prefill_chunk:
            # It has none; those are of a step from before the request began anew.
            accepted = verified = 0
        certain = num_computed_tokens - accepted
        step_end = certain + verified
        if accepted == verified and self._ends_block(step_end):
            return CertainState(step_end, step_end)
        return CertainState(certain, step_end)

    def _ends_block(self, num_tokens: int) -> bool:
        return self._aligned_tokens > 0 and num_tokens % self._aligned_tokens == 0
