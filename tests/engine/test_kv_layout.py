import dataclasses
import re

import pytest
import torch
from engine_support import BLOCK_SIZE, HEAD_SIZE, HEADS, SPEC, kv_cache_config
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.kv_cache_interface import FullAttentionSpec

from preempt_offload._core import AddressError
from preempt_offload.kv_layout import CacheLayout, Segment, segments_of

N = 8
PAGE = SPEC.page_size_bytes
HALF = PAGE // 2


def segments(tensor, num_blocks=N, page_bytes=PAGE):
    return segments_of("some.layer", tensor, num_blocks=num_blocks, page_bytes=page_bytes)


def test_the_shape_of_the_cpu_engine_is_one_segment():
    tensor = torch.empty(CPUAttentionBackend.get_kv_cache_shape(N, BLOCK_SIZE, HEADS, HEAD_SIZE))
    assert segments(tensor) == [Segment(tensor.data_ptr(), PAGE, PAGE)]


def test_blocks_first_is_one_segment():
    tensor = torch.empty(N, 2, BLOCK_SIZE, HEADS, HEAD_SIZE)
    assert segments(tensor) == [Segment(tensor.data_ptr(), PAGE, PAGE)]


def test_keys_and_values_first_are_two_segments():
    tensor = torch.empty(2, N, BLOCK_SIZE, HEADS, HEAD_SIZE)
    keys, values = tensor
    assert segments(tensor) == [
        Segment(keys.data_ptr(), HALF, HALF),
        Segment(values.data_ptr(), HALF, HALF),
    ]


