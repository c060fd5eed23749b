"""What crosses between the scheduler role and the worker role, once per step."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from preempt_offload.compat import KVConnectorMetadata, KVConnectorWorkerMetadata

if TYPE_CHECKING:
    from preempt_offload._core import BlockPairs


@dataclasses.dataclass(frozen=True, slots=True)
class OffloadMetadata(KVConnectorMetadata):
    """Scheduler to worker: what to copy in this step.

    Attributes:
        store_event: The event to report when the stores are through; ``None``: no store.
        store_pairs: Blocks to copy D2H, before anything overwrites them.
        load_requests: Requests that the loads belong to.
        load_pairs: Blocks to copy H2D, before the forward that needs them.
    """

    store_event: int | None = None
    store_pairs: BlockPairs | None = None
    load_requests: tuple[str, ...] = ()
    load_pairs: BlockPairs | None = None


NOTHING = OffloadMetadata()


@dataclasses.dataclass(frozen=True, slots=True)
class OffloadWorkerMetadata(KVConnectorWorkerMetadata):
    """Worker to scheduler: what is through.

    Attributes:
        stores: By event and rank, whether the store succeeded.
        failed_loads: Requests whose load failed on some rank.
    """

    stores: dict[int, dict[int, bool]]
    failed_loads: frozenset[str] = frozenset()

    def aggregate(self, other: KVConnectorWorkerMetadata) -> OffloadWorkerMetadata:
        """Joins the reports of two ranks, or of several steps."""
        if not isinstance(other, OffloadWorkerMetadata):
            raise TypeError(f"cannot join {type(self).__name__} with {type(other).__name__}")
        events = self.stores.keys() | other.stores.keys()
        stores = {e: self.stores.get(e, {}) | other.stores.get(e, {}) for e in events}
        return OffloadWorkerMetadata(stores, self.failed_loads | other.failed_loads)
