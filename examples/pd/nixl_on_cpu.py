"""NIXL that leaves the CPUs to those who compute, once this module is imported in a worker.

Its progress thread asks UCX again and again, without a pause, whether there is something to do: the
time for which it may wait is fixed at zero in NIXL's Python API. Where workers compute on the same
few CPUs, these threads keep them from it. Here the thread waits until the network wakes it.
"""

from __future__ import annotations

import sys

# Not from nixl itself, because vLLM sets up UCX before it imports that.
from vllm.distributed.nixl_utils import NixlWrapper

bindings = sys.modules[NixlWrapper.__module__].nixlBind
# Microseconds after which the thread looks by itself.
LONGEST_WAIT = 1000


class _Agent(bindings.nixlAgent):
    def __init__(self, name: str, config: bindings.nixlAgentConfig) -> None:
        config.pthrDelay = LONGEST_WAIT
        super().__init__(name, config)


bindings.nixlAgent = _Agent


class Worker:
    """For ``--worker-extension-cls``, which makes a worker import this module when it begins."""
