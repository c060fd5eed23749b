"""What several test modules need of vLLM's own classes."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends import utils as backend_utils
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.mla.flashmla import FlashMLABackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVQuantMode,
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
# Those in which a layer has one page after another, and in which a block has.
PAGES_BY_LAYER, PAGES_BY_BLOCK = ("LBHNC", "LBNHC", "separate"), ("BLHNC", "BLNHC")


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
    # The backend of all layers and what it is told of their dtype; else those of the CPU.
    backend: str | None = None
    cache_dtype: str = "auto"
    # The order of heads and tokens in backends that leave it to the user.
    heads_first: bool = False
    # Layers that use the cache of another one.
    sharing: dict[str, str] = dataclasses.field(default_factory=dict)

    def make(self, num_blocks):
        """vLLM's config and the caches that its CPU worker registers, by layer."""
        specs = [next(iter(group.values())) for group in self.groups]
        if any(len(set(group.values())) > 1 for group in self.groups):
            specs = [UniformTypeKVCacheSpecs(BLOCK_SIZE, kv_cache_specs=g) for g in self.groups]
        config = kv_cache_config(
            *self.groups, num_blocks=num_blocks, spec=specs, layout=self.layout
        )
        caches = self._allocate(config)
        worker_utils.add_kv_sharing_layers_to_kv_cache_groups(self.sharing, config.kv_cache_groups)
        return config, caches | {layer: caches[target] for layer, target in self.sharing.items()}

    def page_bytes(self, *, padded):
        """Bytes of a page of each layer of each group."""

        def size(spec):
            unpadded = {} if padded else dict.fromkeys(("page_size_padded", "alignment"))
            known = {field: None for field in unpadded if hasattr(spec, field)}
            return dataclasses.replace(spec, **known).page_size_bytes

        return [[size(spec) for spec in group.values()] for group in self.groups]

    def _allocate(self, config):
        cpu = torch.device("cpu")
        kernel_block_sizes = [
            group.kv_cache_spec.block_size
            if isinstance(group.kv_cache_spec, MambaSpec)
            else self.kernel_block_size
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
                    backend_class(self.backend)
                    if self.backend
                    else FlashMLABackend
                    if isinstance(spec, MLAAttentionSpec)
                    else CPUAttentionBackend
                )
                attention_groups.append(worker_utils.AttentionGroup(backend, [layer], spec, i))
        raw = attn_utils._allocate_kv_cache(config, {}, cpu)
        backend_utils.set_kv_cache_layout("HND" if self.heads_first else "NHD")
        try:
            return attn_utils._reshape_kv_cache(
                attention_groups, raw, self.cache_dtype, kernel_block_sizes, {}
            )
        finally:
            backend_utils.set_kv_cache_layout(None)


def backend_class(name):
    """One of vLLM's attention backends."""
    return AttentionBackendEnum[name].get_class()


