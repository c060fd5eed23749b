"""A real engine whose copies run on the streams of a strict stand-in for an NPU."""

import pytest
import torch

from harness import Engine, jobs
from preempt_offload.offload_worker import OffloadWorker
from preempt_offload.stream_device import StreamDevice
from strict_npu import StrictNpu

JOBS = jobs(seed=7, lengths=[60 + 9 * i % 140 for i in range(24)], max_tokens=60, shared_prefix=40)


@pytest.fixture
def npus(monkeypatch):
    """The stand-ins, one for each worker made from now on."""
    npus = []

    def device_of(worker, layout):
        npus.append(StrictNpu(len(npus), eager=True))
        device = StreamDevice(
            layout, torch.device("cpu"), num_host_blocks=worker._num_host_blocks, module=npus[-1]
        )
        npus[-1].watch(device.pool, "host")
        for storage in layout.storages:
            npus[-1].watch(torch.tensor([], dtype=torch.uint8).set_(storage), "device")
        return device

    monkeypatch.setattr(OffloadWorker, "_device_of", device_of)
    return npus


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
def test_preempted_requests_are_restored(model, undisturbed, record, npus, async_scheduling):
    with Engine(
        model,
        31,
        offload={"offload_host_memory_ratio": 4, "enable_offload_prefix_caching": True},
        async_scheduling=async_scheduling,
        enable_prefix_caching=True,
        fence=False,
    ) as engine:
        outcome = engine.run(JOBS)
    record(outcome, JOBS)
    assert outcome.tokens == undisturbed(JOBS)
    assert len(outcome.preemptions) >= 5
    assert outcome.stats.preserved == len(outcome.preemptions)
    assert outcome.restored_tokens > 0
    assert outcome.recomputed_tokens == 0
    (npu,) = npus
    assert not npu.host_waits
