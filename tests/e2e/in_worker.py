"""What tests do inside of the workers, wherever those run; vLLM mixes it into its worker class."""

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

import async_on_cpu  # noqa: F401
from preempt_offload import compat


class InWorker:
    """Methods for ``collective_rpc``."""

    def bytes_copied(self):
        """Bytes that this rank has stored and loaded."""
        if not has_kv_transfer_group():
            return 0, 0
        stats = offload_worker().stats
        return stats.bytes_stored, stats.bytes_loaded

    def fail_first_copies(self, faulty_rank, direction):
        """Makes the first copies of one rank in one direction fail."""
        if self.rank == faulty_rank:
            device = offload_worker()._device
            device.begin = fail_first_copies(device.begin, direction, [])

    def failed_copies(self):
        """Stores and loads of this rank that have failed."""
        stats = offload_worker().stats
        return stats.failed_stores, stats.failed_loads

    def report_late(self, late_rank):
        """Makes one rank report every store one step after it is through."""
        if self.rank == late_rank:
            device = offload_worker()._device
            device.begin = report_stores_late(device.begin)

    def copy_well(self):
        """Ends what the methods before have begun."""
        vars(offload_worker()._device).pop("begin", None)


def offload_worker():
    """The worker role in this process."""
    return compat.find_offload_connector(get_kv_transfer_group()).worker


def fail_first_copies(begin, faulty_direction, failed, *, most=3):
    """A device's ``begin`` that raises for the first copies in one direction.

    Args:
        begin: What it does otherwise.
        faulty_direction: ``"d2h"`` or ``"h2d"``.
        failed: Gets the number of blocks of each copy that fails.
        most: Copies that fail.
    """

    def sometimes(direction, pairs):
        if direction == faulty_direction and len(failed) < most:
            failed.append(len(pairs))
            raise OSError("the bus is on fire")
        return begin(direction, pairs)

    return sometimes


def report_stores_late(begin):
    """A device's ``begin`` whose stores are through only when they are asked a second time."""

    class Late:
        def __init__(self, transfer):
            self.transfer = transfer
            self.asked = False

        def poll(self):
            if self.asked:
                return self.transfer.poll()
            self.asked = True
            return None

    def late(direction, pairs):
        transfer = begin(direction, pairs)
        return Late(transfer) if direction == "d2h" else transfer

    return late
