"""The only file that asks which vLLM this is."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import re
from typing import TYPE_CHECKING, Any

from preempt_offload.draft_states import DraftStates
from preempt_offload.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.request_queue import RequestQueue
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec
    from vllm.v1.request import Request

logger = get_logger(__name__)

if importlib.util.find_spec("vllm") is not None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorMetadata,
        KVConnectorWorkerMetadata,
    )
else:
    # Without vLLM nothing crosses to it, and plain bases do.
    class KVConnectorMetadata:  # type: ignore[no-redef]
        """Base of what the scheduler sends to the workers."""

    class KVConnectorWorkerMetadata:  # type: ignore[no-redef]
        """Base of what the workers send back."""


__all__ = [
    "KVConnectorMetadata",
    "KVConnectorWorkerMetadata",
    "block_bytes",
    "block_tokens",
    "check_version",
    "claim_hits_first",
    "current_transfer_config",
    "dequeue",
    "draft_states",
    "end_wait",
    "find_offload_connector",
    "hides_data_parallel_size",
    "hits_are_claimed_first",
    "keep_windows_of_drafts",
    "keeps_prompt_logprobs",
    "loads_fail_by_block",
    "loads_fail_by_request",
    "local_ranks",
    "outputs_under_way",
    "recompute_flag",
    "scheduler_advice",
    "start_again",
    "state_groups",
    "transfer_params",
    "uncomputed_cached_blocks",
    "waiting_queues",
    "why_unpreservable",
]

OLDEST, NEWEST = (0, 23), (0, 32)
TESTED = {(0, 23, 0), (0, 32, 0)}

RECOMPUTE_FLAG = "--scheduler-cls preempt_offload.RecomputeScheduler"
ASCEND_FLAG = (
    '--additional-config \'{"recompute_scheduler_enable": true, '
    '"scheduler_config": {"recompute_scheduler_enable": true}}\''
)


def check_version(version: str) -> None:
    """Refuses a vLLM that this package does not fit, and warns of an untested one.

    Raises:
        ImportError: ``version`` is outside the supported range.
    """
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if match is None:
        logger.warning("vLLM calls itself %r; preempt-offload cannot tell whether it fits", version)
        return
    numbers = tuple(int(part) for part in match.groups())
    supported = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
    if not OLDEST <= numbers[:2] <= NEWEST:
        raise ImportError(
            f"preempt-offload supports vLLM {supported}; this is vLLM {version}. "
            "Install a release of preempt-offload made for it"
        )
    if numbers not in TESTED:
        logger.warning("preempt-offload (for vLLM %s) is untested with vLLM %s", supported, version)


def block_bytes(kv_cache_config: KVCacheConfig) -> int:
    """Bytes of device memory behind one KV block of one rank, all its layers together.

    A host block is budgeted with as many, so the scheduler and the workers come to the same
    number of host blocks without the tensors, which only the workers have, and without the
    specs of single layers, which the scheduler's config lacks. Memory that groups overlay
    counts once. The worker allocates :attr:`CacheLayout.block_bytes` for each, never more
    than this, and less where vLLM pads pages or leaves bytes of a block to no layer.

    Pipeline stages with different numbers of layers have blocks of different sizes, of
    which the scheduler knows the first stage's.
    """
    tensors = kv_cache_config.kv_cache_tensors
    # A tensor is an allocation of its own, or the place of some layers in one that all such
    # tensors share; only then it has a block stride, and the size is that of the whole.
    shared = [tensor.size for tensor in tensors if getattr(tensor, "block_stride", 0)]
    own = [tensor.size for tensor in tensors if not getattr(tensor, "block_stride", 0)]
    return int((sum(own) + max(shared, default=0)) // kv_cache_config.num_blocks)


def block_tokens(kv_cache_config: KVCacheConfig, vllm_config: VllmConfig) -> list[int]:
    """Tokens per scheduler block of each KV cache group.

    Context parallelism spreads the tokens of a scheduler block over ranks, so it covers
    several times the group's ``block_size``. vLLM says over how many: DCP x PCP in 0.23, DCP
    from 0.26; from 0.31 a spec says whether it is spread at all. States never are.

    Raises:
        ValueError: A group's blocks hold neither KV per token nor a state.
    """
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
    from vllm.v1.kv_cache_interface import AttentionSpec, MambaSpec, UniformTypeKVCacheSpecs

    # Without any group, vLLM's answer is for one whose tokens are spread.
    no_groups = dataclasses.replace(kv_cache_config, kv_cache_groups=[])
    spread_block, _ = resolve_kv_cache_block_sizes(no_groups, vllm_config)
    num_ranks = spread_block // vllm_config.cache_config.block_size
    tokens = []
    for i, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        known = isinstance(spec, AttentionSpec | MambaSpec | UniformTypeKVCacheSpecs)
        # What can have no place in the prefix cache is a ring, written over and over.
        if not known or not getattr(spec, "prefix_cacheable", True):
            raise ValueError(
                f"KV cache group {i} ({type(spec).__name__}; layer {group.layer_names[0]!r}) is of "
                "a kind that PreemptOffloadConnector does not know how to preserve"
            )
        is_spread = getattr(spec, "dcp_sharded", not isinstance(spec, MambaSpec))
        tokens.append(int(spec.block_size) * (num_ranks if is_spread else 1))
    return tokens


def _state_specs(kv_cache_config: KVCacheConfig) -> dict[int, MambaSpec]:
    from vllm.v1.kv_cache_interface import MambaSpec

    specs = enumerate(group.kv_cache_spec for group in kv_cache_config.kv_cache_groups)
    return {i: spec for i, spec in specs if isinstance(spec, MambaSpec)}


def state_groups(kv_cache_config: KVCacheConfig) -> list[int]:
    """The KV cache groups whose blocks hold a state after all tokens so far, as in Mamba."""
    return list(_state_specs(kv_cache_config))


def draft_states(kv_cache_config: KVCacheConfig, vllm_config: VllmConfig) -> DraftStates | None:
    """What tells which states are right, if this engine has states that drafts may go past.

    Not with several MTP modules: what comes after such a state cannot be computed one by one.
    """
    specs = _state_specs(kv_cache_config).values()
    if not specs or vllm_config.speculative_config is None or _has_mtp_modules(vllm_config):
        return None
    # Those that align their blocks all have blocks of one size.
    aligned = [spec.block_size for spec in specs if spec.mamba_cache_mode == "align"]
    return DraftStates(aligned_tokens=max(aligned, default=0))


def _has_mtp_modules(vllm_config: VllmConfig) -> bool:
    """Whether vLLM must not end a chunk a token before the last one known."""
    return getattr(vllm_config, "num_prefill_lookahead_tokens", 1) > 1


def why_unpreservable(kv_cache_config: KVCacheConfig, vllm_config: VllmConfig) -> str | None:
    """What keeps every request of this engine from being preserved, if anything does."""
    state_modes = {spec.mamba_cache_mode for spec in _state_specs(kv_cache_config).values()}
    if state_modes and vllm_config.speculative_config is not None:
        unknown = (
            "with speculative decoding and {}, it is not known which block has the state after the "
            "tokens that are accepted"
        )
        if "all" in state_modes:
            return unknown.format("vLLM's cache mode 'all' for states") + ". Use mode 'align'"
        if vllm_config.parallel_config.pipeline_parallel_size > 1:
            return unknown.format("pipeline parallelism")
        if _has_mtp_modules(vllm_config):
            return (
                "with several MTP modules, vLLM does not compute the tokens after a preserved "
                "state one by one"
            )
    if kv_cache_config.needs_kv_cache_zeroing and vllm_config.use_v2_model_runner:
        return (
            "vLLM's second model runner zeroes the blocks of this model before it lets their KV "
            "be stored. Set VLLM_USE_V2_MODEL_RUNNER=0"
        )
    return None


def keeps_prompt_logprobs(vllm_config: VllmConfig) -> bool:
    """Whether the prompt logprobs computed so far survive a preemption.

    vLLM's second model runner forgets them. Newer schedulers do not restore a request that asks
    for them, whatever a connector has.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    restores = "skip_reading_prefix_cache" not in Scheduler.schedule.__code__.co_names
    return restores and not vllm_config.use_v2_model_runner


