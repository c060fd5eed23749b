"""What several test modules need of vLLM's own classes."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.mla.flashmla import FlashMLABackend
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.worker import utils as worker_utils
from vllm.v1.worker.gpu import attn_utils

BLOCK_SIZE, HEADS, HEAD_SIZE = 16, 2, 8
SPEC = FullAttentionSpec(
    block_size=BLOCK_SIZE, num_kv_heads=HEADS, head_size=HEAD_SIZE, dtype=torch.float32
)

WINDOW = SlidingWindowSpec(
    block_size=BLOCK_SIZE,
    num_kv_heads=HEADS,
    head_size=HEAD_SIZE,
    dtype=torch.float32,
    sliding_window=32,
)
# A state of 3 x 8 floats and one of 5 x 16 half floats in pages as large as those of SPEC.
STATES = MambaSpec(
    block_size=BLOCK_SIZE,
    shapes=((3, 8), (5, 16)),
    dtypes=(torch.float32, torch.float16),
    page_size_padded=SPEC.page_size_bytes,
)

if hasattr(worker_utils, "allocate_kv_cache"):
    # All layers are in one allocation, in one of these orders.
    from vllm.v1.kv_cache_layout import KVCacheLayout

    LAYOUTS = [layout.name for layout in KVCacheLayout]
else:
    LAYOUTS = ["separate"]


@functools.cache
def _vllm_config():
    return VllmConfig()


def kv_cache_config(*groups, num_blocks=8, spec=SPEC, layout="LBNHC"):
    """The config that vLLM makes for groups of layer names.

    ``spec`` is that of all groups or a list with one for each.
    """
    specs = spec if isinstance(spec, list) else [spec] * len(groups)
    cache_config = _vllm_config().cache_config
    cache_config.num_gpu_blocks_override = num_blocks
    cache_config.kv_cache_layout = layout
    groups = [
        KVCacheGroupSpec(list(group), spec) for group, spec in zip(groups, specs, strict=True)
    ]
    return get_kv_cache_config_from_groups(_vllm_config(), groups, available_memory=0)


@dataclasses.dataclass
class Case:
    """Groups of layers with their specs, and an order that vLLM may lay them out in."""

    groups: list[dict[str, Any]]
    layout: str
    kernel_block_size: int = BLOCK_SIZE

    def make(self, num_blocks):
        """vLLM's config and the caches that its CPU worker registers, by layer."""
        specs = [next(iter(group.values())) for group in self.groups]
        if any(len(set(group.values())) > 1 for group in self.groups):
            specs = [UniformTypeKVCacheSpecs(BLOCK_SIZE, kv_cache_specs=g) for g in self.groups]
        config = kv_cache_config(
            *self.groups, num_blocks=num_blocks, spec=specs, layout=self.layout
        )
        return config, self._allocate(config)

    def page_bytes(self, *, padded):
        """Bytes of a page of each layer of each group."""
        unpadded = {} if padded else {"page_size_padded": None}
        return [
            [dataclasses.replace(spec, **unpadded).page_size_bytes for spec in group.values()]
            for group in self.groups
        ]

    def _allocate(self, config):
        cpu = torch.device("cpu")
        kernel_block_sizes = [
            BLOCK_SIZE if isinstance(group.kv_cache_spec, MambaSpec) else self.kernel_block_size
            for group in config.kv_cache_groups
        ]
        if self.layout != "separate":
            return worker_utils.allocate_kv_cache(
                config, cpu, KVCacheLayout[self.layout], kernel_block_sizes
            )
        attention_groups = []
        for i, group in enumerate(self.groups):
            for layer, spec in group.items():
                backend = (
                    FlashMLABackend if isinstance(spec, MLAAttentionSpec) else CPUAttentionBackend
                )
                attention_groups.append(worker_utils.AttentionGroup(backend, [layer], spec, i))
        raw = attn_utils._allocate_kv_cache(config, {}, cpu)
        return attn_utils._reshape_kv_cache(attention_groups, raw, "auto", kernel_block_sizes, {})


def _cases():
    wide = dataclasses.replace(SPEC, num_kv_heads=2 * HEADS)
    latent = MLAAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=1, head_size=24, dtype=torch.float32
    )
    padded = dataclasses.replace(latent, page_size_padded=latent.page_size_bytes + 512)
    # Layers with one page after another, and blocks with one after another.
    pages = ("LBHNC", "LBNHC", "BLHNC", "BLNHC")
    blocks = ("BLHNC", "BLNHC")
    kinds = {
        "one group": ([{"a": SPEC, "b": SPEC, "c": SPEC}], LAYOUTS),
        "windows": ([{"a": SPEC, "b": SPEC}, {"c": WINDOW, "d": WINDOW}, {"e": WINDOW}], LAYOUTS),
        "states": ([{"a": SPEC, "b": SPEC}, {"c": STATES, "d": STATES}], pages),
        "latent": ([{"a": latent, "b": latent}], LAYOUTS),
        "padded": ([{"a": padded, "b": padded}], pages),
        "sizes": ([{"a": SPEC, "b": wide, "c": SPEC}], pages),
        "groups of sizes": ([{"a": SPEC, "b": wide}, {"c": SPEC}, {"d": wide}], blocks),
    }
    for name, (groups, layouts) in kinds.items():
        for layout in LAYOUTS:
            if layout in layouts or layout == "separate":
                yield pytest.param(Case(groups, layout), id=f"{name}, {layout}")
    for layout in ("LBHNC", "LBNHC", "separate"):
        if layout in LAYOUTS:
            yield pytest.param(
                Case(kinds["windows"][0], layout, kernel_block_size=BLOCK_SIZE // 2),
                id=f"kernel blocks, {layout}",
            )


CASES = list(_cases())


def random_(tensor, seed=0):
    """Fills ``tensor`` and all of the storage behind it with random bytes."""
    generator = torch.Generator().manual_seed(seed)
    storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    storage.random_(0, 256, generator=generator)
    return tensor


def storage_bytes(tensor):
    """A copy of all the bytes of the storage behind ``tensor``."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).clone()