@pytest.mark.parametrize("multiple", [2, 4])
def test_kernel_blocks_may_be_smaller_than_ours(multiple):
    tensor = torch.empty(N * multiple, 2, BLOCK_SIZE // multiple, HEADS, HEAD_SIZE)
    assert segments(tensor) == [Segment(tensor.data_ptr(), PAGE, PAGE)]


def test_kernel_blocks_may_be_smaller_with_keys_and_values_first():
    tensor = torch.empty(2, N * 4, BLOCK_SIZE // 4, HEADS, HEAD_SIZE)
    keys, values = tensor
    assert segments(tensor) == [
        Segment(keys.data_ptr(), HALF, HALF),
        Segment(values.data_ptr(), HALF, HALF),
    ]


@pytest.mark.parametrize("order", [(0, 1, 3, 2, 4), (0, 3, 1, 2, 4), (0, 4, 3, 2, 1)])
def test_dimensions_inside_a_block_may_be_in_any_order(order):
    sizes = [N, 2, BLOCK_SIZE, HEADS, HEAD_SIZE]
    tensor = torch.empty([sizes[d] for d in order])
    logical = tensor.permute([order.index(d) for d in range(5)])
    assert tuple(logical.shape) == tuple(sizes)
    assert not logical.is_contiguous()
    assert segments(logical) == [Segment(tensor.data_ptr(), PAGE, PAGE)]


def test_keys_and_values_first_may_lie_side_by_side_in_each_block():
    tensor = torch.empty(N, 2, BLOCK_SIZE, HEADS, HEAD_SIZE)
    logical = tensor.transpose(0, 1)
    assert segments(logical) == [
        Segment(tensor.data_ptr(), PAGE, HALF),
        Segment(tensor[0, 1].data_ptr(), PAGE, HALF),
    ]


def test_blocks_may_lie_apart():
    tensor = torch.empty(N, 3, 2, BLOCK_SIZE, HEADS, HEAD_SIZE)[:, 1]
    assert segments(tensor) == [Segment(tensor.data_ptr(), 3 * PAGE, PAGE)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int8])
def test_sizes_are_in_bytes_whatever_the_dtype(dtype):
    tensor = torch.empty(N, 2, BLOCK_SIZE, HEADS, HEAD_SIZE, dtype=dtype)
    page = 2 * BLOCK_SIZE * HEADS * HEAD_SIZE * dtype.itemsize
    assert segments(tensor, page_bytes=page) == [Segment(tensor.data_ptr(), page, page)]


ODD = {
    "padded inside a block": torch.empty(N, 2, BLOCK_SIZE, HEADS, HEAD_SIZE + 4)[..., :HEAD_SIZE],
    "larger than a page": torch.empty(N, 2, BLOCK_SIZE, HEADS, HEAD_SIZE + 4),
    "smaller than a page": torch.empty(N, 1, BLOCK_SIZE, HEADS, HEAD_SIZE),
    "too many blocks": torch.empty(N + 1, 2, BLOCK_SIZE, HEADS, HEAD_SIZE),
    "too few blocks": torch.empty(N - 1, 2, BLOCK_SIZE, HEADS, HEAD_SIZE),
    "three parts first": torch.empty(3, N, BLOCK_SIZE, HEADS, HEAD_SIZE),
    "one block over the others": torch.empty(1, 2, BLOCK_SIZE, HEADS, HEAD_SIZE).expand(
        N, 2, BLOCK_SIZE, HEADS, HEAD_SIZE
    )[:, :, :, :1],
    "keys of all blocks and then values": torch.empty(2, N, BLOCK_SIZE, HEADS, HEAD_SIZE).transpose(
        0, 1
    ),
    "kernel blocks apart": torch.empty(2 * N, 2, 2, BLOCK_SIZE // 2, HEADS, HEAD_SIZE)[:, 0],
    "another dtype": torch.empty(N, 2, BLOCK_SIZE, HEADS, HEAD_SIZE, dtype=torch.float64),
    "no dimensions": torch.empty(()),
    "one dimension too few": torch.empty(N),
}


@pytest.mark.parametrize("tensor", ODD.values(), ids=ODD)
def test_what_does_not_add_up_is_an_error_that_says_all_there_is_to_say(tensor):
    with pytest.raises(ValueError, match=r"layer 'some\.layer' does not add up") as caught:
        segments(tensor)
    text = str(caught.value)
    assert f"shape {tuple(tensor.shape)}" in text
    assert f"strides {tensor.stride()}" in text
    assert str(tensor.dtype) in text
    assert f"{N} blocks" in text
    assert f"{PAGE}-byte pages" in text


def test_a_page_that_the_config_pads_is_an_error():
    spec = dataclasses.replace(SPEC, page_size_padded=PAGE + 64)
    tensor = torch.empty(N, 2, BLOCK_SIZE, HEADS, HEAD_SIZE)
    with pytest.raises(ValueError, match=f"not {N} blocks of contiguous {PAGE + 64}-byte pages"):
        CacheLayout.of({"a": tensor}, kv_cache_config(["a"], spec=spec))


# ---- several layers ----


def cache(**kwargs):
    return torch.empty(N, 2, BLOCK_SIZE, HEADS, HEAD_SIZE, **kwargs)


def test_a_layer_without_a_cache_is_an_error():
    with pytest.raises(ValueError, match=re.escape("no KV cache was registered for layer 'b'")):
        CacheLayout.of({"a": cache()}, kv_cache_config(["a", "b"]))


def test_caches_that_nobody_groups_are_none_of_ours():
    tensor = cache()
    layout = CacheLayout.of({"a": tensor, "other": cache()}, kv_cache_config(["a"]))
    assert layout.groups == [[Segment(tensor.data_ptr(), PAGE, PAGE)]]
    assert layout.regions == [(tensor.data_ptr(), tensor.nbytes)]


def test_layers_of_a_group_have_a_segment_each():
    caches = {"a": cache(), "b": cache()}
    layout = CacheLayout.of(caches, kv_cache_config(["a", "b"]))
    assert layout.groups == [[Segment(t.data_ptr(), PAGE, PAGE) for t in caches.values()]]
    assert layout.block_bytes == 2 * PAGE
    assert layout.bind(1 << 20, 3).block_bytes(0) == 2 * PAGE


def test_layers_of_one_group_with_the_same_memory_are_one_segment():
    tensor = cache()
    layout = CacheLayout.of({"a": tensor, "b": tensor}, kv_cache_config(["a", "b"]))
    assert layout.groups == [[Segment(tensor.data_ptr(), PAGE, PAGE)]]
    assert layout.block_bytes == PAGE


def test_groups_with_the_same_memory_share_their_host_memory_too():
    tensor = cache()
    config = kv_cache_config(["a"], ["b"])
    layout = CacheLayout.of({"a": tensor, "b": tensor.view(tensor.shape)}, config)
    segment = Segment(tensor.data_ptr(), PAGE, PAGE)
    assert layout.groups == [[segment], [segment]]
    assert layout.regions == [(tensor.data_ptr(), tensor.nbytes)]
    assert layout.block_bytes == PAGE
    assert layout.host_bytes(5) == 5 * PAGE


def test_layers_side_by_side_in_one_storage_are_segments_of_one_region():
    storage = torch.empty(N, 2, 2, BLOCK_SIZE, HEADS, HEAD_SIZE)
    caches = {"a": storage[:, 0], "b": storage[:, 1]}
    layout = CacheLayout.of(caches, kv_cache_config(["a", "b"]))
    assert layout.groups == [[Segment(t.data_ptr(), 2 * PAGE, PAGE) for t in caches.values()]]
    assert layout.regions == [(storage.data_ptr(), storage.nbytes)]


def test_host_segments_start_on_cache_lines_and_do_not_overlap():
    # 12 bytes per block: 5 blocks are 60 bytes, rounded up to 64.
    spec = FullAttentionSpec(block_size=1, num_kv_heads=1, head_size=3, dtype=torch.int16)
    caches = {layer: torch.empty(N, 6, dtype=torch.int16) for layer in "abc"}
    layout = CacheLayout.of(caches, kv_cache_config(list("abc"), spec=spec))
    assert layout.host_bytes(5) == 3 * 64
    bound = layout.bind(1 << 20, 5)
    pairs = torch.tensor([[0, 1, 1], [0, 2, 2], [0, 3, 3], [0, 4, 4], [0, 5, 5]])
    _, hosts, sizes = bound.descriptors("d2h", pairs.numpy().astype("uint32"))
    assert sorted(hosts.tolist()) == [(1 << 20) + i * 64 for i in range(3)]
    assert sizes.tolist() == [60, 60, 60]


def test_blocks_beyond_the_cache_or_the_pool_are_refused():
    bound = CacheLayout.of({"a": cache()}, kv_cache_config(["a"])).bind(1 << 20, 3)
    for device, host in [(0, 1), (N, 1), (1, 0), (1, 4)]:
        pairs = torch.tensor([[0, device, host]]).numpy().astype("uint32")
        with pytest.raises(AddressError):
            bound.descriptors("d2h", pairs)


def test_a_strided_view_that_ends_before_its_storage_stays_inside():
    storage = torch.empty(N * 3 - 1, 2, BLOCK_SIZE, HEADS, HEAD_SIZE)
    tensor = storage.as_strided(
        (N, 2, BLOCK_SIZE, HEADS, HEAD_SIZE), (3 * storage.stride(0), *storage.stride()[1:])
    )
    layout = CacheLayout.of({"a": tensor}, kv_cache_config(["a"]))
    assert layout.bind(1 << 20, 3).block_bytes(0) == PAGE
