import dataclasses
import re
from math import prod

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
)
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config
from vllm.v1.kv_cache_interface import (
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
)

from preempt_offload import compat
from preempt_offload._core import AddressError
from preempt_offload.kv_layout import CacheLayout, Segment, segments_of

N = 8
PAGE = SPEC.page_size_bytes
HALF = PAGE // 2
STATE_BYTES = 3 * 8 * 4 + 5 * 16 * 2


def segments(cache, num_blocks=N, spec=SPEC):
    return segments_of("some.layer", cache, spec, num_blocks=num_blocks)


def cache(*, num_blocks=N, **kwargs):
    return torch.empty(num_blocks, 2, BLOCK_SIZE, HEADS, HEAD_SIZE, **kwargs)


# ---- one tensor ----


def test_the_shape_of_the_cpu_engine_is_one_segment():
    tensor = torch.empty(N, HEADS, BLOCK_SIZE, 2 * HEAD_SIZE)
    assert segments(tensor) == [Segment(tensor.data_ptr(), PAGE, PAGE)]


def test_blocks_first_is_one_segment():
    tensor = cache()
    assert segments(tensor) == [Segment(tensor.data_ptr(), PAGE, PAGE)]


def test_keys_and_values_first_are_two_segments():
    tensor = torch.empty(2, N, BLOCK_SIZE, HEADS, HEAD_SIZE)
    assert segments(tensor) == [Segment(part.data_ptr(), HALF, HALF) for part in tensor]


