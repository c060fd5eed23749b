"""vllm-ascend on vLLM's CPU engine, once imported: its schedulers, connectors and changes of vLLM.

The plugin that makes vLLM run on NPUs stays off (``VLLM_PLUGINS``). What it does to vLLM's
scheduling is all done, by its own entry point. The modules that come with CANN and Mooncake are
there in name only: to use anything of them is an error.
"""

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import torch

SCHEDULERS = "vllm_ascend.core.recompute_scheduler"


class _NotHere(ModuleType):
    """A module, or something in one, that can be named but not used."""

    def __init__(self, name):
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None, is_package=True)
        self.__path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, _NotHere(f"{self.__name__}.{name}"))
        return getattr(self, name)

    def __or__(self, other):
        """As in annotations."""
        return self

    def __call__(self, *args, **kwargs):
        raise AssertionError(f"{self.__name__} was called, and it is not here")


for name in ("torch_npu", "mooncake", "mooncake.engine"):
    sys.modules[name] = _NotHere(name)
torch.npu = sys.modules["torch_npu"].npu
torch.npu.is_available = lambda: False
# Before the plugin puts another class in the place of the one they extend, which in 0.26.0rc1
# ends the engine at the first preemption that has a step under way.
importlib.import_module(SCHEDULERS)
importlib.import_module("vllm_ascend").register_connector()
