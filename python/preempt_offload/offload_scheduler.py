"""The scheduler role: which requests are preserved, and what to copy in each step.

One instance lives beside vLLM's scheduler. It never touches memory: it plans copies of
blocks, hands them to the workers in the step's metadata, and follows what they report.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from preempt_offload import compat
from preempt_offload._core import (
    BlockPool,
    CapacityError,
    CompletionTracker,
    RequestTable,
    StateError,
)
from preempt_offload.log import get_logger
from preempt_offload.metadata import NOTHING, OffloadMetadata, OffloadWorkerMetadata
from preempt_offload.stats import SchedulerStats

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vllm.v1.request import Request

    from preempt_offload._core import BlockPairs
    from preempt_offload.draft_states import DraftStates

logger = get_logger(__name__)


class OffloadScheduler:
    """Plans the stores and loads of preempted requests.

    Args:
        num_host_blocks: Host blocks of each rank.
        block_tokens: Tokens per block of each KV cache group.
        world_size: Workers that take part in each copy: TP x PP.
        share_blocks: Share full blocks with equal hashes between requests.
        state_groups: KV cache groups whose blocks hold a state after all tokens so far.
        draft_states: Tells which states are right, if drafts may go past them. The engine's
            scheduler tells it what comes out of each step, if it is one of this package's.
        preserves: Whether anything can be preserved at all; see ``compat.why_unpreservable``.
        trust_hits: Whether what the device's prefix cache has of a request may be left to
            vLLM while the rest is restored; see ``compat.hits_are_claimed_first``.
        recovers: Whether vLLM recovers from failed loads by itself.
        keeps_prompt_logprobs: Whether a request may be preempted within its prompt and restored
            if it asks for the logprobs of the prompt; see ``compat.keeps_prompt_logprobs``.
        no_op_advice: What to tell the operator when it turns out that the engine's
            scheduler preempts without asking.
    """

    def __init__(
        self,
        *,
        num_host_blocks: int,
        block_tokens: Sequence[int],
        world_size: int,
        share_blocks: bool,
        state_groups: Sequence[int] = (),
        draft_states: DraftStates | None = None,
        preserves: bool = True,
        trust_hits: bool = True,
        recovers: bool = True,
        keeps_prompt_logprobs: bool = True,
        no_op_advice: str,
    ) -> None:
        self.pool = BlockPool(num_host_blocks, indexed=share_blocks)
        self.table = RequestTable(self.pool, block_tokens, state_groups=state_groups)
        self.stats = SchedulerStats()
        self._trust_hits = trust_hits
        self._recovers = recovers
        # Whether the engine's scheduler is one of this package's.
        self._cooperates = False
        self._keeps_prompt_logprobs = keeps_prompt_logprobs
        # Tokens per block hash of a request; vLLM tells when it binds its block pool.
        self.hash_tokens: int | None = None
        self._completion = CompletionTracker(world_size)
        self._block_tokens = tuple(block_tokens)
        self._state_groups = frozenset(state_groups)
        self.draft_states = draft_states
        self._share_blocks = share_blocks
        self._preserves = preserves
        self._no_op_advice: str | None = no_op_advice

        # What the next metadata will carry, and what the workers have yet to report.
        self._event = 0
        self._store_pairs: list[BlockPairs] = []
        self._load_pairs: list[BlockPairs] = []
        self._load_requests: list[str] = []
        self._storing: dict[int, list[str]] = {}
        self._loading: set[str] = set()
        # Those of them whose load has failed on some rank.
        self._failed_loads: set[str] = set()
        # Those of them that have ended meanwhile.
        self._ended_loads: set[str] = set()
        # Requests whose store has failed, for a scheduler that cooperates to take.
        self._lost: list[str] = []
        # Requests whose load has failed, likewise.
        self._unloaded: list[str] = []
        # Requests whose prompt another connector may yet pull from a prefill node.
        self._remote: set[str] = set()
        # Requests whose load is through, whoever loaded, but which have not been scheduled since.
        self._landed: set[str] = set()

    # ---- hooks of the recompute scheduler ----

    def scheduler_cooperates(self) -> None:
        """Notes that the engine's scheduler is one of this package's.

        It asks before it preempts, claims prefix-cache hits before it allocates, tells which
        drafts were accepted (to ``draft_states``), and takes the requests whose loads have
        failed.
        """
        self._no_op_advice = None
        self._cooperates = self._trust_hits = self._recovers = True

    def update_state_before_preempt(
        self, request: Request, block_ids: tuple[list[int], ...], num_computed_tokens: int
    ) -> bool:
        """Plans to store a request that is about to lose its device blocks.

        Args:
            request: The victim.
            block_ids: Its device blocks, by KV cache group.
            num_computed_tokens: Tokens whose KV those blocks hold once the steps under
                way are through.

        Returns:
            Whether the request will be preserved; if not, its KV is lost.
        """
        self._no_op_advice = None
        request_id = request.request_id
        self._landed.discard(request_id)
        if num_computed_tokens <= 0:
            return False
        if not self._preserves:
            self.stats.not_preserved += 1
            return False
        if request.skip_reading_prefix_cache and not self._keeps_prompt_logprobs:
            self.stats.not_preserved += 1
            logger.info(
                "Request %s cannot be preserved, because vLLM computes all of its prompt again, "
                "for the logprobs",
                request_id,
            )
            return False
        if self.draft_states is not None:
            # Past the prompt, somebody has to tell which drafts were accepted.
            told = self._cooperates or request.num_output_tokens == 0
            state = self.draft_states.find(request, num_computed_tokens) if told else None
            self.draft_states.forget(request_id)
            if state is None:
                self.stats.not_preserved += 1
                logger.info(
                    "Request %s cannot be preserved, because it is not known which of its states "
                    "is that after its accepted drafts%s",
                    request_id,
                    "" if self._cooperates else "; preempt_offload.RecomputeScheduler would tell",
                )
                self._forget_mirror(request_id)
                return False
            num_computed_tokens = state.num_tokens
            block_ids = tuple(
                self._state_block(i, ids, state.step_end) if i in self._state_groups else ids
                for i, ids in enumerate(block_ids)
            )
        try:
            pairs, mirrored, shared = self.table.begin_store(
                request_id,
                self._event,
                num_computed_tokens,
                block_ids,
                self._shareable_hashes(request, num_computed_tokens),
            )
        except CapacityError as error:
            self.stats.not_preserved += 1
            logger.warning(
                "CPU cache has %d free blocks of %d, but preserving request %s (%d tokens) "
                "needs %d; its KV is lost. Raise the budget if this is frequent",
                error.available,
                error.capacity,
                request_id,
                num_computed_tokens,
                error.needed,
            )
            self._forget_mirror(request_id)
            return False
        except StateError as error:
            # An earlier request of the same id, aborted while its copy is under way.
            self.stats.not_preserved += 1
            logger.warning("Request %s cannot be preserved: %s", request_id, error)
            return False
        self._store_pairs.append(pairs)
        self._storing.setdefault(self._event, []).append(request_id)
        self.stats.preserved += 1
        self.stats.stored_blocks += len(pairs)
        self.stats.mirrored_blocks += mirrored
        self.stats.shared_blocks += shared
        logger.info(
            "Created preempt offload state for request %s: %d tokens, %d blocks to copy, "
            "%d mirrored, %d shared; %d of %d host blocks free",
            request_id,
            num_computed_tokens,
            len(pairs),
            mirrored,
            shared,
            self.pool.num_free + self.pool.num_evictable,
            self.pool.capacity,
        )
        return True

    def has_preempted_request(self, request_id: str) -> bool:
        """Whether the request's KV is on the host, or on its way there, to be restored."""
        status = self.table.status(request_id)
        return status is not None and status[0] in ("Storing", "Ready")

    def end_turn(self, request: Request) -> None:
        """Forgets a session of which more is stored than the tokens it keeps.

        The next input takes the places of the others: drafts, or what came after its stop token.
        """
        status = self.table.status(request.request_id)
        if status is not None and self._restorable_tokens(request, status[1]) < status[1]:
            self.table.release(request.request_id)
            logger.info(
                "Request %s is computed again, because it has not kept all of the %d tokens that "
                "were stored of it",
                request.request_id,
                status[1],
            )

    def restored_requests(self) -> frozenset[str]:
        """Requests whose load is through, whoever loaded, but which have not run since."""
        return frozenset(self._landed)

    def has_pending_transfers(self) -> bool:
        """Whether copies are planned or under way; the engine must go on stepping."""
        return bool(self._storing or self._loading)

    def take_unloaded_requests(self) -> list[str]:
        """Requests that were being restored, but whose loads have failed since the last call."""
        unloaded, self._unloaded = self._unloaded, []
        return unloaded

    def take_lost_requests(self) -> list[str]:
        """Requests that were to be preserved, but whose stores have failed since the last call."""
        lost, self._lost = self._lost, []
        return lost

    # ---- vLLM's connector interface ----

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens that can be restored beyond ``num_computed_tokens``; decides nothing.

        Returns:
            ``(None, False)`` if the request has to wait, ``(0, False)`` if there is
            nothing to restore, else the number of tokens and ``True``.
        """
        is_remote = _is_remote(request)
        if is_remote:
            self._remote.add(request.request_id)
        if self._landed and request.request_id not in self._landed:
            # A restored request holds device blocks and is not running yet. vLLM stops at
            # the first waiting request that finds too few blocks free; if that one came
            # before the restored one in the queue, neither would ever run.
            return None, False
        status = self.table.status(request.request_id)
        if status is None:
            self._warn_of_no_op(request)
            # What is pulled comes in no order with the streams of the device, and its blocks may
            # be those that a store still reads.
            return (None if is_remote and self._storing else 0), False
        state, num_stored = status
        if state == "Storing":
            return None, False
        if state != "Ready" or (num_computed_tokens > 0 and not self._trust_hits):
            return 0, False
        if compat.outputs_under_way(request):
            # A step is under way that may add tokens or take drafts back.
            return None, False
        num_tokens = self._restorable_tokens(request, num_stored) - num_computed_tokens
        return (num_tokens, True) if num_tokens > 0 else (0, False)

    def update_state_after_alloc(
        self, request: Request, block_ids: tuple[list[int], ...], num_external_tokens: int
    ) -> None:
        """Plans the load into newly allocated blocks, or notes that none is wanted.

        vLLM calls this whenever a waiting request gets blocks: to restore it (then
        ``num_external_tokens`` is what ``get_num_new_matched_tokens`` has said), without
        restoring it, and once more when it runs after its load.
        """
        request_id = request.request_id
        self._landed.discard(request_id)
        self._forget_step(request_id)
        status = self.table.status(request_id)
        if status is None or status[0] != "Ready":
            return
        num_tokens = self._restorable_tokens(request, status[1])
        if num_external_tokens == 0:
            self._say_why_not_restored(request_id, num_tokens, status[1])
            self.table.settle(request_id, num_tokens)
            return
        first = num_tokens - num_external_tokens
        pairs, _, _ = self.table.begin_load(request_id, first, num_tokens, block_ids)
        self._load_pairs.append(pairs)
        self._load_requests.append(request_id)
        self._loading.add(request_id)
        self.stats.restored += 1
        self.stats.restored_tokens += num_external_tokens
        logger.info(
            "Prepared preempt offload H2D load for request %s: tokens %d to %d, %d blocks",
            request_id,
            first,
            num_tokens,
            len(pairs),
        )

    def build_connector_meta(self) -> OffloadMetadata:
        """What the workers have to copy in this step."""
        if not self._store_pairs and not self._load_requests:
            return NOTHING
        stores = bool(self._store_pairs)
        metadata = OffloadMetadata(
            store_event=self._event if stores else None,
            store_pairs=np.concatenate(self._store_pairs) if stores else None,
            load_requests=tuple(self._load_requests),
            load_pairs=np.concatenate(self._load_pairs) if self._load_pairs else None,
        )
        if stores:
            self._completion.open(self._event)
            self._event += 1
        self._store_pairs.clear()
        self._load_pairs.clear()
        self._load_requests.clear()
        return metadata

    def update_connector_output(
        self, reported: OffloadWorkerMetadata | None, finished_recving: Iterable[str]
    ) -> None:
        """Follows what the workers report.

        Args:
            reported: Stores that are through on some ranks, and loads that failed.
            finished_recving: Requests whose load is through on every rank, ours or not.
        """
        if reported is not None:
            self._failed_loads |= reported.failed_loads
            for event, by_rank in reported.stores.items():
                for rank, ok in by_rank.items():
                    decided = self._completion.report(event, rank, ok)
                    if decided is not None:
                        self._complete_stores(event, decided)
        pulled = self._remote.intersection(finished_recving)
        self._remote -= pulled
        self._landed |= pulled
        for request_id in self._loading.intersection(finished_recving):
            self._loading.discard(request_id)
            ok = request_id not in self._failed_loads
            self._failed_loads.discard(request_id)
            if request_id in self._ended_loads:
                self._ended_loads.discard(request_id)
            else:
                # Even if a reset has dropped its KV meanwhile, the request goes on.
                self._landed.add(request_id)
                if not ok:
                    self._give_up_load(request_id)
            self.table.finish_load(request_id, ok)

    def request_finished(self, request_id: str) -> None:
        """Forgets a request, whatever its state."""
        self._landed.discard(request_id)
        self._remote.discard(request_id)
        self._forget_step(request_id)
        if request_id in self._loading:
            self._ended_loads.add(request_id)
        self.table.release(request_id)

    def reset_cache(self) -> bool:
        """Forgets all KV on the host, because it is no longer valid.

        Returns:
            ``False`` if loads are under way: what they restore is not valid either.
        """
        self.table.release_all()
        return not self._loading

    # ---- inside ----

    def _forget_step(self, request_id: str) -> None:
        if self.draft_states is not None:
            self.draft_states.forget(request_id)

    def _forget_mirror(self, request_id: str) -> None:
        """Forgets what is left of a request that is not preserved, if nobody else will.

        Others' schedulers may end it without telling, as vllm-ascend 0.23's does on decode nodes.
        """
        if not self._cooperates:
            self.table.release(request_id)

    def _state_block(self, group: int, block_ids: list[int], num_tokens: int) -> list[int]:
        """The block of a state group where a step that ends after ``num_tokens`` leaves it."""
        return block_ids[(num_tokens - 1) // self._block_tokens[group] :][:1]

    def _restorable_tokens(self, request: Request, num_stored: int) -> int:
        # The last token has no KV: it was sampled and not yet fed to the model.
        known: int = request.num_tokens - 1
        if num_stored > known and self._state_groups:
            # The state has gone past the tokens that are kept.
            return 0
        return min(num_stored, known)

    def _shareable_hashes(self, request: Request, num_computed_tokens: int) -> list[list[bytes]]:
        """Per group, the hashes of the leading blocks that are full of known tokens."""
        if not self._share_blocks or self.hash_tokens is None:
            return []
        num_known = min(num_computed_tokens, request.num_tokens)
        shareable: list[list[bytes]] = []
        for group, tokens in enumerate(self._block_tokens):
            if group in self._state_groups or tokens % self.hash_tokens:
                # A state is of all tokens so far; and no hash may end where a block ends.
                shareable.append([])
                continue
            # A hash covers all tokens before it, so a block's last one identifies the block.
            step = tokens // self.hash_tokens
            num_hashes = num_known // tokens * step
            shareable.append(request.block_hashes[step - 1 : num_hashes : step])
        return shareable

    def _complete_stores(self, event: int, ok: bool) -> None:
        for request_id in self._storing.pop(event):
            wanted = self.table.status(request_id) is not None
            self.table.complete_store(request_id, event, ok)
            if wanted and not ok:
                logger.error("Storing request %s failed; its KV is lost", request_id)
                if self._cooperates:
                    self._lost.append(request_id)

    def _give_up_load(self, request_id: str) -> None:
        logger.error("Restoring request %s failed; its KV is lost", request_id)
        if not self._recovers:
            raise RuntimeError(
                f"restoring request {request_id} failed, and with this model the engine's "
                "scheduler cannot recover from that; preempt_offload.RecomputeScheduler can"
            )
        if self._cooperates:
            self._unloaded.append(request_id)

    def _say_why_not_restored(self, request_id: str, num_tokens: int, num_stored: int) -> None:
        if num_tokens <= 0 and self._state_groups:
            logger.warning(
                "Request %s is not restored, because its states on the host are those after %d "
                "tokens, and it has not kept all of these; it is computed again",
                request_id,
                num_stored,
            )
        elif not self._trust_hits:
            logger.info(
                "Request %s is left to vLLM's prefix cache, which has some of its blocks or all: "
                "vLLM's own scheduler would mix them up with those to restore, because this "
                "model has several KV cache groups; preempt_offload.RecomputeScheduler would not",
                request_id,
            )

    def _warn_of_no_op(self, request: Request) -> None:
        if self._no_op_advice is not None and request.num_preemptions > 0:
            logger.warning(
                "Request %s was preempted, but PreemptOffloadConnector was not asked to "
                "preserve it. %s",
                request.request_id,
                self._no_op_advice,
            )
            self._no_op_advice = None


def _is_remote(request: Request) -> bool:
    """Whether a connector beside this one may pull the KV of the request's prompt.

    NIXL's and Mooncake's connectors, vLLM's and vllm-ascend's, take this parameter for that.
    """
    return bool((request.kv_transfer_params or {}).get("do_remote_prefill"))
