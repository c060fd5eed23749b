"""Registered KV caches to the byte layout of a block.

A block of a KV cache group consists of segments: ``bytes`` contiguous bytes at
``address + block * stride``, one or two per layer. They are computed from the tensors'
shapes and strides and checked against the page size that the KV cache config promises;
what does not add up is an error, never a guess.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from preempt_offload._core import BlockLayout

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from vllm.v1.kv_cache_interface import KVCacheConfig

# A host segment starts on a cache line of its own.
_ALIGNMENT = 64


@dataclasses.dataclass(frozen=True)
class Segment:
    """``size`` contiguous bytes of every block, ``stride`` bytes apart from block 0 on."""

    address: int
    stride: int
    size: int


def segments_of(
    layer: str, tensor: torch.Tensor, *, num_blocks: int, page_bytes: int
) -> list[Segment]:
    """The segments of one layer's KV cache.

    Args:
        layer: Its name, for errors.
        tensor: Blocks first, or K and V first and blocks second. The blocks' dimension
            may be a multiple of ``num_blocks`` where a kernel uses smaller blocks.
        num_blocks: Scheduler blocks in the cache.
        page_bytes: Bytes of one block of this layer, as the KV cache config has it.

    Raises:
        ValueError: The tensor does not consist of such blocks.
    """
    shape, strides, item = tuple(tensor.shape), tensor.stride(), tensor.element_size()
    for parts, block_dim in ((1, 0), (2, 1)):
        if len(shape) <= block_dim or shape[block_dim] % num_blocks:
            continue
        if parts == 2 and shape[0] != 2:
            continue
        inner = shape[block_dim + 1 :]
        per_block = shape[block_dim] // num_blocks
        size = per_block * item
        for extent in inner:
            size *= extent
        dims = zip((per_block, *inner), strides[block_dim:], strict=True)
        dense = _span([(extent, stride * item) for extent, stride in dims], item) == size
        if size * parts == page_bytes and dense:
            stride = strides[block_dim] * item * per_block
            first = tensor.data_ptr()
            return [
                Segment(first + part * strides[0] * item * (parts - 1), stride, size)
                for part in range(parts)
            ]
    raise ValueError(
        f"KV cache of layer {layer!r} does not add up: shape {shape}, strides {strides} of "
        f"{tensor.dtype} is not {num_blocks} blocks of contiguous {page_bytes}-byte pages"
    )


def _span(dims: list[tuple[int, int]], item: int) -> int:
    """Bytes from the first to the last element, for extents and strides in bytes."""
    return item + sum((extent - 1) * stride for extent, stride in dims)


@dataclasses.dataclass(frozen=True)
class CacheLayout:
    """The segments of every KV cache group and the memory they lie in.

    Attributes:
        num_blocks: Scheduler blocks in the cache, null block included.
        groups: Segments of each group. Groups that share memory have equal segments.
        regions: ``(address, bytes)`` of the storages behind the caches.
    """

    num_blocks: int
    groups: list[list[Segment]]
    regions: list[tuple[int, int]]

    @classmethod
    def of(
        cls, kv_caches: Mapping[str, torch.Tensor], kv_cache_config: KVCacheConfig
    ) -> CacheLayout:
        """The layout of the caches that vLLM registers, by layer name.

        Raises:
            ValueError: A layer is missing, or its cache does not add up.
        """
        groups = []
        regions = {}
        for group in kv_cache_config.kv_cache_groups:
            segments: dict[Segment, None] = {}
            for layer in group.layer_names:
                if layer not in kv_caches:
                    raise ValueError(f"no KV cache was registered for layer {layer!r}")
                tensor = kv_caches[layer]
                found = segments_of(
                    layer,
                    tensor,
                    num_blocks=kv_cache_config.num_blocks,
                    page_bytes=group.kv_cache_spec.page_size_bytes,
                )
                segments.update(dict.fromkeys(found))
                storage = tensor.untyped_storage()
                regions[storage.data_ptr()] = storage.nbytes()
            groups.append(list(segments))
        return cls(kv_cache_config.num_blocks, groups, list(regions.items()))

    @property
    def block_bytes(self) -> int:
        """Bytes that one host block takes: every distinct segment once."""
        return sum(segment.size for segment in set().union(*map(set, self.groups)))

    def host_bytes(self, num_host_blocks: int) -> int:
        """Bytes to allocate for ``num_host_blocks`` host blocks."""
        return self._host_offsets(num_host_blocks)[1]

    def bind(self, host_address: int, num_host_blocks: int) -> BlockLayout:
        """The layout together with a host pool at ``host_address``."""
        offsets, total = self._host_offsets(num_host_blocks)
        segments = [
            (group, s.address, s.stride, s.size, host_address + offsets[s])
            for group, segments in enumerate(self.groups)
            for s in segments
        ]
        return BlockLayout(
            self.num_blocks, num_host_blocks, segments, self.regions, [(host_address, total)]
        )

    def _host_offsets(self, num_host_blocks: int) -> tuple[dict[Segment, int], int]:
        """Where the blocks of each segment begin in the host pool, and its size."""
        offsets: dict[Segment, int] = {}
        end = 0
        for segment in (segment for group in self.groups for segment in group):
            if segment not in offsets:
                offsets[segment] = end
                end += -(-segment.size * num_host_blocks // _ALIGNMENT) * _ALIGNMENT
        return offsets, end