def hides_data_parallel_size(vllm_config: VllmConfig) -> bool:
    """Whether this is a data-parallel rank that vLLM makes believe it is the only one.

    vLLM runs the DP ranks of a model without experts as engines of their own, each with
    ``data_parallel_size`` 1; only the engine id still tells.
    """
    engine_id = vllm_config.kv_transfer_config.engine_id or ""
    alone = vllm_config.parallel_config.data_parallel_size == 1
    return alone and re.search(r"_dp\d+$", engine_id) is not None


def local_ranks(vllm_config: VllmConfig) -> int:
    """Ranks of this deployment on this machine, as far as this engine knows of them."""
    parallel = vllm_config.parallel_config
    return int(parallel.local_world_size * max(parallel.data_parallel_size_local, 1))


def uncomputed_cached_blocks(manager: KVCacheManager, request: Request) -> set[int]:
    """Device blocks of ``request`` that vLLM's prefix cache has, but no forward has filled.

    ``allocate_slots`` gives a block its hash when it is scheduled. If the request is
    preempted later in the same ``schedule()``, that forward never runs.
    """
    found: set[int] = set()
    for single in manager.coordinator.single_type_managers:
        blocks = single.req_to_blocks.get(request.request_id, ())
        first = request.num_computed_tokens // single.block_size
        found |= {block.block_id for block in blocks[first:] if block.block_hash is not None}
    return found


