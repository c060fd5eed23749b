"""The worker role with real tensors, played by hand as vLLM's model runner would."""

import dataclasses

import numpy as np
import pytest
import torch
from engine_support import BLOCK_SIZE, HEAD_SIZE, HEADS, SPEC, kv_cache_config, random_

from preempt_offload import offload_worker
from preempt_offload.devices import Ended, TransferResult
from preempt_offload.metadata import NOTHING, OffloadMetadata, OffloadWorkerMetadata
from preempt_offload.offload_worker import OffloadWorker

PAGE = SPEC.page_size_bytes


def pairs(*rows):
    return np.array(rows, np.uint32).reshape(-1, 3)


STORE = OffloadMetadata(store_event=0, store_pairs=pairs((0, 1, 1), (0, 2, 2)))
LOAD = OffloadMetadata(load_requests=("a",), load_pairs=pairs((0, 5, 1), (0, 6, 2)))


class Scripted:
    """A device whose copies end as told: at once, later, in failure or in an exception."""

    def __init__(self):
        self.begun = []
        self.fails_to_begin = False
        self.pending = {}

    def begin(self, direction, block_pairs):
        if self.fails_to_begin:
            raise RuntimeError("the device is gone")
        self.begun.append(direction)
        self.pending[direction] = transfer = Pending()
        return transfer


class Pending:
    result = None

    def end(self, *, ok, num_bytes=100):
        self.result = TransferResult(ok=ok, num_bytes=num_bytes)

    def poll(self):
        return self.result


@pytest.fixture
def cache():
    return random_(torch.empty(8, 2, BLOCK_SIZE, HEADS, HEAD_SIZE))


@pytest.fixture
def worker(cache):
    """The worker of rank 3, with real memory."""
    worker = OffloadWorker(kv_cache_config(["a"]), rank=3, num_host_blocks=4, copy_threads=2)
    worker.register_kv_caches({"a": cache})
    return worker


@pytest.fixture
def device(monkeypatch):
    """A scripted device that every worker made from now on gets."""
    device = Scripted()
    monkeypatch.setattr(offload_worker, "HostDevice", lambda *args, **kwargs: device)
    return device


@pytest.fixture
def scripted(device, cache):
    """The worker of rank 3, with the scripted device."""
    worker = OffloadWorker(kv_cache_config(["a"]), rank=3, num_host_blocks=4, copy_threads=2)
    worker.register_kv_caches({"a": cache})
    return worker


def bits(tensor):
    return tensor.view(torch.int32)


def test_registering_logs_what_was_allocated(log, worker):
    assert [record.getMessage() for record in log.records] == [
        f"Allocated 4 host blocks of {PAGE} bytes for 1 KV cache group(s) on rank 3"
    ]


def test_a_step_with_nothing_to_do_does_nothing(worker):
    worker.handle_preemptions(NOTHING)
    worker.start_load_kv(NOTHING)
    assert worker.get_finished() == set()
    assert worker.take_unloaded_blocks() == set()
    assert worker.take_report() is None


def test_a_store_and_a_load_bring_the_bytes_back(worker, cache):
    original = cache.clone()
    worker.handle_preemptions(STORE)
    assert worker.take_report() == OffloadWorkerMetadata({0: {3: True}})
    cache.zero_()
    worker.start_load_kv(LOAD)
    assert worker.get_finished() == {"a"}
    assert worker.take_report() is None
    assert torch.equal(bits(cache[5:7]), bits(original[1:3]))
    assert not cache[:5].any()
    assert not cache[7:].any()
    assert dataclasses.astuple(worker.stats) == (2 * PAGE, 2 * PAGE, 0, 0)


def test_everything_is_reported_once(worker):
    worker.handle_preemptions(STORE)
    worker.start_load_kv(LOAD)
    assert worker.get_finished() == {"a"}
    assert worker.take_report() is not None
    assert worker.get_finished() == set()
    assert worker.take_report() is None


def test_a_store_is_carried_out_once_however_often_it_is_asked_for(worker, cache):
    original = cache.clone()
    worker.handle_preemptions(STORE)
    cache.zero_()  # The step has begun, and the blocks have gone to others.
    worker.handle_preemptions(STORE)
    assert worker.take_report() == OffloadWorkerMetadata({0: {3: True}})
    worker.handle_preemptions(STORE)
    assert worker.take_report() is None
    worker.start_load_kv(LOAD)
    assert torch.equal(bits(cache[5:7]), bits(original[1:3]))
    assert worker.stats.bytes_stored == 2 * PAGE


def test_each_event_is_a_store_of_its_own(worker):
    for event in (0, 1, 2):
        worker.handle_preemptions(dataclasses.replace(STORE, store_event=event))
    assert worker.take_report() == OffloadWorkerMetadata({e: {3: True} for e in (0, 1, 2)})


def test_a_step_may_store_and_load(worker, cache):
    original = cache.clone()
    worker.handle_preemptions(STORE)
    worker.take_report()
    both = OffloadMetadata(1, pairs((0, 5, 3), (0, 6, 4)), ("a",), pairs((0, 5, 1), (0, 6, 2)))
    worker.handle_preemptions(both)
    worker.start_load_kv(both)
    assert torch.equal(bits(cache[5:7]), bits(original[1:3]))
    worker.start_load_kv(dataclasses.replace(LOAD, load_pairs=pairs((0, 1, 3), (0, 2, 4))))
    assert torch.equal(bits(cache[1:3]), bits(original[5:7])), "stored before it was loaded over"


