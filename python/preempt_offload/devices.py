"""How blocks are copied: the differences between devices are here and nowhere else."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from preempt_offload._core import BlockPairs, Direction
    from preempt_offload.kv_layout import CacheLayout


@dataclasses.dataclass(frozen=True, slots=True)
class TransferResult:
    """How a copy ended."""

    ok: bool
    num_bytes: int


class Transfer(Protocol):
    """A copy that was begun."""

    def poll(self) -> TransferResult | None:
        """How it ended, or ``None`` while it is under way."""


@dataclasses.dataclass(frozen=True, slots=True)
class Ended:
    """A transfer that is through already."""

    result: TransferResult

    def poll(self) -> TransferResult:
        """How it ended."""
        return self.result


class Device(Protocol):
    """Where the KV caches are."""

    def begin(self, direction: Direction, pairs: BlockPairs) -> Transfer:
        """Begins to copy blocks, ordered as the worker role needs it.

        A D2H copy reads before anything enqueued later overwrites its blocks; an H2D
        copy is through before the forward that follows reads them.
        """


class HostDevice:
    """KV caches in host memory, as on a CPU engine: the processor copies, at once."""

    def __init__(self, layout: CacheLayout, *, num_host_blocks: int, threads: int) -> None:
        self._pool = torch.empty(sum(layout.column_bytes(num_host_blocks)), dtype=torch.uint8)
        self._layout = layout.bind(self._pool.data_ptr(), num_host_blocks)
        self._threads = threads

    def begin(self, direction: Direction, pairs: BlockPairs) -> Transfer:
        """Copies and returns when it is done, which gives every order asked for."""
        num_bytes = self._layout.copy(direction, pairs, self._threads)
        return Ended(TransferResult(ok=True, num_bytes=num_bytes))
