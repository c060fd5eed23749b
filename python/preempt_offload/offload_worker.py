"""The worker role: carries out the step's copies and reports what is through."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from preempt_offload import compat
from preempt_offload.devices import Device, Ended, HostDevice, Transfer, TransferResult
from preempt_offload.kv_layout import CacheLayout, check_formats
from preempt_offload.log import get_logger
from preempt_offload.metadata import OffloadMetadata, OffloadWorkerMetadata
from preempt_offload.stats import WorkerStats
from preempt_offload.stream_device import StreamDevice

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.v1.kv_cache_interface import KVCacheConfig

    from preempt_offload._core import BlockPairs, Direction
    from preempt_offload.config import CopyMethod
    from preempt_offload.kv_layout import LayerCache

logger = get_logger(__name__)


class OffloadWorker:
    """Copies blocks between one rank's KV caches and its host pool.

    Args:
        kv_cache_config: The rank's KV cache config.
        rank: The worker's rank in its world of TP x PP.
        num_host_blocks: Host blocks of the pool.
        copy_threads: Threads per copy where the caches are in host memory.
        copy_method: What copies where they are not.
    """

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        *,
        rank: int,
        num_host_blocks: int,
        copy_threads: int,
        copy_method: CopyMethod = "auto",
    ) -> None:
        self.stats = WorkerStats()
        self._kv_cache_config = kv_cache_config
        self._rank = rank
        self._num_host_blocks = num_host_blocks
        self._copy_threads = copy_threads
        self._copy_method: CopyMethod = copy_method
        self._device: Device | None = None
        self._last_event = -1
        # Under way: stores by event, loads with the metadata that asked for them.
        self._stores: dict[int, Transfer] = {}
        self._loads: list[tuple[Transfer, OffloadMetadata]] = []
        # To be reported with this step.
        self._failed_loads: set[str] = set()
        self._unloaded: list[OffloadMetadata] = []

    def register_kv_caches(self, kv_caches: Mapping[str, LayerCache]) -> None:
        """Takes the KV caches, by layer name, and allocates the host pool for them.

        Raises:
            ValueError: A cache's layout does not add up, or cannot be copied as bytes.
        """
        check_formats(kv_caches)
        layout = CacheLayout.of(kv_caches, self._kv_cache_config)
        self._device = self._device_of(layout)
        logger.info(
            "Allocated %d host blocks of %d bytes for %d KV cache group(s) on rank %d",
            self._num_host_blocks,
            layout.block_bytes,
            len(layout.groups),
            self._rank,
        )

    def _device_of(self, layout: CacheLayout) -> Device:
        """What copies, chosen by where the KV caches are."""
        device = next((storage.device for storage in layout.storages), torch.device("cpu"))
        if device.type == "cpu":
            return HostDevice(
                layout, num_host_blocks=self._num_host_blocks, threads=self._copy_threads
            )
        return StreamDevice(
            layout, device, num_host_blocks=self._num_host_blocks, copy_method=self._copy_method
        )

    def handle_preemptions(self, metadata: OffloadMetadata) -> None:
        """Begins the step's stores, before this step overwrites the blocks.

        vLLM may call this twice in one step, and the second time the blocks may be
        overwritten already; so each event is carried out once.
        """
        event = metadata.store_event
        if event is None or event <= self._last_event:
            return
        self._last_event = event
        assert metadata.store_pairs is not None
        self._stores[event] = self._begin("d2h", metadata.store_pairs)

    def start_load_kv(self, metadata: OffloadMetadata) -> None:
        """Begins the step's loads, before its forward."""
        if metadata.load_requests:
            assert metadata.load_pairs is not None
            self._loads.append((self._begin("h2d", metadata.load_pairs), metadata))

    def get_finished(self) -> set[str]:
        """Requests whose loads are through since the last call, failed ones included."""
        finished: set[str] = set()
        loads, self._loads = self._loads, []
        for load, metadata in loads:
            result = load.poll()
            if result is None:
                self._loads.append((load, metadata))
                continue
            finished.update(metadata.load_requests)
            self.stats.bytes_loaded += result.num_bytes
            if not result.ok:
                self._fail_load(metadata)
        return finished

    def take_unloaded_requests(self) -> set[str]:
        """Requests whose load has failed since this or ``take_unloaded_blocks`` was called."""
        unloaded, self._unloaded = self._unloaded, []
        return {request_id for metadata in unloaded for request_id in metadata.load_requests}

    def take_unloaded_blocks(self) -> set[int]:
        """Device blocks whose load has failed since this or ``take_unloaded_requests`` was.

        None where vLLM could not recover from that; see ``compat.loads_fail_by_block``.
        """
        unloaded, self._unloaded = self._unloaded, []
        if not unloaded or not compat.loads_fail_by_block(self._kv_cache_config):
            return set()
        return {
            block
            for metadata in unloaded
            if metadata.load_pairs is not None
            for block in metadata.load_pairs[:, 1].tolist()
        }

    def take_report(self) -> OffloadWorkerMetadata | None:
        """What the scheduler has to know of this step; ``None`` if nothing ended."""
        stores: dict[int, dict[int, bool]] = {}
        for event, store in list(self._stores.items()):
            result = store.poll()
            if result is not None:
                del self._stores[event]
                stores[event] = {self._rank: result.ok}
                self.stats.bytes_stored += result.num_bytes
                self.stats.failed_stores += not result.ok
        if not stores and not self._failed_loads:
            return None
        failed_loads, self._failed_loads = self._failed_loads, set()
        return OffloadWorkerMetadata(stores, frozenset(failed_loads))

    def _begin(self, direction: Direction, pairs: BlockPairs) -> Transfer:
        assert self._device is not None, "no KV caches were registered"
        try:
            return self._device.begin(direction, pairs)
        except Exception:
            # The request is recomputed; the engine and its other requests go on.
            logger.exception("Copying %d KV blocks %s failed", len(pairs), direction)
            return Ended(TransferResult(ok=False, num_bytes=0))

    def _fail_load(self, metadata: OffloadMetadata) -> None:
        self.stats.failed_loads += 1
        self._failed_loads.update(metadata.load_requests)
        self._unloaded.append(metadata)
