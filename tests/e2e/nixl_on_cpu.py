"""NIXL that leaves the CPUs to others, once this module is imported in a worker.

Its progress thread asks UCX again and again, without a pause, whether there is something to do: the
time for which it may wait is fixed at zero in NIXL's Python API. So each worker takes a core from
the tests that run beside it. Here the thread waits until the network wakes it.
"""

# Goes first, because vLLM sets up UCX before it imports NIXL.
from vllm.distributed.nixl_utils import NixlWrapper  # noqa: F401, I001

from nixl import _bindings

# Microseconds after which the thread looks by itself.
LONGEST_WAIT = 1000


class _Agent(_bindings.nixlAgent):
    def __init__(self, name, config):
        config.pthrDelay = LONGEST_WAIT
        super().__init__(name, config)


_bindings.nixlAgent = _Agent


class Worker:
    """For ``--worker-extension-cls``, which makes a worker import this module when it begins."""
