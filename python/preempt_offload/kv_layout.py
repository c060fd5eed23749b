"""Registered KV caches to the byte layout of a block.

A block of a KV cache group consists of segments: ``size`` contiguous bytes at
``address + block * stride``. They follow from the shapes and strides of the tensors that
vLLM registers, and have to add up to the page size that the KV cache config promises;
what does not is an error, never a guess.

Groups may overlay each other in device memory, because a block belongs to one group at a
time. The same goes for host blocks, so one takes no more than the largest group needs.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

from preempt_offload._core import BlockLayout

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from typing import TypeAlias

    import torch
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

    # What vLLM registers for a layer: a tensor, or several where K and V or the states of a
    # layer are tensors of their own.
    LayerCache: TypeAlias = torch.Tensor | Sequence[torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Segment:
    """``size`` contiguous bytes of every block, ``stride`` bytes apart from block 0 on."""

    address: int
    stride: int
    size: int

    def ends_at(self, other: Segment) -> bool:
        """Whether ``other`` goes on where this one ends, in the same block."""
        together = self.stride == other.stride and self.address + self.size == other.address
        return together and self.size + other.size <= self.stride

    def overlaps(self, other: Segment, num_blocks: int) -> bool:
        """Whether blocks of the two, among the first ``num_blocks``, may share bytes."""
        low, high = sorted((self, other), key=lambda segment: segment.address)
        if low.address + (num_blocks - 1) * low.stride + low.size <= high.address:
            return False
        if low.stride != high.stride or num_blocks == 1:
            return True
        gap = (high.address - low.address) % low.stride
        return gap < low.size or gap + high.size > low.stride


def parts_of(cache: LayerCache) -> Sequence[torch.Tensor]:
    """The tensors of a layer's KV cache."""
    return cache if isinstance(cache, tuple | list) else (cache,)


# Ascend's formats whose memory is what the shape and the strides say: NCHW, NHWC, ND and NCDHW.
# Plain tensors of four dimensions have the first, and those of five the last.
_PLAIN_NPU_FORMATS = (0, 1, 2, 30)


def check_formats(kv_caches: Mapping[str, LayerCache]) -> None:
    """Refuses tensors that are kept in memory in another order than their strides say.

    Raises:
        ValueError: A tensor on an NPU has a private format, FRACTAL_NZ for example.
    """
    for layer, cache in kv_caches.items():
        for part in parts_of(cache):
            if part.device.type == "npu":
                import torch_npu  # type: ignore[import-not-found]

                if (kind := torch_npu.get_npu_format(part)) not in _PLAIN_NPU_FORMATS:
                    raise ValueError(
                        f"the KV cache of layer {layer!r} has NPU format {kind}, in which a block "
                        "is not contiguous bytes; preempt-offload needs ND (2). Turn off what "
                        "keeps KV caches in FRACTAL_NZ"
                    )


def segments_of(
    layer: str, cache: LayerCache, spec: KVCacheSpec, *, num_blocks: int
) -> list[Segment]:
    """The segments of one layer's KV cache.

    Args:
        layer: Its name, for errors.
        cache: Tensors of which each has the blocks in its first dimension, or K and V in
            the first and the blocks in the second. The blocks' dimension may be a multiple
            of ``num_blocks`` where a kernel uses smaller blocks.
        spec: What the KV cache config says of the layer. If it pads the pages, the padding
            belongs to no segment: nothing reads it.
        num_blocks: Scheduler blocks in the cache.

    Raises:
        ValueError: The tensors do not consist of such pages, or could in two ways.
    """
    page_bytes, unpadded_bytes = spec.page_size_bytes, _unpadded_bytes(spec)
    found = set()
    for reading in itertools.product(*(_readings(part, num_blocks) for part in parts_of(cache))):
        segments = _merged(itertools.chain(*reading))
        adds_up = _num_bytes(segments) in (page_bytes, unpadded_bytes)
        if adds_up and not _overlapping(segments, num_blocks):
            found.add(tuple(segments))
    if len(found) != 1:
        tensors = ", ".join(
            f"shape {tuple(part.shape)}, strides {part.stride()} of {part.dtype}"
            for part in parts_of(cache)
        )
        padding = f" ({unpadded_bytes} without padding)" if unpadded_bytes != page_bytes else ""
        raise ValueError(
            f"KV cache of layer {layer!r} does not add up: {tensors} is "
            f"{'in more than one way' if found else 'not'} {num_blocks} blocks of "
            f"{page_bytes}-byte pages{padding}"
        )
    return list(found.pop())


def _unpadded_bytes(spec: KVCacheSpec) -> int:
    """Bytes of a page without the padding that makes it as large as those of other layers."""
    padding: dict[str, Any] = {
        field: None for field in ("page_size_padded", "alignment") if hasattr(spec, field)
    }
    return int(dataclasses.replace(spec, **padding).page_size_bytes)