def test_transfers_under_way_are_reported_when_they_are_through(scripted, device):
    scripted.handle_preemptions(STORE)
    scripted.start_load_kv(LOAD)
    assert scripted.take_report() is None
    assert scripted.get_finished() == set()
    device.pending["d2h"].end(ok=True, num_bytes=7)
    assert scripted.get_finished() == set()
    assert scripted.take_report() == OffloadWorkerMetadata({0: {3: True}})
    device.pending["h2d"].end(ok=True, num_bytes=5)
    assert scripted.take_report() is None
    assert scripted.get_finished() == {"a"}
    assert scripted.take_unloaded_blocks() == set()
    assert dataclasses.astuple(scripted.stats) == (7, 5, 0, 0)


def test_transfers_may_be_through_in_another_order(scripted, device):
    scripted.handle_preemptions(STORE)
    first = device.pending["d2h"]
    scripted.handle_preemptions(dataclasses.replace(STORE, store_event=1))
    device.pending["d2h"].end(ok=True)
    assert scripted.take_report() == OffloadWorkerMetadata({1: {3: True}})
    first.end(ok=True)
    assert scripted.take_report() == OffloadWorkerMetadata({0: {3: True}})


def test_a_store_that_cannot_begin_is_reported_failed_and_the_worker_goes_on(log, scripted, device):
    device.fails_to_begin = True
    scripted.handle_preemptions(STORE)
    assert scripted.take_report() == OffloadWorkerMetadata({0: {3: False}})
    assert "Copying 2 KV blocks d2h failed" in log.text
    assert "the device is gone" in log.text
    assert scripted.stats.failed_stores == 1

    device.fails_to_begin = False
    scripted.handle_preemptions(dataclasses.replace(STORE, store_event=1))
    device.pending["d2h"].end(ok=True)
    assert scripted.take_report() == OffloadWorkerMetadata({1: {3: True}})


def test_a_store_that_fails_on_its_way_is_reported_failed(scripted, device):
    scripted.handle_preemptions(STORE)
    device.pending["d2h"].end(ok=False, num_bytes=0)
    assert scripted.take_report() == OffloadWorkerMetadata({0: {3: False}})
    assert dataclasses.astuple(scripted.stats) == (0, 0, 1, 0)


def load_that_cannot_begin(worker, device):
    device.fails_to_begin = True
    worker.start_load_kv(LOAD)


def load_that_fails_on_its_way(worker, device):
    worker.start_load_kv(LOAD)
    assert worker.get_finished() == set()
    device.pending["h2d"].end(ok=False, num_bytes=0)


@pytest.mark.parametrize("by_request", [False, True])
@pytest.mark.parametrize("story", [load_that_cannot_begin, load_that_fails_on_its_way])
def test_a_failed_load_is_finished_and_its_request_or_blocks_are_reported(
    scripted, device, story, by_request
):
    story(scripted, device)
    assert scripted.get_finished() == {"a"}
    if by_request:
        assert scripted.take_unloaded_requests() == {"a"}
    else:
        assert scripted.take_unloaded_blocks() == {5, 6}
    assert scripted.take_report() == OffloadWorkerMetadata({}, frozenset({"a"}))
    assert scripted.stats.failed_loads == 1
    # Once.
    assert scripted.get_finished() == set()
    assert scripted.take_unloaded_blocks() == set()
    assert scripted.take_unloaded_requests() == set()
    assert scripted.take_report() is None


def test_a_failed_load_and_a_store_are_reported_together(scripted, device):
    scripted.handle_preemptions(STORE)
    device.pending["d2h"].end(ok=True)
    scripted.start_load_kv(LOAD)
    device.pending["h2d"].end(ok=False)
    assert scripted.get_finished() == {"a"}
    assert scripted.take_report() == OffloadWorkerMetadata({0: {3: True}}, frozenset({"a"}))


def test_a_block_that_is_not_there_is_a_failed_copy_and_no_crash(worker, cache):
    original = cache.clone()
    worker.start_load_kv(OffloadMetadata(load_requests=("a",), load_pairs=pairs((0, 5, 99))))
    assert worker.get_finished() == {"a"}
    assert worker.take_unloaded_blocks() == {5}
    assert torch.equal(bits(cache), bits(original))


def test_a_load_of_no_blocks_is_through_at_once(worker):
    worker.start_load_kv(OffloadMetadata(load_requests=("a",), load_pairs=pairs()))
    assert worker.get_finished() == {"a"}
    assert worker.take_unloaded_blocks() == set()


def test_a_cache_that_does_not_add_up_is_an_error_at_registration():
    worker = OffloadWorker(kv_cache_config(["a"]), rank=0, num_host_blocks=4, copy_threads=2)
    with pytest.raises(ValueError, match="layer 'a' does not add up"):
        worker.register_kv_caches({"a": torch.empty(8, 3)})


def test_what_is_through_at_once_polls_the_same_forever():
    result = TransferResult(ok=True, num_bytes=1)
    assert [Ended(result).poll() for _ in range(2)] == [result, result]