def _cases():
    wide = dataclasses.replace(SPEC, num_kv_heads=2 * HEADS)
    latent = MLAAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=1, head_size=24, dtype=torch.float32
    )
    padded = dataclasses.replace(latent, page_size_padded=latent.page_size_bytes + 512)
    pages = (*PAGES_BY_LAYER, *PAGES_BY_BLOCK)
    kinds = {
        "one group": ([{"a": SPEC, "b": SPEC, "c": SPEC}], LAYOUTS),
        "windows": ([{"a": SPEC, "b": SPEC}, {"c": WINDOW, "d": WINDOW}, {"e": WINDOW}], LAYOUTS),
        "states": ([{"a": SPEC, "b": SPEC}, {"c": STATES, "d": STATES}], pages),
        "latent": ([{"a": latent, "b": latent}], LAYOUTS),
        "padded": ([{"a": padded, "b": padded}], pages),
        "sizes": ([{"a": SPEC, "b": wide, "c": SPEC}], pages),
        "groups of sizes": ([{"a": SPEC, "b": wide}, {"c": SPEC}, {"d": wide}], PAGES_BY_BLOCK),
    }
    for name, (groups, layouts) in kinds.items():
        for layout in LAYOUTS:
            if layout in layouts or layout == "separate":
                yield pytest.param(Case(groups, layout), id=f"{name}, {layout}")
    for layout in PAGES_BY_LAYER:
        if layout in LAYOUTS:
            yield pytest.param(
                Case(kinds["windows"][0], layout, kernel_block_size=BLOCK_SIZE // 2),
                id=f"kernel blocks, {layout}",
            )


CASES = list(_cases())


def _backend_cases():
    """What the backends of accelerators make of a cache, with dtypes and packings of their own."""
    per_tensor, per_token = KVQuantMode.FP8_PER_TENSOR, KVQuantMode.FP8_PER_TOKEN_HEAD
    bytes_ = {"dtype": torch.uint8}
    half = dataclasses.replace(SPEC, dtype=torch.bfloat16)
    fp8 = dataclasses.replace(SPEC, **bytes_, kv_quant_mode=per_tensor)
    scaled = dataclasses.replace(SPEC, **bytes_, kv_quant_mode=per_token)
    # As many bytes as its neighbours, though its blocks have more tokens.
    wide_window = dataclasses.replace(WINDOW, block_size=2 * BLOCK_SIZE, num_kv_heads=HEADS // 2)
    latent = {"block_size": 64, "num_kv_heads": 1} | bytes_
    sparse = MLAAttentionSpec(**latent, head_size=576, **_ds_mla())
    index = MLAAttentionSpec(**latent, head_size=132)
    compressed = MLAAttentionSpec(
        **latent, head_size=512, alignment=576, **_ds_mla(version="deepseek_v4", compression=4)
    )
    small = {"kernel_block_size": BLOCK_SIZE}
    large = [{"a": dataclasses.replace(spec, block_size=4 * BLOCK_SIZE)} for spec in (fp8, half)]
    kinds = {
        "bfloat16": ([{"a": half, "b": half}], "FLASH_ATTN", {}),
        "heads first": ([{"a": half, "b": half}], "FLASH_ATTN", {"heads_first": True}),
        "fp8": ([{"a": fp8, "b": fp8}], "FLASH_ATTN", {"cache_dtype": "fp8"}),
        "fp8, heads first, small kernel blocks": (
            large[:1],
            "FLASH_ATTN",
            {"cache_dtype": "fp8", "heads_first": True} | small,
        ),
        "fp8, scales inside": (
            [{"a": scaled, "b": scaled}],
            "TRITON_ATTN",
            {"cache_dtype": "fp8_per_token_head"},
        ),
        "fp8 in some layers": ([{"a": fp8, "b": half, "c": fp8}], "FLASH_ATTN", {}),
        "flex attention": ([{"a": half, "b": half}], "FLEX_ATTENTION", {}),
        "K and V first": ([{"a": half, "b": half}], "ROCM_ATTN", {}),
        "K and V first, small kernel blocks": (large[1:], "ROCM_ATTN", small),
        "K and V first, states": ([{"a": SPEC}, {"b": STATES}], "ROCM_ATTN", {}),
        "windows with larger blocks": ([{"a": SPEC}, {"b": wide_window}], "FLASH_ATTN", {}),
        "layers that share": (
            [{"a": half, "b": half}, {"c": half}],
            "FLASH_ATTN",
            {"sharing": {"d": "b", "e": "c", "f": "b"}},
        ),
        "fp8 of sparse MLA": (
            [{"a": sparse, "b": sparse}],
            "FLASHMLA_SPARSE",
            {"cache_dtype": "fp8_ds_mla", "kernel_block_size": 64},
        ),
        "an index": ([{"a": index, "b": index}], "FLASHMLA", {"kernel_block_size": 64}),
        "compressed and aligned": (
            [{"a": compressed, "b": compressed}],
            "FLASHMLA_SPARSE_DSV4",
            {"cache_dtype": "fp8_ds_mla", "kernel_block_size": 64},
        ),
    }
    for name, (groups, backend, options) in kinds.items():
        if hasattr(AttentionBackend, "customize_spec"):
            customize = backend_class(backend).customize_spec
            groups = [
                {
                    layer: customize(spec) if isinstance(spec, AttentionSpec) else spec
                    for layer, spec in group.items()
                }
                for group in groups
            ]
        # Where a page is in one piece; else kernel blocks cannot be smaller, and groups whose heads
        # differ do not lie on each other block by block.
        for layout in (*PAGES_BY_LAYER, *(() if "small" in name else PAGES_BY_BLOCK)):
            if layout not in LAYOUTS:
                continue
            yield pytest.param(
                Case(groups, layout, backend=backend, **options), id=f"{name}, {layout}"
            )


def _ds_mla(version=None, compression=1):
    """Fields of a spec for the packed FP8 latents of DeepSeek's sparse attention."""
    if hasattr(MLAAttentionSpec, "tokens_per_state"):
        packed = {"tokens_per_state": compression, "state_content_bytes": 584 if version else 656}
    else:
        packed = {"compress_ratio": compression}
    return {"cache_dtype_str": "fp8_ds_mla", "model_version": version} | packed


BACKEND_CASES = list(_backend_cases())


def random_(tensor, seed=0):
    """Fills ``tensor`` and all of the storage behind it with random bytes."""
    generator = torch.Generator().manual_seed(seed)
    storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    storage.random_(0, 256, generator=generator)
    return tensor


def storage_bytes(tensor):
    """A copy of all the bytes of the storage behind ``tensor``."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).clone()
