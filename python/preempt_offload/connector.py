"""The connector that vLLM creates: sends each call to its role, and does nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from preempt_offload import compat, host_memory
from preempt_offload.config import OffloadConfig
from preempt_offload.log import get_logger
from preempt_offload.metadata import OffloadMetadata, OffloadWorkerMetadata
from preempt_offload.offload_scheduler import OffloadScheduler
from preempt_offload.offload_worker import OffloadWorker
from preempt_offload.transfer_config import check_ascend_switch, check_transfer_config

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = get_logger(__name__)


class PreemptOffloadConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps the KV of preempted requests in host memory and restores it.

    In vLLM's scheduler process it is an ``OffloadScheduler``, in every worker an
    ``OffloadWorker``; exactly one of the two attributes is set.
    """

    # For schedulers that could hand over only the newly allocated blocks: we need all.
    requires_full_blocks_on_update_after_alloc = True

    # Nobody waits for the KV of a request that ends: what a step under way brings to a
    # preempted request may be delivered, whatever the role.
    requires_kv_delivery = False

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        compat.check_version(vllm.__version__)
        # In the scheduler's process vLLM may not tell; there the scheduler checks the whole.
        whole = compat.current_transfer_config() or self._kv_transfer_config
        check_transfer_config(whole)
        check_ascend_switch(whole, vllm_config.additional_config)
        config = OffloadConfig.from_extra_config(self._kv_transfer_config.kv_connector_extra_config)
        parallel = vllm_config.parallel_config
        budget = config.budget(
            block_bytes=compat.block_bytes(kv_cache_config),
            num_device_blocks=kv_cache_config.num_blocks,
            num_ranks=parallel.world_size * parallel.data_parallel_size,
        )
        self.scheduler: OffloadScheduler | None = None
        self.worker: OffloadWorker | None = None
        if role == KVConnectorRole.SCHEDULER:
            logger.info("PreemptOffloadConnector uses %s", budget)
            if budget.source == "cpu_bytes_to_use" and compat.hides_data_parallel_size(vllm_config):
                logger.warning(
                    "cpu_bytes_to_use is not divided by the data-parallel size here, because vLLM "
                    "runs the DP ranks of this model as engines of their own: each rank takes %d "
                    "bytes. Use cpu_bytes_to_use_per_rank to say what each may take",
                    budget.bytes_per_rank,
                )
            advice = compat.scheduler_advice(vllm_config)
            if advice is not None:
                logger.warning("%s", advice)
            unpreservable = compat.why_unpreservable(kv_cache_config, vllm_config)
            if unpreservable is not None:
                logger.warning("No preempted request will be preserved: %s", unpreservable)
            self.scheduler = OffloadScheduler(
                num_host_blocks=budget.num_blocks,
                block_tokens=compat.block_tokens(kv_cache_config, vllm_config),
                world_size=parallel.world_size,
                share_blocks=config.enable_offload_prefix_caching,
                state_groups=compat.state_groups(kv_cache_config),
                draft_states=compat.draft_states(kv_cache_config, vllm_config),
                preserves=unpreservable is None,
                trust_hits=len(kv_cache_config.kv_cache_groups) == 1
                or compat.hits_are_claimed_first(),
                recovers=compat.loads_fail_by_block(kv_cache_config)
                or compat.loads_fail_by_request(),
                keeps_prompt_logprobs=compat.keeps_prompt_logprobs(vllm_config),
                no_op_advice=advice or f"Start vLLM with {compat.recompute_flag()}",
            )
        else:
            needed = budget.bytes_per_rank, budget.source
            num_ranks = compat.local_ranks(vllm_config)
            at_start = host_memory.available_at_start()
            host_memory.check_fits(*needed, num_ranks=num_ranks, at_start=at_start)
            if vllm_config.device_config.device_type == "npu":
                host_memory.check_shared_memory(*needed, num_ranks=num_ranks)
                host_memory.check_locked_memory(*needed)
            self.worker = OffloadWorker(
                kv_cache_config,
                rank=parallel.rank,
                num_host_blocks=budget.num_blocks,
                copy_threads=config.host_copy_threads,
                copy_method=config.copy_method,
            )

    # ---- worker role ----

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Allocates the host pool for these KV caches."""
        self._worker.register_kv_caches(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Begins the step's stores."""
        self._worker.handle_preemptions(_ours(kv_connector_metadata))

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Begins the step's loads."""
        self._worker.start_load_kv(_ours(self._get_connector_metadata()))

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: loads are ordered before the forward as a whole."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        """Nothing: only preempted requests are stored, whole."""

    def wait_for_save(self) -> None:
        """Nothing: stores are ordered before the forward as a whole."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose loads are through; nothing is ever sent."""
        return None, self._worker.get_finished() or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Requests whose loads are through or failed, for a vLLM that takes both by request."""
        results = super().get_transfer_results(finished_req_ids)
        results.failed_recving |= self._worker.take_unloaded_requests()
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Device blocks whose load failed, unless that has been told by request."""
        return self._worker.take_unloaded_blocks()

    def build_connector_worker_meta(self) -> OffloadWorkerMetadata | None:
        """What the scheduler has to know of this step."""
        return self._worker.take_report()

    # ---- scheduler role: vLLM's interface ----

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Learns how many tokens a block hash covers."""
        self._scheduler.hash_tokens = gpu_block_pool.hash_block_size

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens to restore beyond ``num_computed_tokens``."""
        return self._scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Plans the load into ``blocks``."""
        # The list is as long as the request; nobody needs it unless there is KV to load.
        block_ids = blocks.get_block_ids() if num_external_tokens else ()
        self._scheduler.update_state_after_alloc(request, block_ids, num_external_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """All KV cache groups: the blocks of a load are the request's own, in each of them."""
        return tuple(range(len(self._kv_cache_config.kv_cache_groups)))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> OffloadMetadata:
        """What the workers have to copy in this step."""
        return self._scheduler.build_connector_meta()

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Follows what the workers report."""
        reported = connector_output.kv_connector_worker_meta
        self._scheduler.update_connector_output(
            reported if isinstance(reported, OffloadWorkerMetadata) else None,
            connector_output.finished_recving or (),
        )

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forgets the request; vLLM may free its blocks."""
        self._scheduler.request_finished(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forgets the request; vLLM may free its blocks."""
        self._scheduler.request_finished(request.request_id)
        return False, None

    def reset_cache(self) -> bool:
        """Forgets all KV on the host."""
        return self._scheduler.reset_cache()

    # ---- scheduler role: hooks of recompute schedulers ----

    def scheduler_cooperates(self) -> None:
        """Notes that the engine's scheduler is one of this package's."""
        self._scheduler.scheduler_cooperates()

    def update_state_before_preempt(
        self, request: Request, block_ids: tuple[list[int], ...], num_computed_tokens: int
    ) -> bool:
        """Plans to store a request about to be preempted; whether it is preserved."""
        return self._scheduler.update_state_before_preempt(request, block_ids, num_computed_tokens)

    def has_preempted_request(self, req_id: str) -> bool:
        """Whether the request's KV is on the host to be restored."""
        return self._scheduler.has_preempted_request(req_id)

    def has_pending_transfers(self) -> bool:
        """Whether copies are under way; the engine must go on stepping."""
        return self._scheduler.has_pending_transfers()

    def restored_requests(self) -> frozenset[str]:
        """Requests whose load is through, but which have not run since."""
        return self._scheduler.restored_requests()

    def take_unloaded_requests(self) -> list[str]:
        """Requests whose loads have failed since the last call."""
        return self._scheduler.take_unloaded_requests()

    def take_lost_requests(self) -> list[str]:
        """Requests whose stores have failed since the last call."""
        return self._scheduler.take_lost_requests()

    # ---- roles ----

    @property
    def _scheduler(self) -> OffloadScheduler:
        assert self.scheduler is not None, "called in the worker role"
        return self.scheduler

    @property
    def _worker(self) -> OffloadWorker:
        assert self.worker is not None, "called in the scheduler role"
        return self.worker


def _ours(metadata: KVConnectorMetadata) -> OffloadMetadata:
    assert isinstance(metadata, OffloadMetadata)
    return metadata
