"""What must hold after every step, whatever has happened."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from vllm.v1.request import RequestStatus

from preempt_offload import compat

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler

    from preempt_offload.offload_scheduler import OffloadScheduler


def check_device(scheduler: Scheduler) -> None:
    """Every device block is referenced as often as block tables have it, and free otherwise."""
    manager = scheduler.kv_cache_manager
    tables: Counter[int] = Counter()
    for single in manager.coordinator.single_type_managers:
        for blocks in single.req_to_blocks.values():
            tables.update([block.block_id for block in blocks])
    # Newer vLLM frees blocks that a step under way may write to when that step is through.
    for _, blocks in getattr(scheduler, "deferred_frees", ()):
        tables.update([block.block_id for block in blocks])
    pool = manager.block_pool
    free = 0
    for block in pool.blocks:
        if block.is_null:
            continue
        assert block.ref_cnt == tables[block.block_id], (
            f"device block {block.block_id} has {block.ref_cnt} references, and is in "
            f"{tables[block.block_id]} block tables"
        )
        free += block.ref_cnt == 0
    assert free == pool.get_num_free_blocks()


def check_host(offload: OffloadScheduler, live: set[str], *, share: bool) -> None:
    """Every host block is owned by whom the table says, and free otherwise.

    Args:
        offload: Our scheduler role.
        live: Requests that the scheduler has.
        share: Whether blocks may have several owners.
    """
    pool, owned = offload.pool, Counter[int]()
    for request_id, state, blocks in offload.table.entries():
        owned.update(blocks)
        assert request_id in live or state in ("Storing", "Loading"), (
            f"{request_id} is gone, but {state} still"
        )
    assert share or all(count == 1 for count in owned.values()), "a host block has two owners"
    for block, count in owned.items():
        assert pool.ref_count(block) == count, (
            f"host block {block} has {pool.ref_count(block)} references, but {count} owners"
        )
    assert len(owned) + pool.num_free + pool.num_evictable == pool.capacity, (
        f"{len(owned)} host blocks owned, {pool.num_free} free and {pool.num_evictable} "
        f"evictable of {pool.capacity}"
    )


def check_restored(scheduler: Scheduler, offload: OffloadScheduler) -> None:
    """Whoever has been restored and has not run since is waiting."""
    for request_id in offload.restored_requests():
        assert request_id in scheduler.requests, f"{request_id} is gone, but restored still"
        request = scheduler.requests[request_id]
        assert request.status != RequestStatus.RUNNING, f"{request_id} runs, and is waited for"


def check_nothing_left(scheduler: Scheduler, offload: OffloadScheduler) -> None:
    """No state survives its request."""
    assert not scheduler.requests
    assert not scheduler.running
    assert not any(compat.waiting_queues(scheduler))
    pool = scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    assert offload.pool.num_free + offload.pool.num_evictable == offload.pool.capacity
    left = {
        name: value
        for name, value in vars(offload).items()
        if isinstance(value, dict | set | list) and value
    }
    assert not left, f"left in our scheduler role: {left}"
