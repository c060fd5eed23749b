"""Copies on streams: the stand-in's strictness, and a device that does not need its leniency."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from engine_support import BLOCK_SIZE, HEAD_SIZE, HEADS, kv_cache_config

import strict_npu
from preempt_offload import stream_device
from preempt_offload.kv_layout import CacheLayout, check_formats
from preempt_offload.stream_device import MOST_PER_CALL, StreamDevice, choose_copy
from strict_npu import Race, StrictNpu

NUM_BLOCKS, HOST_BLOCKS = 8, 6
PAIRS = np.array([[0, 2, 1], [0, 3, 2], [0, 6, 5]], np.uint32)


class Setup:
    """A device on the stand-in, with one KV cache full of numbers."""

    def __init__(self, seed=0, copy_method="auto", most_per_call=MOST_PER_CALL, **args):
        self.npu = StrictNpu(seed, **args)
        self.cache = torch.arange(NUM_BLOCKS * 2 * BLOCK_SIZE * HEADS * HEAD_SIZE).float()
        self.cache = self.cache.reshape(NUM_BLOCKS, 2, BLOCK_SIZE, HEADS * HEAD_SIZE)
        config = kv_cache_config(["a"], num_blocks=NUM_BLOCKS)
        self.device = StreamDevice(
            CacheLayout.of({"a": self.cache}, config),
            torch.device("cpu"),
            num_host_blocks=HOST_BLOCKS,
            copy_method=copy_method,
            module=self.npu,
            most_per_call=most_per_call,
        )
        self.npu.watch(self.cache, "device")
        for column in self.device.pool:
            self.npu.watch(column, "host")

    def words(self, block):
        words = self.cache[block].nbytes // 8
        return np.arange(block * words, (block + 1) * words)

    def compute(self, *, writes=()):
        """A forward that overwrites these blocks."""
        self.npu.compute()
        for block in writes:
            self.npu.write(self.cache.data_ptr(), self.words(block))
            self.cache[block] = -1

    def end(self, transfer):
        for _ in range(1000):
            if (result := transfer.poll()) is not None:
                return result
        raise AssertionError("the copy never ends")


@pytest.mark.parametrize("copy_method", ["auto", "ascend", "torch"])
@pytest.mark.parametrize("seed", range(5))
def test_blocks_come_back_as_they_were(seed, copy_method):
    setup = Setup(seed, copy_method)
    before = setup.cache.clone()
    store = setup.device.begin("d2h", PAIRS)
    setup.compute(writes=[2, 3, 6])
    assert setup.end(store).num_bytes == 3 * setup.cache[0].nbytes
    assert not torch.equal(setup.cache, before)
    load = setup.device.begin("h2d", PAIRS)
    assert setup.end(load).ok
    setup.compute()
    assert torch.equal(setup.cache, before)
    assert setup.npu.calls["waits of the host"] == 0


def test_the_host_never_waits_and_events_and_buffers_are_used_again(monkeypatch):
    made, new_buffer = [], stream_device._new_buffer
    monkeypatch.setattr(stream_device, "_new_buffer", lambda n: (made.append(n), new_buffer(n))[1])
    setup = Setup()
    for step in range(300):
        store = setup.device.begin("d2h", PAIRS)
        setup.compute(writes=[2, 3, 6])
        setup.end(store)
        load = setup.device.begin("h2d", PAIRS)
        setup.end(load)
        setup.compute()
        if step == 10:
            events, buffers = setup.npu.calls["events made"], len(made)
    assert setup.npu.calls["events made"] == events
    assert len(made) == buffers
    assert setup.npu.calls["waits of the host"] == 0


@pytest.mark.parametrize("blocks", [1, 3, NUM_BLOCKS - 2])
def test_buffers_grow_with_what_is_to_be_copied(monkeypatch, blocks):
    monkeypatch.setattr(stream_device, "_FIRST_CAPACITY", 2)
    setup = Setup()
    before = setup.cache.clone()
    # Neighbours on neither side, so that each is a copy of its own.
    order = np.arange(1, HOST_BLOCKS + 1)[::-1][:blocks]
    pairs = np.array([[0, i + 1, host] for i, host in enumerate(order)], np.uint32)
    store = setup.device.begin("d2h", pairs)
    setup.compute(writes=pairs[:, 1].tolist())
    setup.end(store)
    setup.end(setup.device.begin("h2d", pairs))
    assert torch.equal(setup.cache, before)
    assert setup.npu.calls["copies"] == 2 * blocks


@pytest.mark.parametrize("failures", [0, 1000])
def test_what_is_too_much_for_one_call_takes_several(monkeypatch, failures):
    monkeypatch.setattr(strict_npu, "MOST_COPIES", 2)
    setup = Setup(most_per_call=2, failures=failures)
    before = setup.cache.clone()
    pairs = np.array([[0, i + 1, HOST_BLOCKS - i] for i in range(5)], np.uint32)
    if failures:
        with pytest.raises(RuntimeError, match="refuses"):
            setup.device.begin("d2h", pairs)
        return
    store = setup.device.begin("d2h", pairs)
    setup.compute(writes=pairs[:, 1].tolist())
    assert setup.end(store).num_bytes == 5 * setup.cache[0].nbytes
    setup.end(setup.device.begin("h2d", pairs))
    assert torch.equal(setup.cache, before)
    assert setup.npu.calls["calls of the operator"] == 2 * 3
    assert setup.npu.calls["copies"] == 2 * 5


def test_nothing_to_copy_asks_nothing_of_the_device():
    setup = Setup()
    nothing = np.empty((0, 3), np.uint32)
    for direction in ("d2h", "h2d"):
        assert setup.device.begin(direction, nothing).poll().num_bytes == 0
    assert not setup.npu.calls


def test_a_copy_that_fails_halfway_leaves_nothing_under_way():
    setup = Setup(failures=1000)
    with pytest.raises(RuntimeError, match="refuses"):
        setup.device.begin("h2d", PAIRS)
    assert setup.npu.calls["waits of the host"] == 1
    setup.compute(writes=[2])


def test_an_operator_that_is_not_there_is_told():
    with pytest.raises(ValueError, match=r"'cuda' needs an operator.*ascend, torch"):
        Setup(copy_method="cuda")


def test_the_operators_of_an_npu_are_loaded(monkeypatch):
    loaded = []
    utils = SimpleNamespace(enable_custom_op=lambda: loaded.append(True))
    monkeypatch.setitem(sys.modules, "vllm_ascend", SimpleNamespace(utils=utils))
    monkeypatch.setitem(sys.modules, "vllm_ascend.utils", utils)
    layout = SimpleNamespace(storages=[])
    choose_copy("torch", layout, [])
    assert not loaded
    monkeypatch.setattr(stream_device, "TorchCopy", lambda storages, pool: "a copy each")
    layout.storages = [SimpleNamespace(device=SimpleNamespace(type="npu"))]
    assert choose_copy("torch", layout, []) == "a copy each"
    assert loaded


def test_without_an_order_memory_must_not_be_touched():
    setup = Setup()
    load = setup.device.begin("h2d", PAIRS)
    setup.end(load)
    # The host has seen the end; what is launched from now on comes after it.
    setup.npu.compute()
    setup.npu.read(setup.cache.data_ptr(), setup.words(2))
    setup.device.begin("h2d", PAIRS)
    setup.npu.compute()
    with pytest.raises(Race, match="being written"):
        setup.npu.read(setup.cache.data_ptr(), setup.words(2))


def test_an_event_is_not_recorded_while_it_is_in_use():
    npu = StrictNpu(0)
    event, stream = npu.Event(), npu.Stream()
    with pytest.raises(Race, match="never recorded"):
        stream.wait_event(event)
    event.record(npu.current_stream())
    with pytest.raises(Race, match="recorded anew"):
        event.record(stream)


@pytest.mark.parametrize(("kind", "plain"), [(0, True), (2, True), (30, True), (29, False)])
def test_private_npu_formats_are_refused(monkeypatch, kind, plain):
    monkeypatch.setitem(
        sys.modules, "torch_npu", SimpleNamespace(get_npu_format=lambda tensor: kind)
    )
    on_npu = SimpleNamespace(device=SimpleNamespace(type="npu"))
    caches = {"a": torch.zeros(1), "layer.7": (torch.zeros(1), on_npu)}
    if plain:
        check_formats(caches)
    else:
        with pytest.raises(ValueError, match=r"'layer.7' has NPU format 29"):
            check_formats(caches)