def outputs_under_way(request: Request) -> bool:
    """Whether a step under way may still add tokens to ``request`` or take drafts back.

    vLLM 0.23 goes on counting the placeholders of a preempted request. 0.32 sets them to
    zero and counts what it will still deliver apart.
    """
    if request.num_output_placeholders > 0:
        return True
    stale = getattr(request, "num_stale_output_tokens", 0)
    return stale > 0 and not request.drop_stale_output


# ---- the scheduler's queues ----


def waiting_queues(scheduler: Scheduler) -> tuple[RequestQueue, RequestQueue]:
    """The queues of requests that are not running.

    The second has those that vLLM 0.23 passed over in the last step. In 0.32 it has those
    that hold KV blocks, which are served first.
    """
    if hasattr(scheduler, "kv_holding_waiting"):
        return scheduler.waiting, scheduler.kv_holding_waiting
    return scheduler.waiting, scheduler.skipped_waiting


def dequeue(scheduler: Scheduler, request: Request) -> None:
    """Takes a request that is not running out of every queue."""
    for queue in waiting_queues(scheduler):
        queue.remove_requests((request,))
    getattr(scheduler, "deferred_waiting", set()).discard(request)


def end_wait(scheduler: Scheduler, request: Request) -> None:
    """Makes a waiting request whose KV has come schedulable, as vLLM's next step would."""
    if hasattr(scheduler, "_handle_blocked_waiting_request"):
        scheduler._handle_blocked_waiting_request(request)
    else:
        scheduler._try_promote_blocked_waiting_request(request)


def start_again(scheduler: Scheduler, request: Request) -> None:
    """Makes a waiting request give up its KV and compute everything anew."""
    free = getattr(scheduler, "_free_request_blocks", scheduler.kv_cache_manager.free)
    free(request)
    scheduler._inflight_prefills.discard(request)
    request.num_computed_tokens = 0
    if hasattr(scheduler, "kv_holding_waiting"):
        dequeue(scheduler, request)
        scheduler.waiting.prepend_request(request)


def transfer_params(freed: Any) -> dict[str, Any]:
    """What ``Scheduler._free_request`` has returned, as arguments of ``EngineCoreOutput``."""
    if isinstance(freed, tuple):
        return dict(zip(("kv_transfer_params", "ec_transfer_params"), freed, strict=True))
    return {"kv_transfer_params": freed}


# ---- the block manager ----


def hits_are_claimed_first() -> bool:
    """Whether vLLM claims a request's prefix-cache hits in all groups before it allocates.

    vLLM 0.23 goes group by group: blocks allocated for the tokens to restore in one group may
    be the hits of the next, and then two groups write to the same block.
    """
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager

    return hasattr(SingleTypeKVCacheManager, "add_local_computed_blocks")


def loads_fail_by_request() -> bool:
    """Whether vLLM is told of failed loads by request; vLLM 0.23 is told by block."""
    from vllm.v1.outputs import KVConnectorOutput

    return hasattr(KVConnectorOutput(), "failed_recving")


