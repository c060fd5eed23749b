"""Counters of one role, since the start."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(slots=True)
class SchedulerStats:
    """What the scheduler role has decided.

    Attributes:
        preserved: Preemptions whose KV was (or is being) stored.
        not_preserved: Preemptions that fell back, most often for want of host blocks.
        stored_blocks: Blocks copied D2H.
        mirrored_blocks: Blocks that needed no copy, because the host still had them.
        shared_blocks: Blocks that needed no copy, because another request had stored them.
        restored: Requests whose KV was copied back.
        restored_tokens: Tokens copied back, so neither computed again nor found in the
            device's prefix cache.
    """

    preserved: int = 0
    not_preserved: int = 0
    stored_blocks: int = 0
    mirrored_blocks: int = 0
    shared_blocks: int = 0
    restored: int = 0
    restored_tokens: int = 0


@dataclasses.dataclass(slots=True)
class WorkerStats:
    """What the worker role has copied, in bytes."""

    bytes_stored: int = 0
    bytes_loaded: int = 0
    failed_stores: int = 0
    failed_loads: int = 0
