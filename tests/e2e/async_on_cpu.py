"""Async scheduling on vLLM's CPU engine, once this module is imported.

vLLM turns async scheduling off on CPUs, because nothing is gained by it there.
Scheduler, batch queue and model runner are the same, though: a step is scheduled while the
one before it is under way. Only the CUDA stream and event that the sampled tokens cross the
bus with do not exist, and as everything on a CPU is finished when the call returns, objects
that do nothing stand in for them.
"""

import contextlib

import torch
import vllm.v1.worker.cpu_model_runner as cpu_model_runner
from vllm.platforms.cpu import CpuPlatform


class _Finished:
    """A stream or an event on which everything is through already."""

    def __init__(self, *args, **kwargs):
        pass

    def _nothing(self, *args):
        pass

    wait_stream = wait_event = record = synchronize = _nothing


def _allow():
    """Makes ``async_scheduling=True`` mean what it says, from the next engine on."""
    check = CpuPlatform.check_and_update_config.__func__

    def keep_async_scheduling(cls, vllm_config):
        wanted = vllm_config.scheduler_config.async_scheduling
        check(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = wanted

    CpuPlatform.check_and_update_config = classmethod(keep_async_scheduling)
    cpu_model_runner._torch_cuda_wrapper = contextlib.nullcontext
    torch.Event = torch.cuda.Stream = _Finished
    torch.cuda.current_stream = _Finished
    torch.cuda.stream = contextlib.nullcontext


_allow()