def loads_fail_by_block(kv_cache_config: KVCacheConfig) -> bool:
    """Whether vLLM can recover when it is told of failed loads by block.

    It computes again from the first of those blocks on. With several KV cache groups it could
    not tell whose block it was, and end; and where a group does not keep all tokens, as with
    sliding windows, the tokens that this attends to are not there.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    return len(specs) == 1 and isinstance(specs[0], FullAttentionSpec)


def claim_hits_first(manager: KVCacheManager) -> None:
    """Makes this manager claim them first, if vLLM does not and it has several groups."""
    coordinator, pool = manager.coordinator, manager.block_pool
    if hits_are_claimed_first() or len(coordinator.single_type_managers) == 1:
        return
    allocate = coordinator.allocate_new_computed_blocks

    def claim_and_allocate(
        request_id: str,
        new_computed_blocks: Any,
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        claimed = []
        if num_external_computed_tokens > 0:
            num_computed_tokens = num_local_computed_tokens + num_external_computed_tokens
            for single, hits in zip(
                coordinator.single_type_managers, new_computed_blocks, strict=True
            ):
                # What the request will not look at any more it does not take either.
                skipped = single.get_num_skipped_tokens(num_computed_tokens) // single.block_size
                claimed += [block for block in hits[max(skipped, 0) :] if not block.is_null]
        pool.touch(claimed)
        try:
            allocate(
                request_id=request_id,
                new_computed_blocks=new_computed_blocks,
                num_local_computed_tokens=num_local_computed_tokens,
                num_external_computed_tokens=num_external_computed_tokens,
            )
        finally:
            pool.free_blocks(claimed)

    coordinator.allocate_new_computed_blocks = claim_and_allocate


def keep_windows_of_drafts(scheduler: Scheduler) -> None:
    """Makes vLLM keep what a request attends to once drafts under way are rejected.

    With async scheduling, vLLM 0.23 and 0.24 count drafts as computed when they free what has
    left a window. If the drafts are rejected, the window moves back over blocks that are gone:
    outputs are wrong, and a request that is preempted then cannot be restored. (A state group
    leaves its drafts their margin itself.)

    Beside states, windows reach back over accepted drafts too, because a preempted request is
    restored to where its state is, which may be before them.
    """
    from vllm.v1.kv_cache_interface import MambaSpec

    manager = scheduler.kv_cache_manager
    singles = manager.coordinator.single_type_managers
    counts_drafts = (
        "total_computed_tokens" in inspect.signature(manager.remove_skipped_blocks).parameters
    )
    margin = 0
    if any(isinstance(single.kv_cache_spec, MambaSpec) for single in singles):
        margin = scheduler.num_spec_tokens
    if not scheduler.num_spec_tokens or not (counts_drafts or margin):
        return

    def with_margin(remove: Callable[..., None]) -> Callable[..., None]:
        def remove_skipped_blocks(request_id: str, num_computed_tokens: int, *args: Any) -> None:
            kept = margin
            if counts_drafts:
                kept += scheduler.requests[request_id].num_output_placeholders
            remove(request_id, max(num_computed_tokens - kept, 0), *args)

        return remove_skipped_blocks

    for single in singles:
        if not isinstance(single.kv_cache_spec, MambaSpec):
            single.remove_skipped_blocks = with_margin(single.remove_skipped_blocks)


# ---- the config ----


def current_transfer_config() -> KVTransferConfig | None:
    """The transfer config that the user gave, where vLLM tells; a child only sees its own."""
    from vllm.config import get_current_vllm_config_or_none

    current = get_current_vllm_config_or_none()
    return current.kv_transfer_config if current is not None else None


def find_offload_connector(connector: Any) -> Any:
    """The connector, or the child of a MultiConnector, that is a ``PreemptOffloadConnector``.

    The hooks of recompute schedulers do not tell: those of vllm-ascend, and its MultiConnector,
    have them as well.
    """
    if hasattr(connector, "scheduler_cooperates"):
        return connector
    children = getattr(connector, "_connectors", ())
    return next(filter(None, map(find_offload_connector, children)), None)


def recompute_flag() -> str:
    """How to make this installation's vLLM use a scheduler that asks the connector."""
    if importlib.util.find_spec("vllm_ascend") is not None:
        return ASCEND_FLAG
    return RECOMPUTE_FLAG


def scheduler_advice(vllm_config: VllmConfig) -> str | None:
    """What to change if vLLM's own scheduler will run, which never asks the connector."""
    chosen = vllm_config.scheduler_config.scheduler_cls
    if chosen is not None:
        name = chosen if isinstance(chosen, str) else f"{chosen.__module__}.{chosen.__qualname__}"
        if not name.startswith("vllm.v1.core.sched."):
            return None
    return (
        "vLLM's own scheduler does not ask PreemptOffloadConnector to preserve a preempted "
        f"request, so nothing will be offloaded. Start vLLM with {recompute_flag()}"
    )
