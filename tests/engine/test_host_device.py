"""Stores and loads of real tensors, compared block by block and byte by byte."""

import dataclasses

import numpy as np
import pytest
import torch
from engine_support import (
    BACKEND_CASES,
    BLOCK_SIZE,
    CASES,
    HEAD_SIZE,
    HEADS,
    SPEC,
    STATES,
    kv_cache_config,
    random_,
    storage_bytes,
)
from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

from preempt_offload._core import AddressError
from preempt_offload.devices import HostDevice
from preempt_offload.kv_layout import CacheLayout, parts_of
from preempt_offload.stream_device import StreamDevice
from strict_npu import StrictNpu

N, HOST = 8, 6

# How a cache is made, and which part of it is block ``b``.
CACHES = {
    "blocks first": (
        lambda: torch.empty(N, 2, BLOCK_SIZE, HEADS, HEAD_SIZE),
        lambda cache, b: cache[b],
    ),
    "as on the CPU engine": (
        lambda: torch.empty(N, HEADS, BLOCK_SIZE, 2 * HEAD_SIZE),
        lambda cache, b: cache[b],
    ),
    "K and V first": (
        lambda: torch.empty(2, N, BLOCK_SIZE, HEADS, HEAD_SIZE),
        lambda cache, b: cache[:, b],
    ),
    "K and V first, heads before tokens": (
        lambda: torch.empty(2, N, HEADS, BLOCK_SIZE, HEAD_SIZE).transpose(2, 3),
        lambda cache, b: cache[:, b],
    ),
    "K and V first, side by side": (
        lambda: torch.empty(N, 2, BLOCK_SIZE, HEADS, HEAD_SIZE).transpose(0, 1),
        lambda cache, b: cache[:, b],
    ),
    "kernel blocks of 4 tokens": (
        lambda: torch.empty(4 * N, 2, BLOCK_SIZE // 4, HEADS, HEAD_SIZE),
        lambda cache, b: cache[4 * b : 4 * b + 4],
    ),
    "blocks apart": (
        lambda: torch.empty(N, 3, 2, BLOCK_SIZE, HEADS, HEAD_SIZE)[:, 1],
        lambda cache, b: cache[b],
    ),
    "not from the start of the storage": (
        lambda: torch.empty(N + 2, 2, BLOCK_SIZE, HEADS, HEAD_SIZE)[2:],
        lambda cache, b: cache[b],
    ),
}


def pairs(*rows):
    return np.array(rows, np.uint32).reshape(-1, 3)


def device_for(caches, config):
    return HostDevice(CacheLayout.of(caches, config), num_host_blocks=HOST, threads=2)


def stream_device_for(caches, config, copy_method, seed):
    """A device on a stand-in for an NPU."""
    npu, layout = StrictNpu(seed), CacheLayout.of(caches, config)
    device = StreamDevice(
        layout,
        torch.device("cpu"),
        num_host_blocks=HOST,
        copy_method=copy_method,
        module=npu,
    )
    for column in device.pool:
        npu.watch(column, "host")
    for storage in layout.storages:
        npu.watch(torch.empty(0, dtype=torch.uint8).set_(storage), "device")
    return device


def carry_out(device, direction, block_pairs):
    """How a copy ends."""
    transfer = device.begin(direction, block_pairs)
    while (result := transfer.poll()) is None:
        pass
    return result


@pytest.mark.parametrize(("make", "block"), CACHES.values(), ids=CACHES)
def test_blocks_come_back_elsewhere_and_nothing_else_changes(make, block):
    cache = random_(make(), seed=1)
    config = kv_cache_config(["a"], num_blocks=N)
    device = device_for({"a": cache}, config)
    original = storage_bytes(cache)
    stored = {b: block(cache, b).clone() for b in (1, 2, 5)}

    result = device.begin("d2h", pairs((0, 1, 3), (0, 2, 4), (0, 5, 1))).poll()
    assert result.ok
    assert result.num_bytes == 3 * config.kv_cache_groups[0].kv_cache_spec.page_size_bytes
    assert torch.equal(storage_bytes(cache), original), "a store only reads"

    random_(cache, seed=2)
    expected = cache.clone(memory_format=torch.preserve_format)
    overwritten = storage_bytes(cache)
    assert device.begin("h2d", pairs((0, 7, 3), (0, 2, 4), (0, 4, 1))).poll().ok
    for to, of in [(7, 1), (2, 2), (4, 5)]:
        assert torch.equal(block(cache, to).view(torch.int32), stored[of].view(torch.int32))
        block(cache, to).copy_(block(expected, to))
    # With those three put back, every byte is as before: of guards and other blocks too.
    assert torch.equal(storage_bytes(cache), overwritten)


def test_groups_and_layers_do_not_mix():
    caches = {
        layer: random_(torch.empty(N, 2, BLOCK_SIZE, HEADS, HEAD_SIZE), i)
        for i, layer in enumerate("abc")
    }
    # "c" has the memory of "a", as where groups share their tensors.
    caches["c"] = caches["a"]
    config = kv_cache_config(["a", "b"], ["c"], num_blocks=N)
    device = device_for(caches, config)
    before = {layer: cache.clone() for layer, cache in caches.items()}
    assert device.begin("d2h", pairs((0, 1, 1), (0, 2, 2), (1, 3, 3))).poll().ok
    for layer in "ab":
        random_(caches[layer], 9)
    after = {layer: cache.clone() for layer, cache in caches.items()}
    assert device.begin("h2d", pairs((0, 4, 1), (0, 5, 2), (1, 6, 3))).poll().ok

    after["a"][[4, 5, 6]] = before["a"][[1, 2, 3]]
    after["b"][[4, 5]] = before["b"][[1, 2]]
    for layer in "ab":
        assert torch.equal(caches[layer].view(torch.int32), after[layer].view(torch.int32))


def test_every_host_block_holds_a_block_of_its_own():
    cache = random_(torch.empty(N, 2, BLOCK_SIZE, HEADS, HEAD_SIZE))
    device = device_for({"a": cache}, kv_cache_config(["a"], num_blocks=N))
    before = cache.clone()
    everything = pairs(*((0, b, b) for b in range(1, HOST + 1)))
    device.begin("d2h", everything)
    cache[1:].zero_()
    device.begin("h2d", pairs(*((0, b, HOST + 1 - b) for b in range(1, HOST + 1))))
    assert torch.equal(
        cache[1 : HOST + 1].view(torch.int32), before[1 : HOST + 1].flip(0).view(torch.int32)
    )
    assert not cache[HOST + 1 :].any()


def test_no_pairs_are_no_bytes():
    device = device_for(
        {"a": torch.empty(N, 2, BLOCK_SIZE, HEADS, HEAD_SIZE)}, kv_cache_config(["a"])
    )
    result = device.begin("h2d", pairs()).poll()
    assert (result.ok, result.num_bytes) == (True, 0)


def test_a_block_out_of_range_copies_nothing():
    cache = random_(torch.empty(N, 2, BLOCK_SIZE, HEADS, HEAD_SIZE))
    device = device_for({"a": cache}, kv_cache_config(["a"], num_blocks=N))
    before = storage_bytes(cache)
    with pytest.raises(AddressError, match=f"host block {HOST + 1} .*1..={HOST}"):
        device.begin("h2d", pairs((0, 1, 1), (0, 2, HOST + 1)))
    assert torch.equal(storage_bytes(cache), before)


# ---- everything at once: what vLLM allocates, and what its plug-ins do ----


def beside_one_another(num_blocks):
    """K and V of each layer in storages of their own, with kernel blocks of 4 tokens."""
    config = kv_cache_config(["a", "b"], ["c"], num_blocks=num_blocks)
    shape = (4 * num_blocks, BLOCK_SIZE // 4, HEADS, HEAD_SIZE)
    caches = {layer: (torch.empty(shape), torch.empty(shape)) for layer in "ab"}
    return config, caches | {"c": caches["a"]}


def arrays_in_one_storage(num_blocks):
    """Padding, K and V of all blocks, where another group has its two states.

    The second state of a block is where K is, so that no block reaches into another.
    """
    half = SPEC.page_size_bytes // 2
    states = dataclasses.replace(
        STATES, shapes=((64,), (half,)), dtypes=(torch.int8,) * 2, page_size_padded=2 * half + 64
    )
    attention = dataclasses.replace(SPEC, page_size_padded=2 * half + 64)
    config = kv_cache_config(["a"], ["b"], num_blocks=num_blocks, spec=[attention, states])
    # Not where the allocator would put it.
    storage = torch.empty(128 + num_blocks * (2 * half + 64), dtype=torch.int8)[128:]
    first, second, third = storage.split([num_blocks * 64, num_blocks * half, num_blocks * half])
    shape = (num_blocks, BLOCK_SIZE, HEADS, HEAD_SIZE)
    keys, values = (array.view(torch.float32).view(shape) for array in (second, third))
    return config, {
        "a": (keys, values),
        "b": [first.view(num_blocks, 64), second.view(num_blocks, half)],
    }


def keys_and_values_first(num_blocks):
    """Two layers, of which a third shares the cache of the second."""
    config = kv_cache_config(["a", "b", "c"], num_blocks=num_blocks)
    shape = (2, num_blocks, BLOCK_SIZE, HEADS, HEAD_SIZE)
    caches = {layer: torch.empty(shape) for layer in "ab"}
    return config, caches | {"c": caches["b"]}


def a_stage_without_layers_of_a_group(num_blocks):
    config = kv_cache_config([], ["a"], num_blocks=num_blocks)
    return config, {"a": torch.empty(num_blocks, 2, BLOCK_SIZE, HEADS, HEAD_SIZE)}


def a_page_as_large_as_two(num_blocks):
    """Groups whose segments do not end at the same places of a host block."""
    wide = dataclasses.replace(SPEC, num_kv_heads=2 * HEADS)
    groups = [{"a": SPEC, "b": SPEC}, {"c": wide}]
    specs = [UniformTypeKVCacheSpecs(BLOCK_SIZE, kv_cache_specs=group) for group in groups]
    config = kv_cache_config(*groups, num_blocks=num_blocks, spec=specs, layout="BLHNC")
    return config, {
        layer: torch.empty(num_blocks, 2, BLOCK_SIZE, spec.num_kv_heads, HEAD_SIZE)
        for group in groups
        for layer, spec in group.items()
    }


PLUG_INS = [
    a_page_as_large_as_two,
    beside_one_another,
    arrays_in_one_storage,
    keys_and_values_first,
    a_stage_without_layers_of_a_group,
]
EVERYTHING = [*CASES, *BACKEND_CASES] + [pytest.param(make, id=make.__name__) for make in PLUG_INS]


class Storages:
    """All the bytes behind some caches, and which of them are those of a block.

    The latter is found by writing to the block through its tensors, by indices alone.
    """

    def __init__(self, config, caches):
        self.num_blocks = config.num_blocks
        self.groups = [
            [part for layer in group.layer_names for part in parts_of(caches[layer])]
            for group in config.kv_cache_groups
        ]
        parts = [part for group in self.groups for part in group]
        every = {part.untyped_storage().data_ptr(): part.untyped_storage() for part in parts}
        self.storages = [
            torch.empty(0, dtype=torch.uint8).set_(storage).numpy() for storage in every.values()
        ]

    def read(self):
        return np.concatenate(self.storages)

    def write(self, content):
        for storage in self.storages:
            storage[:], content = content[: len(storage)], content[len(storage) :]

    def places(self, group, block):
        """Of the bytes that :meth:`read` returns, those of a block."""
        before = self.read()
        self.write(np.zeros_like(before))
        for part in self.groups[group]:
            integers = {1: torch.int8, 2: torch.int16, 4: torch.int32}[part.element_size()]
            part = part.view(integers)
            dim = 1 if part.shape[0] == 2 else 0
            part.unflatten(dim, (self.num_blocks, -1)).select(dim, block).fill_(-1)
        places = np.flatnonzero(self.read())
        self.write(before)
        return places


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("copied_by", ["processor", "ascend", "torch"])
@pytest.mark.parametrize("make", EVERYTHING)
def test_blocks_of_all_groups_come_back_elsewhere_and_no_other_byte_changes(make, copied_by, seed):
    rng = np.random.default_rng(seed)
    config, caches = (make.make if hasattr(make, "make") else make)(N)
    storages = Storages(config, caches)
    if copied_by == "processor":
        device = device_for(caches, config)
    else:
        device = stream_device_for(caches, config, copied_by, seed)

    def different(last, count):
        """``count`` different ids of ``1..=last``."""
        return 1 + rng.permutation(last)[:count]

    for _ in range(5):
        count = rng.integers(1, HOST + 1)
        groups = rng.integers(0, len(config.kv_cache_groups), count)
        host = different(HOST, count)
        stored = pairs(*zip(groups, different(N - 1, count), host, strict=True))
        loaded = pairs(*zip(groups, different(N - 1, count), host, strict=True))

        before = rng.integers(0, 256, storages.read().size, np.uint8)
        storages.write(before)
        result = carry_out(device, "d2h", stored)
        places = [storages.places(group, block) for group, block, _ in stored]
        assert result.num_bytes == sum(map(len, places))
        assert np.array_equal(storages.read(), before), "a store only reads"

        expected = rng.integers(0, 256, before.size, np.uint8)
        storages.write(expected)
        assert carry_out(device, "h2d", loaded).num_bytes == result.num_bytes
        for (group, block, _), origin in zip(loaded, places, strict=True):
            expected[storages.places(group, block)] = before[origin]
        assert np.array_equal(storages.read(), expected)
