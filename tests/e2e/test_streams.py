"""A real engine whose copies run on the streams of a strict stand-in for an NPU."""

import numpy as np
import pytest
import torch

from harness import BLOCK, Engine, jobs
from preempt_offload.connector import PreemptOffloadConnector
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
        for column in device.pool:
            npus[-1].watch(column, "host")
        for storage in layout.storages:
            npus[-1].watch(torch.tensor([], dtype=torch.uint8).set_(storage), "device")
        return device

    def save_kv_layer(connector, layer, cache, metadata, **kwargs):
        """vLLM calls this behind each layer of a forward."""
        tell_of_attention(npus[-1], cache, metadata)

    monkeypatch.setattr(OffloadWorker, "_device_of", device_of)
    monkeypatch.setattr(PreemptOffloadConnector, "save_kv_layer", save_kv_layer)
    return npus


def tell_of_attention(npu, cache, metadata):
    """Has the stand-in check what a layer of a forward has read and written."""
    words, stride = cache[0].nbytes // 8, cache.stride(0) * cache.itemsize // 8
    tables = zip(metadata.block_table.numpy(), metadata.seq_lens.tolist(), strict=False)
    read = np.concatenate([table[: -(-tokens // BLOCK)] for table, tokens in tables])
    slots = metadata.slot_mapping[: metadata.num_actual_tokens].numpy()
    npu.compute()
    for access, blocks in (npu.read, read), (npu.write, slots // BLOCK):
        first = np.unique(blocks).astype(np.int64)[:, None] * stride
        access(cache.data_ptr(), (first + np.arange(words)).ravel())


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
def test_preempted_requests_are_restored(
    model, undisturbed, record, record_npu, npus, async_scheduling
):
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
    record_npu(npu)
    assert npu.calls["waits of the host"] == 0
    assert npu.calls["accesses of what computes"] > 100
    assert npu.calls["calls of the operator"] <= len(outcome.preemptions) + len(outcome.restores)
    # A handful, which are used again.
    assert npu.calls["events made"] < npu.calls["events recorded"] / 2
