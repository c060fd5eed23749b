"""What several unit test modules need: stand-ins for vLLM's side of the connector."""

from __future__ import annotations

import dataclasses

import numpy as np

from preempt_offload._core import BlockLayout
from preempt_offload.metadata import OffloadWorkerMetadata
from preempt_offload.offload_scheduler import OffloadScheduler

ADVICE = "Use the right scheduler."


def pool_state(pool):
    """Free blocks, evictable blocks, and the references of every block."""
    references = [pool.ref_count(block) for block in range(1, pool.capacity + 1)]
    return pool.num_free, pool.num_evictable, references


def plan(result):
    """A plan of the request table with its pairs as tuples, in any order."""
    pairs, mirrored, shared = result
    return sorted(map(tuple, pairs.tolist())), mirrored, shared


@dataclasses.dataclass
class Request:
    """What the scheduler role reads of a vLLM request."""

    request_id: str
    num_tokens: int
    num_output_placeholders: int = 0
    num_output_tokens: int = 1
    is_prefill_chunk: bool = False
    num_preemptions: int = 0
    skip_reading_prefix_cache: bool = False
    block_hashes: list[bytes] = dataclasses.field(default_factory=list)
    kv_transfer_params: dict[str, object] | None = None
    finished: bool = False

    def is_finished(self):
        return self.finished


class Scene:
    """A scheduler role with the scheduler and the workers around it played by hand."""

    def __init__(
        self,
        *,
        num_host_blocks=16,
        block_tokens=(4,),
        world_size=1,
        share_blocks=False,
        hash_tokens=4,
        **options,
    ):
        self.scheduler = OffloadScheduler(
            num_host_blocks=num_host_blocks,
            block_tokens=list(block_tokens),
            world_size=world_size,
            share_blocks=share_blocks,
            no_op_advice=ADVICE,
            **options,
        )
        self.scheduler.hash_tokens = hash_tokens
        self.world_size = world_size

    # ---- the scheduler's side ----

    def preempt(self, request, blocks, num_computed_tokens):
        """Preempts ``request`` and counts it, as vLLM does; ``blocks`` per group."""
        preserved = self.scheduler.update_state_before_preempt(request, blocks, num_computed_tokens)
        request.num_preemptions += 1
        return preserved

    def ask(self, request, num_computed_tokens=0):
        return self.scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def allocate(self, request, blocks, num_external_tokens):
        self.scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def step(self):
        return self.scheduler.build_connector_meta()

    # ---- the workers' side ----

    def report_store(self, event, ok=True, ranks=None):
        """Workers report the stores of ``event``, in one step per rank."""
        for rank in range(self.world_size) if ranks is None else ranks:
            report = OffloadWorkerMetadata({event: {rank: ok}})
            self.scheduler.update_connector_output(report, ())

    def report_loads(self, *request_ids, failed=()):
        """The loads of ``request_ids`` are through on every rank."""
        report = OffloadWorkerMetadata({}, frozenset(failed)) if failed else None
        self.scheduler.update_connector_output(report, set(request_ids))

    # ---- several steps at once ----

    def preserve(self, request, blocks, num_computed_tokens):
        """Preempts ``request`` and stores it on every rank; returns the step's metadata."""
        assert self.preempt(request, blocks, num_computed_tokens)
        meta = self.step()
        self.report_store(meta.store_event)
        return meta

    def restore(self, request, blocks, num_computed_tokens=0):
        """Loads a ready request on every rank; returns the step's metadata."""
        num_tokens, asynchronous = self.ask(request, num_computed_tokens)
        assert asynchronous
        self.allocate(request, blocks, num_tokens)
        meta = self.step()
        self.report_loads(request.request_id)
        # vLLM calls this once more when the request is scheduled.
        self.allocate(request, blocks, 0)
        return meta

    # ---- what is left ----

    def state(self, request_id):
        status = self.scheduler.table.status(request_id)
        return status and status[0]

    @property
    def num_available(self):
        return self.scheduler.pool.num_free + self.scheduler.pool.num_evictable

    def assert_nothing_left(self):
        """Every host block is back, no entry is left, and nothing is waited for."""
        assert self.scheduler.table.counts() == {
            "Storing": 0,
            "Ready": 0,
            "Loading": 0,
            "Mirrored": 0,
        }
        assert self.num_available == self.scheduler.pool.capacity
        assert not self.scheduler.has_pending_transfers()


class Memory:
    """One group of device blocks and a host pool in NumPy buffers, with guard bytes.

    Each device block has ``size`` bytes and then padding up to ``stride``.
    """

    GUARD = 0xA5

    def __init__(self, *, device_blocks, host_blocks, size, stride=None, seed=0):
        stride = stride or size
        self.size = size
        self._device = np.full(device_blocks * stride + 64, self.GUARD, np.uint8)
        self._host = np.full(host_blocks * size + 64, self.GUARD, np.uint8)
        self.device = self._device[32:-32].reshape(device_blocks, stride)
        self.host = self._host[32:-32].reshape(host_blocks, size)
        rng = np.random.default_rng(seed)
        self.device[:, :size] = rng.integers(0, 256, (device_blocks, size), np.uint8)
        device, host = self.device.ctypes.data, self.host.ctypes.data
        self.layout = BlockLayout(
            device_blocks,
            host_blocks,
            1,
            [(0, device, stride, size, host, size)],
            [(device, self.device.nbytes)],
            [(host, self.host.nbytes)],
        )

    def snapshot(self):
        return self._device.copy(), self._host.copy()

    def assert_guards(self):
        for buffer in (self._device, self._host):
            assert (buffer[:32] == self.GUARD).all()
            assert (buffer[-32:] == self.GUARD).all()

    def assert_unchanged(self, snapshot):
        np.testing.assert_array_equal(self._device, snapshot[0])
        np.testing.assert_array_equal(self._host, snapshot[1])
