"""The undisturbed engine itself: its tokens are those of transformers' own forward."""

import torch
from transformers import AutoModelForCausalLM

from harness import jobs

SAMPLE = jobs(seed=31, lengths=[40, 77, 120, 160], max_tokens=24)


def test_undisturbed_tokens_equal_those_of_transformers(model, undisturbed):
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for job, tokens in zip(SAMPLE, undisturbed(SAMPLE).values(), strict=True):
        prompt = torch.tensor([job.prompt])
        generated = reference.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=job.max_tokens,
            min_new_tokens=job.max_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert generated[0, len(job.prompt) :].tolist() == tokens
