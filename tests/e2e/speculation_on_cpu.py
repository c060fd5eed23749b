"""Speculative decoding on vLLM's CPU engines, once this module is imported.

0.23 has every part of it, but its sampler gives a kernel a keyword that the kernel's
counterpart for CPUs lacks ("unexpected keyword argument 'USE_FP64_GUMBEL'"); it is dropped,
and means nothing to greedy sampling. And with async scheduling its runner for CPUs does not
say how many drafts were accepted. The runner that it inherits from does, with the streams
that ``async_on_cpu`` has, so that one's methods are used.

0.32 looks for kernels in every module of the process. Once Numba is loaded, as it is for
n-grams, it comes across LLVM's library, which has a function of any name, and no further
engine starts. So the library is made to have no ``__dict__``. And its convolution and its
recurrence of Mamba2 for CPUs mix drafts up: outputs are of no use, with or without a
connector. Those that are written down here do not.
"""

import functools
import itertools

import llvmlite.binding.ffi as llvm
import torch
from torch.nn import functional
from vllm.model_executor.layers.mamba import mamba_mixer2
from vllm.utils import cpu_triton_utils
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

import async_on_cpu  # noqa: F401


def _allow():
    for method in (
        "_copy_draft_token_ids_to_cpu",
        "_get_draft_token_ids_cpu",
        "_copy_valid_sampled_token_count",
        "_get_valid_sampled_token_count",
    ):
        if method in vars(CPUModelRunner):
            delattr(CPUModelRunner, method)

    if hasattr(cpu_triton_utils, "sample_recovered_tokens_kernel"):
        kernel = cpu_triton_utils._sample_recovered_tokens_kernel_impl

        def sample_recovered_tokens(*args, USE_FP64_GUMBEL=False, **kwargs):
            return kernel(*args, **kwargs)

        wrapper = type(cpu_triton_utils.sample_recovered_tokens_kernel)
        cpu_triton_utils.sample_recovered_tokens_kernel = wrapper(sample_recovered_tokens)

    library = type(llvm.lib)
    find = library.__getattr__

    def find_function(self, name):
        if name == "__dict__":
            raise AttributeError(name)
        return find(self, name)

    library.__getattr__ = find_function

    mamba_mixer2.causal_conv1d_update = _convolution(mamba_mixer2.causal_conv1d_update)
    mamba_mixer2.selective_state_update = _recurrence(mamba_mixer2.selective_state_update)


def _convolution(update):
    """Mamba2's convolution in decode steps, also of steps with drafts.

    Of each request, the inputs (tokens, channels) of the last step are in its first block, behind
    those before them. Where they end depends on how many tokens were accepted.
    """

    @functools.wraps(update)
    def convolve(x, states, weight, bias, activation, num_accepted_tokens=None, **rest):
        if num_accepted_tokens is None:
            return update(x, states, weight, bias, activation, **rest)
        out = torch.empty_like(x)
        before = weight.shape[1] - 1
        blocks = rest["conv_state_indices"][:, 0].tolist()
        for i, (start, end) in enumerate(itertools.pairwise(rest["query_start_loc"].tolist())):
            state, first = states[blocks[i]], num_accepted_tokens[i] - 1
            inputs = torch.cat([state[:, first : first + before], x[start:end].T], dim=1)
            result = functional.conv1d(inputs, weight.unsqueeze(1), bias, groups=len(weight))
            out[start:end] = functional.silu(result).T
            state[:, : inputs.shape[1] - 1] = inputs[:, 1:]
        return out

    return convolve


def _recurrence(update):
    """Mamba2's recurrence in decode steps, also of steps with drafts.

    A request has a block for the state after each token of a step. The last step's that counts is
    that of the last token accepted.
    """

    @functools.wraps(update)
    def recur(states, x, dt, A, B, C, D, *args, num_accepted_tokens=None, **rest):
        if num_accepted_tokens is None:
            update(states, x, dt, A, B, C, D, *args, **rest)
            return
        (dt_bias,) = args
        steps = functional.softplus(dt + dt_bias).unsqueeze(-1)
        decays = torch.exp(steps * A)
        B, C = (t.repeat_interleave(x.shape[1] // t.shape[1], 1).unsqueeze(-2) for t in (B, C))
        updates = steps * B * x.unsqueeze(-1)
        blocks, bounds = rest["state_batch_indices"].tolist(), rest["cu_seqlens"].tolist()
        for of_request, accepted, (start, end) in zip(
            blocks, num_accepted_tokens.tolist(), itertools.pairwise(bounds), strict=False
        ):
            state = states[of_request[accepted - 1]]
            for block, token in zip(of_request, range(start, end), strict=False):
                state = state * decays[token] + updates[token]
                states[block] = state
                rest["out"][token] = (state * C[token]).sum(-1) + D * x[token]

    return recur


_allow()
