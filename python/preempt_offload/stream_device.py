"""KV caches on a device with streams, as torch.npu and torch.cuda have it.

Copies run on two streams of their own, one for each direction, beside the stream that
computes. Two orders have to hold, and events alone keep them, without the host waiting:

- D2H reads what the steps so far have written, and before any later one overwrites it. So the
  store stream waits for the compute stream, and then the compute stream for the store stream.
- H2D writes after all earlier use of its blocks, their zeroing included. So the load stream
  waits for the compute stream. What reads the blocks is scheduled only when the load has been
  polled and is through, so other requests compute meanwhile.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from preempt_offload.devices import Ended, Transfer, TransferResult
from preempt_offload.host_pool import allocate_pinned
from preempt_offload.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    import numpy.typing as npt

    from preempt_offload._core import BlockPairs, Direction
    from preempt_offload.config import CopyMethod
    from preempt_offload.kv_layout import CacheLayout

    # Sources, targets and sizes: int64 CPU tensors of addresses and bytes.
    Ranges: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    # Enqueues copies on the current stream. The tensors stay as they are until those are through.
    CopyRanges: TypeAlias = Callable[[Direction, torch.Tensor, torch.Tensor, torch.Tensor], None]

logger = get_logger(__name__)

# What vllm-ascend's operator calls the directions.
_ASCEND_DIRECTIONS = {"h2d": 0, "d2h": 1}
# Copies that the first buffers have room for.
_FIRST_CAPACITY = 16
# Copies in one call of an operator. Ascend's aclrtMemcpyBatch fails with more (Mooncake, #963).
MOST_PER_CALL = 4096


class StreamDevice:
    """Copies on streams.

    What a transfer needs is used again when it is through, so that a transfer like those before
    makes nothing new: neither events, which take a call to the driver, nor buffers.

    Args:
        layout: Where the blocks of the KV caches are.
        device: Their device.
        num_host_blocks: Blocks of the pool in pinned host memory.
        copy_method: What enqueues the copies; see ``choose_copy``.
        module: The device's module, ``torch.npu`` for example; torch tells if not given.
        most_per_call: Copies in one call of an operator.

    Raises:
        ValueError: There is too little host memory, or no such copy method.
        RuntimeError: Host memory could not be pinned.
    """

    def __init__(
        self,
        layout: CacheLayout,
        device: torch.device,
        *,
        num_host_blocks: int,
        copy_method: CopyMethod = "auto",
        module: Any = None,
        most_per_call: int = MOST_PER_CALL,
    ) -> None:
        self._most_per_call = most_per_call
        self._module = torch.get_device_module(device) if module is None else module
        self.pool = allocate_pinned(layout.column_bytes(num_host_blocks), device, self._module)
        addresses = [column.data_ptr() for column in self.pool]
        self._layout = layout.bind(addresses, num_host_blocks)
        self._copy = choose_copy(copy_method, layout, self.pool)
        self._streams = {"d2h": self._module.Stream(), "h2d": self._module.Stream()}
        self._events: list[Any] = []
        self._buffers: list[torch.Tensor] = []
        # Events of transfers that are through. They are free when the last one is done, because
        # then no stream waits for any of them.
        self._retired: deque[tuple[Any, ...]] = deque()

    def begin(self, direction: Direction, pairs: BlockPairs) -> Transfer:
        """Enqueues the copies; the host does not wait.

        Raises:
            AddressError: A block does not exist.
        """
        buffer, batches = self._write_ranges(direction, pairs)
        if not batches:
            self._buffers.append(buffer)
            return Ended(TransferResult(ok=True, num_bytes=0))
        stream, compute = self._streams[direction], self._module.current_stream()
        ready, done = self._take_event(), self._take_event()
        ready.record(compute)
        stream.wait_event(ready)
        try:
            with self._module.stream(stream):
                for ranges in batches:
                    self._copy(direction, *ranges)
        except Exception:
            # Some may be under way, and their blocks are about to serve others.
            stream.synchronize()
            raise
        done.record(stream)
        events = [ready, done]
        if direction == "d2h":
            compute.wait_event(done)
            events.append(self._take_event())
            events[-1].record(compute)
        return StreamTransfer(self, tuple(events), buffer, batches)

    def retire(self, events: tuple[Any, ...], buffer: torch.Tensor) -> None:
        """Takes back what a transfer that is through has used."""
        self._retired.append(events)
        self._buffers.append(buffer)

    def _write_ranges(
        self, direction: Direction, pairs: BlockPairs
    ) -> tuple[torch.Tensor, list[Ranges]]:
        """A buffer, and within it what to copy, as much as goes into one call at a time."""
        buffer = self._buffers.pop() if self._buffers else _new_buffer(_FIRST_CAPACITY)
        count = self._layout.write_descriptors(direction, pairs, buffer.numpy())
        if count > buffer.shape[1]:
            buffer = _new_buffer(2 * count)
            self._layout.write_descriptors(direction, pairs, buffer.numpy())
        batches = buffer[:, :count].split(self._most_per_call, dim=1) if count else ()
        return buffer, [(sources, targets, sizes) for sources, targets, sizes in batches]

    def _take_event(self) -> Any:
        if not self._events and self._retired and self._retired[0][-1].query():
            self._events.extend(self._retired.popleft())
        return self._events.pop() if self._events else self._module.Event()


def _new_buffer(capacity: int) -> torch.Tensor:
    return torch.empty((3, capacity), dtype=torch.int64)


@dataclasses.dataclass(slots=True)
class StreamTransfer:
    """Copies that were enqueued.

    Attributes:
        device: Takes back what this has used.
        events: What they wait for, what is recorded when they are through, and, if the
            stream that computes waits for that, what is recorded behind.
        buffer: Holds what is copied, as it is until then.
        batches: Within it, the ranges of each call.
    """

    device: StreamDevice
    events: tuple[Any, ...]
    buffer: torch.Tensor
    batches: list[Ranges]

    def poll(self) -> TransferResult | None:
        """Whether the device has done them; does not wait."""
        if not self.events[1].query():
            return None
        num_bytes = sum(int(sizes.sum()) for _, _, sizes in self.batches)
        self.device.retire(self.events, self.buffer)
        return TransferResult(ok=True, num_bytes=num_bytes)


def choose_copy(method: CopyMethod, layout: CacheLayout, pool: list[torch.Tensor]) -> CopyRanges:
    """What enqueues copies on the current stream.

    Args:
        method: ``ascend`` or ``cuda``: an operator of vllm-ascend's or vLLM's, which takes many
            copies in one call. ``torch``: a call for each contiguous range. ``auto``: the first
            of them that is there.
        layout: Where the blocks of the KV caches are.
        pool: The columns of the host pool.

    Raises:
        ValueError: The operator that was asked for is not there.
    """
    there: dict[str, CopyRanges] = {}
    devices = {storage.device.type for storage in layout.storages}
    if "npu" in devices:
        _load_ascend_operators()
    if hasattr(torch.ops._C_ascend, "swap_blocks_batch"):
        there["ascend"] = _copy_by_ascend
    if "cuda" in devices and hasattr(torch.ops._C_cache_ops, "swap_blocks_batch"):
        there["cuda"] = _copy_by_cuda
    there["torch"] = TorchCopy(layout.storages, pool)
    chosen = next(iter(there)) if method == "auto" else method
    if chosen not in there:
        raise ValueError(
            f'"copy_method": {method!r} needs an operator that is not there; '
            f"here there are {', '.join(there)}"
        )
    logger.info("KV blocks are copied by %r (copy_method=%r)", chosen, method)
    return there[chosen]


def _load_ascend_operators() -> None:
    """Has vllm-ascend register its operators, which it does when it first needs one."""
    with contextlib.suppress(ImportError):
        from vllm_ascend.utils import enable_custom_op  # type: ignore[import-not-found]

        enable_custom_op()


def _copy_by_ascend(
    direction: Direction, sources: torch.Tensor, targets: torch.Tensor, sizes: torch.Tensor
) -> None:
    torch.ops._C_ascend.swap_blocks_batch(sources, targets, sizes, _ASCEND_DIRECTIONS[direction])


def _copy_by_cuda(
    direction: Direction, sources: torch.Tensor, targets: torch.Tensor, sizes: torch.Tensor
) -> None:
    torch.ops._C_cache_ops.swap_blocks_batch(sources, targets, sizes, False)


class TorchCopy:
    """A copy of torch's for each contiguous range.

    Args:
        storages: Those behind the KV caches.
        pool: The columns of the host pool.
    """

    def __init__(self, storages: list[torch.UntypedStorage], pool: list[torch.Tensor]) -> None:
        device = [
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            for storage in storages
        ]
        parts = sorted([*device, *pool], key=torch.Tensor.data_ptr)
        self._parts = parts
        self._starts = np.array([part.data_ptr() for part in parts], np.int64)

    def __call__(
        self,
        direction: Direction,
        sources: torch.Tensor,
        targets: torch.Tensor,
        sizes: torch.Tensor,
    ) -> None:
        """Enqueues the copies."""
        pairs = zip(self._views(sources, sizes), self._views(targets, sizes), strict=True)
        for source, target in pairs:
            target.copy_(source, non_blocking=True)

    def _views(self, addresses: torch.Tensor, sizes: torch.Tensor) -> list[torch.Tensor]:
        at: npt.NDArray[np.int64] = addresses.numpy()
        which = np.searchsorted(self._starts, at, side="right") - 1
        offsets = at - self._starts[which]
        ends = offsets + sizes.numpy()
        spans = zip(which.tolist(), offsets.tolist(), ends.tolist(), strict=True)
        return [self._parts[part][offset:end] for part, offset, end in spans]
