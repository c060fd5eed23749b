"""vLLM's schedulers, asking the connector before a request loses its KV.

Nothing of vLLM's scheduling is repeated here: the classes extend it where a request is
preempted, where outputs leave, and where the prefix cache is reset.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import RequestStatus

from preempt_offload import compat
from preempt_offload.log import get_logger
from preempt_offload.transfer_config import check_transfer_config, doubtful_children

if TYPE_CHECKING:
    from typing_extensions import Self
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request, StreamingUpdate

logger = get_logger(__name__)

STOP_REASON = "recomputed"


class RecomputeScheduler(Scheduler):
    """Preserves preempted requests through the connector.

    This is the name for ``--scheduler-cls``, with async scheduling and without: it makes
    an ``AsyncRecomputeScheduler`` where vLLM schedules asynchronously.

    On a decode node of a P/D deployment (``kv_role="kv_consumer"``), a request that
    cannot be preserved is finished with ``stop_reason="recomputed"``, so that the proxy
    sends it to a prefill node again. Elsewhere vLLM recomputes it.
    """

    need_mamba_block_aligned_split: bool

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Chooses the class that fits the engine's async scheduling."""
        vllm_config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
        if cls is RecomputeScheduler and vllm_config.scheduler_config.async_scheduling:
            cls = AsyncRecomputeScheduler
        instance: Self = super().__new__(cls)
        return instance

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        transfer = self.vllm_config.kv_transfer_config
        check_transfer_config(transfer)
        self._offload = compat.find_offload_connector(self.connector)
        if self._offload is None:
            logger.warning(
                "No PreemptOffloadConnector is configured, so %s preserves no preempted request; "
                "add it to --kv-transfer-config",
                type(self).__name__,
            )
        else:
            compat.claim_hits_first(self.kv_cache_manager)
            compat.keep_windows_of_drafts(self)
            self._offload.scheduler_cooperates()
            doubtful = doubtful_children(transfer)
            # One that has the hook gives preserved requests priority by itself.
            if doubtful and not hasattr(self.connector, "update_state_before_preempt"):
                logger.warning(
                    "%s comes before PreemptOffloadConnector: what it has of a preempted request "
                    "is loaded instead of what was preserved, and the rest is computed again. Put "
                    "PreemptOffloadConnector first, or use PreemptOffloadMultiConnector",
                    " and ".join(doubtful),
                )
        self._aligns_states = self.need_mamba_block_aligned_split
        self._draft_states = self._offload and self._offload.scheduler.draft_states
        if self._draft_states is not None:
            # So that vLLM asks how many tokens to compute.
            self.need_mamba_block_aligned_split = True
        self._returns_unpreserved = transfer is not None and transfer.kv_role == "kv_consumer"
        # Requests that go back to the proxy once no step of theirs is under way.
        self._unpreserved: list[Request] = []
        # Sessions that were preempted before the last token of their turn came out.
        self._ended_turns: list[Request] = []
        self._dropping_kv = False
        # Whether the last step could do nothing.
        self._idle = False

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Also sees to it that restored requests do not keep each other from running."""
        output = super().schedule(*args, **kwargs)
        if output.total_num_scheduled_tokens == 0 and not self.running:
            # Once can be chance: a step that preempts a request does not admit others.
            if self._idle:
                self._end_standoff()
            self._idle = not self._idle
        else:
            self._idle = False
        return output

    def _mamba_block_aligned_split(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_local_computed_tokens: int = 0,
        num_external_computed_tokens: int = 0,
    ) -> int:
        """Also has known tokens after the prompt computed one by one where they are few.

        With drafts, vLLM's runner takes a few tokens at once for drafts: they leave a state each,
        and it goes on from the first.
        """
        if self._aligns_states:
            num_new_tokens = super()._mamba_block_aligned_split(
                request,
                num_new_tokens,
                num_new_local_computed_tokens,
                num_external_computed_tokens,
            )
        hits = num_new_local_computed_tokens + num_external_computed_tokens
        start = request.num_computed_tokens + hits
        few = self._draft_states is not None and num_new_tokens <= 1 + self.num_spec_tokens
        if few and request.num_tokens - start > 1 and start >= request.num_prompt_tokens:
            return min(num_new_tokens, 1)
        return num_new_tokens

    def _end_standoff(self) -> None:
        """Preempts a restored request that waits, if nothing else can go on.

        Such requests hold device blocks. vLLM keeps the blocks free that their next step needs,
        but not always enough of them; if one that needs more than are left comes before them,
        none of them can run, and what does not run is not preempted either.
        """
        if self._offload is None or self._offload.has_pending_transfers():
            return
        waiting = list(itertools.chain(*compat.waiting_queues(self)))
        if len(waiting) < 2 or self.pause_state == PauseState.PAUSED_ALL:
            return
        for request in waiting:
            if (
                request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
                and request.request_id in self.finished_recving_kv_req_ids
            ):
                # If its load has failed, it gives up its blocks by that.
                compat.end_wait(self, request)
        restored = self._offload.restored_requests()
        holders = [r for r in waiting if r.request_id in restored and r.num_computed_tokens > 0]
        if not holders:
            return
        request = max(holders, key=lambda request: (request.priority, request.arrival_time))
        preserved = self._preserve(request)
        compat.start_again(self, request)
        if not preserved and self._returns_unpreserved:
            self._take_back(request)

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        preserved = self._dropping_kv or self._preserve(request)
        cached = compat.uncomputed_cached_blocks(self.kv_cache_manager, request)
        if cached:
            self.kv_cache_manager.evict_blocks(cached)
        super()._preempt_request(request, *args, **kwargs)
        if not preserved and self._returns_unpreserved:
            self._take_back(request)

    def _take_back(self, request: Request) -> None:
        """Takes a preempted request out of the queues, to be returned to the proxy."""
        compat.dequeue(self, request)
        self._unpreserved.append(request)

    def _preserve(self, request: Request) -> bool:
        if self._offload is None:
            return False
        if request.num_output_tokens > 0:
            # It may be for the logprobs of its prompt that it reads no cache. They are out.
            request.skip_reading_prefix_cache = False
        num_computed_tokens = request.num_computed_tokens
        preserved = bool(
            self._offload.update_state_before_preempt(
                request,
                self.kv_cache_manager.get_block_ids(request.request_id),
                num_computed_tokens,
            )
        )
        if preserved:
            logger.info(
                "Recompute preemption offload enabled for request %s, computed_tokens=%d",
                request.request_id,
                num_computed_tokens,
            )
        return preserved

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Also ends or restarts the requests whose KV was lost on the way.

        vLLM restarts (or fails, as ``kv_load_failure_policy`` says) requests whose loads
        failed, where it can tell which; here the others follow. On a decode node, requests
        that could not be preserved are returned.
        """
        if self._draft_states is not None:
            # Before requests end by it.
            self._draft_states.note_outputs(scheduler_output, model_runner_output, self.requests)
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(
            scheduler_output, model_runner_output
        )
        if self._offload is not None:
            for request_id in self._offload.take_unloaded_requests():
                self._give_up_load(request_id, outputs)
            for request_id in self._offload.take_lost_requests():
                request = self.requests.get(request_id)
                waiting = request is not None and request.status == RequestStatus.PREEMPTED
                if waiting and self._returns_unpreserved:
                    self._take_back(request)
        if self._unpreserved:
            self._return_unpreserved(outputs)
        for request in self._ended_turns:
            # vLLM has taken it out of the queues, as if it had ended.
            compat.dequeue(self, request)
            self._enqueue_waiting_request(request)
        self._ended_turns.clear()
        return outputs

    def _give_up_load(self, request_id: str, outputs: dict[int, EngineCoreOutputs]) -> None:
        request = self.requests.get(request_id)
        if (
            request is None
            or request.status != RequestStatus.WAITING_FOR_REMOTE_KVS
            or request_id in self.failed_recving_kv_req_ids
        ):
            return
        if self.recompute_kv_load_failures:
            request.num_computed_tokens = 0
            self.failed_recving_kv_req_ids.add(request_id)
        else:
            self.finish_requests(request_id, RequestStatus.FINISHED_ERROR)
            self._put_out(request, outputs)

    def _return_unpreserved(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        requests, self._unpreserved = self._unpreserved, []
        for request in requests:
            if request.is_finished():
                continue
            if compat.outputs_under_way(request):
                # A token of this request is still to come out of a step under way.
                self._unpreserved.append(request)
                continue
            request.status = RequestStatus.FINISHED_STOPPED
            request.stop_reason = STOP_REASON
            self._put_out(request, outputs, **compat.transfer_params(self._free_request(request)))
            logger.info(
                "Request %s could not be preserved and is returned with stop_reason=%r",
                request.request_id,
                STOP_REASON,
            )

    def _handle_stopped_request(self, request: Request) -> bool:
        ended = bool(super()._handle_stopped_request(request))
        if not ended and request.num_computed_tokens == 0:
            self._ended_turns.append(request)
        return ended

    def _update_request_as_session(self, session: Request, update: StreamingUpdate) -> None:
        """Also keeps what a preempted session has computed.

        vLLM keeps those tokens that count as computed now; of a preempted request none do.
        """
        num_computed_tokens = session.num_computed_tokens
        if num_computed_tokens == 0:
            session.num_computed_tokens = session.num_tokens - 1
            if self._offload is not None:
                self._offload.scheduler.end_turn(session)
        hash_tokens = self._offload and self._offload.scheduler.hash_tokens
        if hash_tokens:
            # The last token goes, and with it the hash of a block that it has filled; vLLM 0.23
            # would keep it for the block's new tokens.
            del session.block_hashes[session.num_computed_tokens // hash_tokens :]
        super()._update_request_as_session(session, update)
        session.num_computed_tokens = num_computed_tokens

    @staticmethod
    def _put_out(
        request: Request, outputs: dict[int, EngineCoreOutputs], **transfer_params: Any
    ) -> None:
        """Adds the last output of a request that ends without a token."""
        output = EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=[],
            finish_reason=request.get_finished_reason(),
            stop_reason=request.stop_reason,
            events=request.take_events(),
            trace_headers=request.trace_headers,
            **transfer_params,
        )
        outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(output)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        if request.num_preemptions > 0:
            # While its store was under way vLLM 0.23 has put it among the skipped; if a step
            # that was still running ends it, vLLM looks for it among the waiting only.
            compat.dequeue(self, request)
        return super()._free_request(request, *args, **kwargs)

    def has_finished_requests(self) -> bool:
        """Also true while copies are under way, so that the engine goes on stepping."""
        return bool(super().has_finished_requests()) or (
            self._offload is not None and self._offload.has_pending_transfers()
        )

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Resets the prefix cache, and drops all preserved KV if that succeeds.

        Running requests that have to give up their KV for it are not preserved: what
        makes a reset necessary, new weights for example, makes their KV invalid.
        """
        done = False
        self._dropping_kv = True
        try:
            if reset_running_requests:
                self._abandon_loads()
            done = bool(super().reset_prefix_cache(reset_running_requests, reset_connector))
        finally:
            # Even if vLLM could not finish what it was told: its requests lost their KV.
            self._dropping_kv = False
            if self._offload is not None and (done or reset_running_requests):
                self._offload.reset_cache()
        return done

    def _abandon_loads(self) -> None:
        """Makes waiting requests that have KV, or are receiving it, start without it."""
        # From the last to the first, because each may be put before the others.
        for request in reversed(list(itertools.chain(*compat.waiting_queues(self)))):
            request_id = request.request_id
            if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
                # As after a failed load: nothing of it counts as computed.
                request.num_computed_tokens = 0
                self.failed_recving_kv_req_ids.add(request_id)
                if request_id in self.finished_recving_kv_req_ids:
                    compat.end_wait(self, request)
                    compat.start_again(self, request)
            elif request.num_computed_tokens > 0 and not self._is_blocked_waiting_status(
                request.status
            ):
                # Restored, and then there was no room for its next token. (A session that
                # waits for input is left to vLLM: its computed tokens say what it keeps.)
                compat.start_again(self, request)


class AsyncRecomputeScheduler(RecomputeScheduler, AsyncScheduler):
    """The same for async scheduling."""
