"""Offline inference with a KV cache so small that requests are preempted, and restored.

    python examples/offline.py MODEL [BLOCKS]

BLOCKS is the size of the KV cache in blocks of 128 tokens. Without it vLLM takes what it gets,
and nothing is preempted unless that is little. The log says what happened.
"""

import sys

from vllm import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(
        sys.argv[1],
        block_size=128,
        max_model_len=2048,
        num_gpu_blocks_override=int(sys.argv[2]) if len(sys.argv) > 2 else None,
        scheduler_cls="preempt_offload.RecomputeScheduler",
        kv_transfer_config={
            "kv_connector": "PreemptOffloadConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"offload_host_memory_ratio": 2.0},
        },
    )
    prompts = [f"Number {i} is interesting because" for i in range(32)]
    params = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)
    for output in llm.generate(prompts, params):
        print(repr(output.prompt), "->", repr(output.outputs[0].text[:60]))