def _readings(tensor: torch.Tensor, num_blocks: int) -> Iterator[list[Segment]]:
    """A block of ``tensor`` for each dimension that the blocks may be in."""
    item = tensor.element_size()
    for block_dim in range(min(tensor.dim(), 2)):
        dims = [(n, step * item) for n, step in zip(tensor.shape, tensor.stride(), strict=True)]
        extent, step = dims.pop(block_dim)
        if extent % num_blocks or (block_dim == 1 and tensor.shape[0] != 2):
            continue
        dims.append((extent // num_blocks, step))
        # From the innermost dimension outwards: as long as there are no gaps, it is one run.
        starts, size = [tensor.data_ptr()], item
        for n, inner_step in sorted(dims, key=lambda dim: dim[1]):
            if inner_step == size:
                size *= n
            elif n != 1:
                starts = [start + i * inner_step for start in starts for i in range(n)]
        yield [Segment(start, step * (extent // num_blocks), size) for start in starts]


def _num_bytes(segments: Iterable[Segment]) -> int:
    return sum(segment.size for segment in segments)


def _overlapping(segments: Sequence[Segment], num_blocks: int) -> tuple[Segment, Segment] | None:
    """Two segments whose blocks share bytes, or one twice that does with itself."""
    for segment in segments:
        if segment.size > segment.stride and num_blocks > 1:
            return segment, segment
    pairs = itertools.combinations(segments, 2)
    return next((pair for pair in pairs if pair[0].overlaps(pair[1], num_blocks)), None)


def _merged(segments: Iterable[Segment]) -> list[Segment]:
    """The same bytes in as few segments as possible."""
    merged: list[Segment] = []
    for segment in sorted(segments, key=lambda segment: (segment.stride, segment.address)):
        if merged and merged[-1].ends_at(segment):
            last = merged.pop()
            segment = dataclasses.replace(last, size=last.size + segment.size)
        merged.append(segment)
    return merged


@dataclasses.dataclass(frozen=True)
class CacheLayout:
    """The segments of every KV cache group and the memory they lie in.

    Attributes:
        num_blocks: Scheduler blocks in the cache, null block included.
        groups: Segments of each group, the largest first; none where this rank has no
            layers of it.
        storages: What is behind the caches.
    """

    num_blocks: int
    groups: list[list[Segment]]
    storages: list[torch.UntypedStorage]

    @classmethod
    def of(cls, kv_caches: Mapping[str, LayerCache], kv_cache_config: KVCacheConfig) -> CacheLayout:
        """The layout of the caches that vLLM registers, by layer name.

        Raises:
            ValueError: A layer is missing, its cache does not add up, or two layers of a
                group share some of their bytes.
        """
        num_blocks = kv_cache_config.num_blocks
        groups = []
        storages = {}
        for group in kv_cache_config.kv_cache_groups:
            # Layers that use another one's cache have the same segments.
            layer_of: dict[Segment, str] = {}
            # Layers of a group may have pages of different sizes; then each has its own spec.
            specs = getattr(group.kv_cache_spec, "kv_cache_specs", {})
            for layer in group.layer_names:
                if layer not in kv_caches:
                    raise ValueError(f"no KV cache was registered for layer {layer!r}")
                cache, spec = kv_caches[layer], specs.get(layer, group.kv_cache_spec)
                found = segments_of(layer, cache, spec, num_blocks=num_blocks)
                layer_of.update(dict.fromkeys(found, layer))
                for part in parts_of(cache):
                    storage = part.untyped_storage()
                    storages[storage.data_ptr()] = storage
            if pair := _overlapping(list(layer_of), num_blocks):
                first, second = (f"{layer_of[segment]!r} ({segment})" for segment in pair)
                raise ValueError(f"KV caches of layers {first} and {second} share bytes")
            groups.append(sorted(_merged(layer_of), key=lambda segment: -segment.size))
        return cls(num_blocks, groups, list(storages.values()))

    @property
    def regions(self) -> list[tuple[int, int]]:
        """``(address, bytes)`` of the storages."""
        return [(storage.data_ptr(), storage.nbytes()) for storage in self.storages]

    @property
    def block_bytes(self) -> int:
        """Bytes that one host block takes: those of a block of the largest group."""
        return _num_bytes(self._largest_group)

    @property
    def _largest_group(self) -> list[Segment]:
        return max(self.groups, key=_num_bytes, default=[])

    def column_bytes(self, num_host_blocks: int) -> list[int]:
        """Bytes to allocate for each column of a pool of ``num_host_blocks``; see ``bind``."""
        return [segment.size * num_host_blocks for segment in self._largest_group]

    def bind(self, pool: int | Sequence[int], num_host_blocks: int) -> BlockLayout:
        """The layout together with a host pool.

        The pool consists of columns, one for each segment of the largest group, with that
        part of every host block. They are arrays, so that neighbours on both sides are one
        long copy. The other groups' segments fill the same columns one after the other, and
        are cut where a column ends.

        Args:
            pool: The address of each column, or of the first if they follow one another.
            num_host_blocks: Blocks of the pool.
        """
        sizes = self.column_bytes(num_host_blocks)
        if isinstance(pool, int):
            pool = list(itertools.accumulate(sizes[:-1], initial=pool)) if sizes else []
        ends = itertools.accumulate((segment.size for segment in self._largest_group), initial=0)
        columns = list(zip(itertools.pairwise(ends), pool, strict=True))
        pieces = []
        for group, segments in enumerate(self.groups):
            first = 0
            for segment in segments:
                for (start, end), column in columns:
                    begin, stop = max(start, first), min(end, first + segment.size)
                    if begin < stop:
                        device = segment.address + begin - first
                        host = column + begin - start
                        piece = (device, segment.stride, stop - begin, host, end - start)
                        pieces.append((group, *piece))
                first += segment.size
        return BlockLayout(
            self.num_blocks,
            num_host_blocks,
            len(self.groups),
            pieces,
            self.regions,
            list(zip(pool, sizes, strict=True)),
        )
