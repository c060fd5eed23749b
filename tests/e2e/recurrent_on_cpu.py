"""Models with recurrent layers on the CPU engine of vLLM 0.23, once this module is imported.

Where attention and recurrent layers share memory, a block that held a state may read as NaN
once it holds KV, so the scheduler has such blocks zeroed. 0.23's runner for CPUs ignores
that, and its outputs are wrong as soon as blocks are used again, with or without a
connector. And with prefix caching it copies states with a kernel for GPUs. Newer ones do
both themselves; then blocks are zeroed once more.
"""

import ctypes

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


CPUModelRunner._zero_block_ids = _zero_block_ids
mamba_utils.batch_memcpy = _batch_memcpy
