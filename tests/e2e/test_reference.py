"""The undisturbed engine itself: its tokens are those of transformers' own forward."""

import torch
from transformers import AutoModelForCausalLM

from harness import jobs
from reference import tokens_of_transformers

SAMPLE = jobs(seed=31, lengths=[40, 77, 120, 160], max_tokens=24)


def test_undisturbed_tokens_equal_those_of_transformers(model, undisturbed):
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for job, tokens in zip(SAMPLE, undisturbed(SAMPLE).values(), strict=True):
        assert tokens_of_transformers(reference, job.prompt, job.max_tokens) == tokens
