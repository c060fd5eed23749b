"""Models with recurrent layers on the CPU engine of vLLM 0.23, once this module is imported.

Where attention and recurrent layers share memory, a block that held a state may read as NaN
once it holds KV, so the scheduler has such blocks zeroed. 0.23's runner for CPUs ignores
that, and its outputs are wrong as soon as blocks are used again, with or without a
connector. With prefix caching it copies states with a kernel for GPUs. And where the first
step of a request has one token of its prompt, a gated delta net takes it for a decode and
starts from whatever state the block had. Newer ones do all three right themselves; then
blocks and states are zeroed once more.
"""

import ctypes

from vllm.v1.attention.backends.gdn_attn import (
    GDNAttentionBackend,
    GDNAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker import mamba_utils
from vllm.v1.worker.cpu_model_runner import CPUModelRunner


def _zero_block_ids(self, block_ids):
    layers = self.compilation_config.static_forward_context
    for group in self.kv_cache_config.kv_cache_groups:
        if isinstance(group.kv_cache_spec, FullAttentionSpec):
            for layer in group.layer_names:
                layers[layer].kv_cache[block_ids] = 0


def _batch_memcpy(sources, destinations, sizes):
    for copy in zip(destinations.tolist(), sources.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(*copy)


class _Builder(GDNAttentionMetadataBuilder):
    """Prepares steps of a gated delta net, and empty states for requests that begin."""

    def __init__(self, kv_cache_spec, layer_names, *args):
        super().__init__(kv_cache_spec, layer_names, *args)
        self.layer_names = layer_names

    def build(self, common_prefix_len, common_attn_metadata, *args, **kwargs):
        blocks = mamba_get_block_table_tensor(
            common_attn_metadata.block_table_tensor,
            common_attn_metadata.seq_lens,
            self.kv_cache_spec,
            self.vllm_config.cache_config.mamba_cache_mode,
        )
        begin = blocks[common_attn_metadata.compute_num_computed_tokens() == 0, 0]
        layers = self.vllm_config.compilation_config.static_forward_context
        for layer in self.layer_names:
            for state in layers[layer].kv_cache:
                state[begin] = 0
        return super().build(common_prefix_len, common_attn_metadata, *args, **kwargs)


CPUModelRunner._zero_block_ids = _zero_block_ids
GDNAttentionBackend.get_builder_cls = staticmethod(lambda: _Builder)
mamba_utils.batch_memcpy = _batch_memcpy
