"""Speculative decoding on vLLM's CPU engines, once this module is imported.

0.23 has every part of it, but its sampler gives a kernel a keyword that the kernel's
counterpart for CPUs lacks ("unexpected keyword argument 'USE_FP64_GUMBEL'"); it is dropped,
and means nothing to greedy sampling. And with async scheduling its runner for CPUs does not
say how many drafts were accepted. The runner that it inherits from does, with the streams
that ``async_on_cpu`` has, so that one's methods are used.

0.32 looks for kernels in every module of the process. Once Numba is loaded, as it is for
n-grams, it comes across LLVM's library, which has a function of any name, and no further
engine starts. So the library is made to have no ``__dict__``.
"""

import llvmlite.binding.ffi as llvm
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


_allow()