@pytest.mark.parametrize("multiple", [2, 4])
def test_kernel_blocks_may_be_smaller_than_ours(multiple):
    tensor = torch.empty(N * multiple, 2, BLOCK_SIZE // multiple, HEADS, HEAD_SIZE)
    assert segments(tensor) == [Segment(tensor.data_ptr(), PAGE, PAGE)]


def test_kernel_blocks_may_be_smaller_with_keys_and_values_first():
    tensor = torch.empty(2, N * 4, BLOCK_SIZE // 4, HEADS, HEAD_SIZE)
    assert segments(tensor) == [Segment(part.data_ptr(), HALF, HALF) for part in tensor]


def test_kernel_blocks_may_lie_apart():
    tensor = torch.empty(2 * N, 2, 2, BLOCK_SIZE // 2, HEADS, HEAD_SIZE)[:, 0]
    starts = [tensor[i].data_ptr() for i in range(2)]
    assert segments(tensor) == [Segment(start, 2 * PAGE, HALF) for start in starts]


@pytest.mark.parametrize("order", [(0, 1, 3, 2, 4), (0, 3, 1, 2, 4), (0, 4, 3, 2, 1)])
def test_dimensions_inside_a_block_may_be_in_any_order(order):
    sizes = [N, 2, BLOCK_SIZE, HEADS, HEAD_SIZE]
    tensor = torch.empty([sizes[d] for d in order])
    logical = tensor.permute([order.index(d) for d in range(5)])
    assert tuple(logical.shape) == tuple(sizes)
    assert not logical.is_contiguous()
    assert segments(logical) == [Segment(tensor.data_ptr(), PAGE, PAGE)]


def test_keys_and_values_first_may_lie_side_by_side_in_each_block():
    tensor = cache()
    assert segments(tensor.transpose(0, 1)) == [Segment(tensor.data_ptr(), PAGE, PAGE)]


def test_blocks_first_may_have_all_keys_before_the_values():
    tensor = torch.empty(2, N, BLOCK_SIZE, HEADS, HEAD_SIZE)
    expected = [Segment(part.data_ptr(), HALF, HALF) for part in tensor]
    assert segments(tensor.transpose(0, 1)) == expected


def test_heads_outside_the_blocks_are_a_segment_each():
    tensor = torch.empty(HEADS, N, 2, BLOCK_SIZE, HEAD_SIZE)
    expected = [Segment(head.data_ptr(), PAGE // HEADS, PAGE // HEADS) for head in tensor]
    assert segments(tensor.permute(1, 2, 3, 0, 4)) == expected


def test_blocks_may_lie_apart():
    tensor = torch.empty(N, 3, 2, BLOCK_SIZE, HEADS, HEAD_SIZE)[:, 1]
    assert segments(tensor) == [Segment(tensor.data_ptr(), 3 * PAGE, PAGE)]


def test_gaps_inside_a_block_belong_to_no_segment():
    tensor = torch.empty(N, 2, BLOCK_SIZE, HEADS + 1, HEAD_SIZE)[..., :HEADS, :]
    token = HEADS * HEAD_SIZE * 4
    starts = [tensor[0, kv, t].data_ptr() for kv in range(2) for t in range(BLOCK_SIZE)]
    assert segments(tensor) == [Segment(start, 3 * PAGE // 2, token) for start in starts]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int8])
def test_sizes_are_in_bytes_whatever_the_dtype(dtype):
    tensor = cache(dtype=dtype)
    page = 2 * BLOCK_SIZE * HEADS * HEAD_SIZE * dtype.itemsize
    spec = dataclasses.replace(SPEC, dtype=dtype)
    assert segments(tensor, spec=spec) == [Segment(tensor.data_ptr(), page, page)]


# ---- several tensors for a layer ----


def test_keys_and_values_may_be_tensors_of_their_own():
    parts = [torch.empty(N * 2, BLOCK_SIZE // 2, HEADS, HEAD_SIZE) for _ in "kv"]
    expected = {Segment(part.data_ptr(), HALF, HALF) for part in parts}
    for made in (tuple, list):
        assert set(segments(made(parts))) == expected


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseSpec(MLAAttentionSpec):
    """A latent vector and a rotary part for each token, and quantized indexer keys with a scale."""

    @property
    def page_size_bytes(self):
        return self.block_size * (16 * 2 + 8 * 2 + 8 + 2)


def test_the_parts_of_a_layer_may_differ_in_shape_and_dtype():
    spec = SparseSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=24, dtype=torch.bfloat16)
    kinds = [(16, torch.bfloat16), (8, torch.bfloat16), (8, torch.int8), (1, torch.float16)]
    parts = [torch.empty(N, BLOCK_SIZE, 1, width, dtype=dtype) for width, dtype in kinds]
    sizes = [part[0].nbytes for part in parts]
    expected = {Segment(p.data_ptr(), size, size) for p, size in zip(parts, sizes, strict=True)}
    assert set(segments(tuple(parts), spec=spec)) == expected
    with pytest.raises(ValueError, match=f"{spec.page_size_bytes}-byte pages"):
        segments(tuple(parts[:3]), spec=spec)


# ---- pages with padding ----


def states(storage, offset=0):
    """The states of a layer, one behind the other in each page of ``storage``."""
    tensors = []
    for shape, dtype in zip(STATES.shapes, STATES.dtypes, strict=True):
        whole = storage.view(dtype)
        strides = (PAGE // dtype.itemsize, *torch.empty(shape).stride())
        tensors.append(whole.as_strided((N, *shape), strides, offset // dtype.itemsize))
        offset += prod(shape) * dtype.itemsize
    return tensors


def test_states_side_by_side_in_a_padded_page_are_one_segment():
    storage = torch.empty(N * PAGE, dtype=torch.int8)
    assert segments(states(storage), spec=STATES) == [
        Segment(storage.data_ptr(), PAGE, STATE_BYTES)
    ]


def test_states_in_one_tensor_of_bytes_are_the_same_segment():
    storage = torch.empty(N * PAGE, dtype=torch.int8)
    tensor = storage.as_strided((N, 1, 1, STATE_BYTES), (PAGE, STATE_BYTES, STATE_BYTES, 1))
    assert segments(tensor, spec=STATES) == segments(states(storage), spec=STATES)


def test_a_tensor_may_have_the_padding_too():
    tensor = torch.empty(N, PAGE, dtype=torch.int8)
    assert segments(tensor, spec=STATES) == [Segment(tensor.data_ptr(), PAGE, PAGE)]


def test_padding_may_be_anywhere_but_in_the_page():
    # As where K and V of padded pages are arrays behind all of the padding.
    spec = dataclasses.replace(SPEC, page_size_padded=PAGE + 64)
    storage = torch.empty(N * spec.page_size_bytes, dtype=torch.int8)
    keys, values = storage[N * 64 :].view(torch.float32).view(2, N, BLOCK_SIZE, HEADS, HEAD_SIZE)
    expected = [Segment(part.data_ptr(), HALF, HALF) for part in (keys, values)]
    assert segments((keys, values), spec=spec) == expected


def test_pages_may_be_padded_for_their_alignment():
    spec = MLAAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=1, head_size=5, dtype=torch.float32, alignment=512
    )
    assert spec.page_size_bytes == 512
    tensor = torch.empty(N, 128)[:, : BLOCK_SIZE * 5].view(N, BLOCK_SIZE, 5)
    assert segments(tensor, spec=spec) == [Segment(tensor.data_ptr(), 512, 320)]


# ---- what does not add up ----

ODD = {
    "larger than a page": torch.empty(N, 2, BLOCK_SIZE, HEADS, HEAD_SIZE + 4),
    "smaller than a page": torch.empty(N, 1, BLOCK_SIZE, HEADS, HEAD_SIZE),
    "too many blocks": cache(num_blocks=N + 1),
    "too few blocks": cache(num_blocks=N - 1),
    "three parts first": torch.empty(3, N, BLOCK_SIZE, HEADS, HEAD_SIZE),
    "blocks third": torch.empty(2, HEADS, N, BLOCK_SIZE, HEAD_SIZE),
    "one block over the others": cache(num_blocks=1).expand(N, -1, -1, -1, -1),
    "one token over the others": torch.empty(N, 2, 1, HEADS, HEAD_SIZE).expand(
        -1, -1, BLOCK_SIZE, -1, -1
    ),
    "blocks that overlap": torch.empty(N * PAGE).as_strided((N, PAGE // 4), (PAGE // 4 - 1, 1)),
    "another dtype": cache(dtype=torch.float64),
    "no dimensions": torch.empty(()),
    "one dimension too few": torch.empty(N),
    "no bytes": torch.empty(0, 2, BLOCK_SIZE, HEADS, HEAD_SIZE),
    "keys without values": (torch.empty(N, BLOCK_SIZE, HEADS, HEAD_SIZE),),
    "values too many": tuple(torch.empty(3, N, BLOCK_SIZE, HEADS, HEAD_SIZE)),
    "keys that are the values": (torch.empty(N, BLOCK_SIZE, HEADS, HEAD_SIZE),) * 2,
    "no tensors": (),
}


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_what_does_not_add_up_is_an_error_that_says_all_there_is_to_say(odd):
    with pytest.raises(ValueError, match=r"layer 'some\.layer' does not add up") as caught:
        segments(odd)
    text = str(caught.value)
    for tensor in odd if isinstance(odd, tuple) else (odd,):
        assert f"shape {tuple(tensor.shape)}" in text
        assert f"strides {tensor.stride()}" in text
        assert str(tensor.dtype) in text
    assert f"{N} blocks of {PAGE}-byte pages" in text


def test_padding_that_the_config_does_not_have_is_an_error():
    tensor = torch.empty(N, 2, BLOCK_SIZE, HEADS, HEAD_SIZE)
    spec = dataclasses.replace(SPEC, num_kv_heads=2 * HEADS, page_size_padded=2 * PAGE + 64)
    expected = f"{N} blocks of {2 * PAGE + 64}-byte pages ({2 * PAGE} without padding)"
    with pytest.raises(ValueError, match=re.escape(expected)):
        segments(tensor, spec=spec)


def test_a_shape_that_can_be_read_in_two_ways_is_an_error():
    with pytest.raises(ValueError, match=r"does not add up: .* is in more than one way 2 blocks"):
        segments(cache(num_blocks=2), num_blocks=2)


# ---- several layers ----


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
    [group] = layout.groups
    assert set(group) == {Segment(t.data_ptr(), PAGE, PAGE) for t in caches.values()}
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
    assert sum(layout.column_bytes(5)) == 5 * PAGE


def test_layers_side_by_side_in_each_block_are_one_segment():
    storage = torch.empty(N, 3, 2, BLOCK_SIZE, HEADS, HEAD_SIZE)
    caches = {layer: storage[:, i] for i, layer in enumerate("abc")}
    layout = CacheLayout.of(caches, kv_cache_config(["b", "a"], ["c"]))
    first, second = Segment(storage.data_ptr(), 3 * PAGE, 2 * PAGE), caches["c"].data_ptr()
    assert layout.groups == [[first], [Segment(second, 3 * PAGE, PAGE)]]
    assert layout.regions == [(storage.data_ptr(), storage.nbytes)]


def test_layers_one_behind_the_other_in_one_storage_are_segments_of_one_region():
    storage = torch.empty(2, N, 2, BLOCK_SIZE, HEADS, HEAD_SIZE)
    layout = CacheLayout.of(dict(zip("ab", storage, strict=True)), kv_cache_config(["a", "b"]))
    assert layout.groups == [[Segment(layer.data_ptr(), PAGE, PAGE) for layer in storage]]
    assert layout.regions == [(storage.data_ptr(), storage.nbytes)]


@pytest.mark.parametrize(
    "second",
    [
        lambda storage: storage.view(-1)[PAGE // 8 :][: N * PAGE // 4].view(N, -1),
        lambda storage: storage[1 : N + 1],
        lambda storage: storage.view(-1).as_strided((N, PAGE // 4), (PAGE // 2, 1)),
    ],
    ids=["half a page on", "a block on", "with other strides"],
)
def test_layers_of_a_group_that_share_some_bytes_are_an_error(second):
    storage = torch.empty(2 * N, PAGE // 4)
    caches = {"a": storage[:N], "b": second(storage)}
    with pytest.raises(ValueError, match=r"KV caches of layers 'a' \(.*\) and 'b' .* share bytes"):
        CacheLayout.of(caches, kv_cache_config(["a", "b"]))
    # Of two groups they may: a block belongs to one of them at a time.
    assert CacheLayout.of(caches, kv_cache_config(["a"], ["b"])).block_bytes == PAGE


def test_small_segments_of_one_group_do_not_cut_those_of_another():
    attention, storage = cache(), torch.empty(N * PAGE, dtype=torch.int8)
    config = kv_cache_config(["a"], ["b"], spec=[SPEC, STATES])
    layout = CacheLayout.of({"a": attention, "b": states(storage)}, config)
    assert layout.block_bytes == PAGE
    bound = layout.bind(1 << 20, 5)
    run = torch.tensor([[0, b, b] for b in range(1, 4)]).numpy().astype("uint32")
    assert bound.descriptors("d2h", run)[2].tolist() == [3 * PAGE]
    for host in range(1, 6):
        assert host_ranges(layout, 1, host, 5) == [((host - 1) * PAGE, STATE_BYTES)]


def test_a_group_without_layers_on_this_rank_has_nothing_to_copy():
    tensor = cache()
    layout = CacheLayout.of({"a": tensor}, kv_cache_config([], ["a"], []))
    assert layout.groups == [[], [Segment(tensor.data_ptr(), PAGE, PAGE)], []]
    bound = layout.bind(1 << 20, 3)
    assert [bound.block_bytes(group) for group in range(3)] == [0, PAGE, 0]
    for group, copies in [(0, 0), (1, 1), (2, 0)]:
        pairs = torch.tensor([[group, 1, 1]]).numpy().astype("uint32")
        assert len(bound.descriptors("d2h", pairs)[0]) == copies
    with pytest.raises(AddressError, match=r"group 3 .* 0\.\.3"):
        bound.descriptors("d2h", torch.tensor([[3, 1, 1]]).numpy().astype("uint32"))


def test_a_layer_that_reaches_into_the_next_block_of_another_is_an_error():
    storage = torch.empty((2 * N + 1) * PAGE // 4)
    shape, strides = (N, PAGE // 4), (PAGE // 2, 1)
    caches = {"a": storage.as_strided(shape, strides)}
    caches["b"] = storage.as_strided(shape, strides, PAGE // 4)
    assert CacheLayout.of(caches, kv_cache_config(["a", "b"])).block_bytes == 2 * PAGE
    caches["b"] = storage.as_strided(shape, strides, PAGE // 4 + 1)
    with pytest.raises(ValueError, match="share bytes"):
        CacheLayout.of(caches, kv_cache_config(["a", "b"]))


# ---- host blocks ----


def host_ranges(layout, group, host, num_host_blocks, base=1 << 20):
    """``(offset, bytes)`` of the pieces of a host block."""
    pairs = torch.tensor([[group, 1, host]]).numpy().astype("uint32")
    _, addresses, sizes = layout.bind(base, num_host_blocks).descriptors("d2h", pairs)
    return sorted(zip((addresses - base).tolist(), sizes.tolist(), strict=True))


def test_a_host_block_is_as_large_as_the_largest_group_needs():
    spec = dataclasses.replace(SPEC, num_kv_heads=2 * HEADS)
    sizes = [[PAGE, PAGE], [2 * PAGE], [PAGE]]
    names = iter("abcd")
    groups = [{next(names): size for size in group} for group in sizes]
    caches = {
        layer: torch.empty(N, size, dtype=torch.int8)
        for group in groups
        for layer, size in group.items()
    }
    specs = [
        UniformTypeKVCacheSpecs(
            block_size=BLOCK_SIZE,
            kv_cache_specs={layer: SPEC if size == PAGE else spec for layer, size in group.items()},
        )
        for group in groups
    ]
    config = kv_cache_config(*groups, spec=specs, layout="BLHNC")
    layout = CacheLayout.of(caches, config)
    assert layout.block_bytes == 2 * PAGE
    assert sum(layout.column_bytes(5)) == 10 * PAGE
    # Two columns with a page of every host block; the second group's segment is in both.
    for host in range(1, 6):
        first, second = ((host - 1) * PAGE, PAGE), ((host + 4) * PAGE, PAGE)
        assert host_ranges(layout, 0, host, 5) == [first, second]
        assert host_ranges(layout, 1, host, 5) == [first, second]
        assert host_ranges(layout, 2, host, 5) == [first]


def test_neighbours_on_both_sides_are_one_copy_per_segment():
    caches = {layer: cache() for layer in "abc"}
    layout = CacheLayout.of(caches, kv_cache_config(["a", "b"], ["c"]))
    pairs = torch.tensor([[0, b, b] for b in range(1, 6)]).numpy().astype("uint32")
    sources, hosts, sizes = layout.bind(1 << 20, 5).descriptors("d2h", pairs)
    assert set(sources.tolist()) == {caches[layer][1].data_ptr() for layer in "ab"}
    assert sorted(hosts.tolist()) == [1 << 20, (1 << 20) + 5 * PAGE]
    assert sizes.tolist() == [5 * PAGE] * 2


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


# ---- what vLLM allocates ----


@pytest.mark.parametrize("case", CASES + BACKEND_CASES)
def test_the_budget_of_a_host_block_is_what_is_allocated_for_it(case):
    config, caches = case.make(N)
    layout = CacheLayout.of(caches, config)
    budget = compat.block_bytes(config)
    assert layout.block_bytes == max(map(sum, case.page_bytes(padded=False)))
    assert budget == max(map(sum, case.page_bytes(padded=True)))
    assert budget * N == sum(size for _, size in layout.regions)
    # The scheduler is not told the specs of single layers, and has to come to the same.
    assert compat.block_bytes(generate_scheduler_kv_cache_config([config])) == budget


@pytest.mark.parametrize("case", CASES)
def test_pages_side_by_side_are_few_segments(case):
    config, caches = case.make(N)
    layout = CacheLayout.of(caches, config)
    for group, segments in zip(config.kv_cache_groups, layout.groups, strict=True):
        heads = 1 if case.layout in ("separate", "LBHNC", "LBNHC") else 2 * HEADS
        assert 0 < len(segments) <= len(group.layer_names) * heads
