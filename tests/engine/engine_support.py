"""What several test modules need of vLLM's own classes."""

from __future__ import annotations

import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)

BLOCK_SIZE, HEADS, HEAD_SIZE = 16, 2, 8
SPEC = FullAttentionSpec(
    block_size=BLOCK_SIZE, num_kv_heads=HEADS, head_size=HEAD_SIZE, dtype=torch.float32
)


def kv_cache_config(*groups, num_blocks=8, spec=SPEC):
    """A config for groups of layers; layers at the same place in their groups share a tensor."""
    tensors = [
        KVCacheTensor(
            size=num_blocks * spec.page_size_bytes,
            shared_by=[layers[i] for layers in groups if i < len(layers)],
        )
        for i in range(max(map(len, groups)))
    ]
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=tensors,
        kv_cache_groups=[KVCacheGroupSpec(list(layers), spec) for layers in groups],
    )


def random_(tensor, seed=0):
    """Fills ``tensor`` and all of the storage behind it with random bytes."""
    generator = torch.Generator().manual_seed(seed)
    storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    storage.random_(0, 256, generator=generator)
    return tensor


def storage_bytes(tensor):
    """A copy of all the bytes of the storage behind ``tensor``."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).clone()
