"""The Rust core: host blocks, preserved requests, completions, copy planning.

Block ids count from 1; 0 is the null block, as in vLLM. Every class may be used from
several threads at once. An error leaves the object as it was, and its text names the
offending id and the bound.
"""

from collections.abc import Sequence
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

# Rows of (KV cache group, device block, host block), shape (n, 3).
BlockPairs: TypeAlias = npt.NDArray[np.uint32]
Direction: TypeAlias = Literal["d2h", "h2d"]

class OffloadError(Exception):
    """Base of this package's errors."""

class CapacityError(OffloadError):
    """Too few host blocks; the attributes count blocks."""

    needed: int
    available: int
    capacity: int

class BlockError(OffloadError):
    """A host block was misused: foreign id, double free, over-release."""

class StateError(OffloadError):
    """A call out of turn: unknown request or event, or one in another state."""

class AddressError(OffloadError):
    """A block or an address out of bounds."""

class BlockPool:
    """Lock-free allocator of host blocks ``1..=capacity`` with reference counts.

    With ``indexed``, blocks can be found by ``(block hash, group)``; those that nobody
    references stay until a claim needs them, and go least recently used first.
    """

    def __new__(cls, capacity: int, *, indexed: bool = False) -> BlockPool: ...
    @property
    def capacity(self) -> int: ...
    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
    @property
    def num_evictable(self) -> int:
        """Indexed blocks that nobody references; a claim may take them."""
    def ref_count(self, block: int) -> int: ...
    def claim(self, n: int) -> npt.NDArray[np.uint32]:
        """Takes ``n`` blocks with one reference each, or raises ``CapacityError``."""
    def retain(self, blocks: Sequence[int]) -> None:
        """Adds a reference to each of ``blocks``, or raises ``BlockError``."""
    def release(self, blocks: Sequence[int]) -> None:
        """Gives back a reference to each of ``blocks``, or raises ``BlockError``."""
    def index(self, block: int, block_hash: bytes, group: int) -> bool:
        """Lets ``block`` be found by its hash; ``False`` if that was not possible."""
    def lookup(self, block_hash: bytes, group: int) -> int | None:
        """Finds a block and adds a reference to it."""

class RequestTable:
    """Preserved requests: where their blocks are on the host, and their state.

    States: ``"Storing"``, ``"Ready"``, ``"Loading"``, ``"Mirrored"``. A plan is a tuple of
    the pairs to copy, the number of blocks that the request's own mirror had already, and
    the number of blocks shared with other requests.
    """

    def __new__(
        cls, pool: BlockPool, block_tokens: Sequence[int], *, state_groups: Sequence[int] = ...
    ) -> RequestTable:
        """A table for KV cache groups with ``block_tokens`` tokens per block.

        Blocks of ``state_groups`` hold the state after all tokens so far instead of KV for
        each token: only the newest is stored, to be restored at that number of tokens.
        """
    def status(self, request_id: str) -> tuple[str, int] | None:
        """State and number of tokens stored; ``None`` if the request is not preserved."""
    def counts(self) -> dict[str, int]:
        """Requests by state."""
    def entries(self) -> list[tuple[str, str, list[int]]]:
        """Id, state and host blocks of every request, released ones under copy included."""
    def begin_store(
        self,
        request_id: str,
        event: int,
        num_tokens: int,
        device_blocks: Sequence[Sequence[int]],
        block_hashes: Sequence[Sequence[bytes]] = ...,
    ) -> tuple[BlockPairs, int, int]:
        """Plans the store of ``num_tokens`` tokens; raises ``CapacityError``, ``StateError``.

        ``device_blocks`` has a block table per group; ``block_hashes``, per group, the
        hashes of the leading blocks that may be shared.
        """
    def complete_store(self, request_id: str, event: int, ok: bool) -> bool:
        """Ends a store; ``True`` if the request can be restored now."""
    def begin_load(
        self,
        request_id: str,
        from_tokens: int,
        num_tokens: int,
        device_blocks: Sequence[Sequence[int]],
    ) -> tuple[BlockPairs, int, int]:
        """Plans the restore of tokens ``from_tokens..num_tokens``; raises ``StateError``."""
    def finish_load(self, request_id: str, ok: bool) -> None:
        """Ends a load; the request is mirrored or, if it failed or was released, gone."""
    def settle(self, request_id: str, num_tokens: int) -> None:
        """Makes a ready request mirrored: it was scheduled without being restored.

        Of what was stored, the first ``num_tokens`` tokens are what they will be.
        """
    def release(self, request_id: str) -> bool:
        """Forgets a request that has ended; ``False`` if it was not preserved."""
    def release_all(self) -> None:
        """Forgets every request and shared block: the KV is no longer valid."""

class CompletionTracker:
    """Counts the reports of ``world_size`` workers for each open event."""

    def __new__(cls, world_size: int) -> CompletionTracker: ...
    @property
    def num_open(self) -> int: ...
    def open(self, event: int) -> None: ...
    def report(self, event: int, rank: int, ok: bool) -> bool | None:
        """``None`` while others are missing, then whether every worker succeeded."""

class BlockLayout:
    """Where the blocks of a KV cache and of the host pool are in memory."""

    def __new__(
        cls,
        num_device_blocks: int,
        num_host_blocks: int,
        num_groups: int,
        segments: Sequence[tuple[int, int, int, int, int, int]],
        device_regions: Sequence[tuple[int, int]],
        host_regions: Sequence[tuple[int, int]],
    ) -> BlockLayout:
        """A layout, or ``AddressError`` where it leaves the regions.

        Args:
            num_device_blocks: Blocks of the cache, null block included.
            num_host_blocks: Blocks of the pool.
            num_groups: KV cache groups. One without segments has nothing to copy.
            segments: ``(group, address of device block 0, stride, bytes, address of host
                block 1, stride)``, in bytes, for each contiguous part of a group's blocks.
            device_regions: ``(address, bytes)`` of the memory behind the KV caches.
            host_regions: Likewise of the host pool.
        """
    def block_bytes(self, group: int) -> int:
        """Bytes that one block of ``group`` takes."""
    def descriptors(
        self, direction: Direction, pairs: BlockPairs
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Source addresses, destination addresses and sizes in bytes."""
    def write_descriptors(
        self, direction: Direction, pairs: BlockPairs, out: npt.NDArray[np.int64]
    ) -> int:
        """Writes the same into the rows of ``out``, of shape (3, n), as far as there is room.

        Returns how many there are, which may be more than ``n``.
        """
    def copy(self, direction: Direction, pairs: BlockPairs, threads: int) -> int:
        """Copies with the processor, without the GIL; returns bytes.

        Both sides must be live host memory that nobody else uses meanwhile; the regions of
        the two sides, and the segments of a group, must not overlap.
        """
