"""LoRA on the CPU engine of vLLM 0.23, once this module is imported.

Its tables of adapters are put into pinned memory, which wants a driver that is not there.
Newer ones look whether it is; then nothing changes.
"""

import torch
from vllm.lora.punica_wrapper import utils


def _table(data, device=None, dtype=None):
    return torch.tensor(data, device=device, dtype=dtype)


utils.async_tensor_h2d = _table
