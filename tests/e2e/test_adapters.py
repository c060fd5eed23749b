"""Requests with LoRA adapters: those with the same tokens and another adapter share no KV."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from vllm.lora.request import LoRARequest

from harness import BLOCK, Engine, Job, jobs
from preempt_offload import tiny_model
from reference import tokens_of_transformers

RANK = 8
NUM_ADAPTERS = 3
# What the names of an adapter's weights begin with.
WRAPPED = "base_model.model."


@dataclasses.dataclass(frozen=True)
class AdapterJob(Job):
    """A request with an adapter; without one if its number is 0."""

    number: int = 0
    folder: str = ""

    @property
    def adapter(self):
        if not self.number:
            return None
        return LoRARequest(f"adapter-{self.number}", self.number, self.folder)


def write_adapter(folder, seed):
    """Writes an adapter of the tiny model, as strong as the model itself."""
    rng = np.random.default_rng(seed)
    config = tiny_model.CONFIG
    hidden, head = config["hidden_size"], config["head_dim"]
    outputs = {
        "q_proj": config["num_attention_heads"] * head,
        "k_proj": config["num_key_value_heads"] * head,
        "v_proj": config["num_key_value_heads"] * head,
    }
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for name, rows in outputs.items():
            prefix = f"{WRAPPED}model.layers.{layer}.self_attn.{name}.lora_"
            for part, shape in (("A", (RANK, hidden)), ("B", (rows, RANK))):
                weight = rng.normal(0, 2 / shape[1] ** 0.5, shape)
                weights[f"{prefix}{part}.weight"] = weight.astype(np.float32)
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": RANK,
        "bias": "none",
        "target_modules": list(outputs),
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def everyone(tmp_path_factory):
    """Four prompts, with each adapter and without."""
    root = tmp_path_factory.mktemp("adapters")
    folders = ["", *(str(write_adapter(root / f"{i}", i)) for i in range(1, NUM_ADAPTERS + 1))]
    prompts = jobs(seed=41, lengths=[2 * BLOCK + 7, 3 * BLOCK + 9, 50, 40], max_tokens=60)
    return tuple(
        AdapterJob(job.prompt, job.max_tokens, number=number, folder=folder)
        for job in prompts
        for number, folder in enumerate(folders)
    )


# On CPUs vLLM gives requests without an adapter what is in the last place, so that stays empty.
LORA = {"enable_lora": True, "max_loras": NUM_ADAPTERS + 1, "max_lora_rank": RANK}


@pytest.fixture(scope="module")
def undisturbed_with_adapters(undisturbed_engine, model):
    return undisturbed_engine(model, **LORA)


def test_undisturbed_tokens_are_those_of_transformers(model, undisturbed_with_adapters, everyone):
    undisturbed = undisturbed_with_adapters(everyone)
    for i, job in enumerate(everyone[: NUM_ADAPTERS + 1]):
        reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        if job.folder:
            adapter = load_file(f"{job.folder}/adapter_model.safetensors")
            for name, weight in reference.state_dict().items():
                a, b = (WRAPPED + name.replace("weight", f"lora_{part}.weight") for part in "AB")
                if a in adapter:
                    weight += adapter[b] @ adapter[a]
        assert tokens_of_transformers(reference, job.prompt, job.max_tokens) == undisturbed[i]


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
def test_no_blocks_are_shared_between_adapters(
    model, undisturbed_with_adapters, record, everyone, async_scheduling
):
    with Engine(
        model,
        25,
        offload={"offload_host_memory_ratio": 4, "enable_offload_prefix_caching": True},
        async_scheduling=async_scheduling,
        enable_prefix_caching=True,
        **LORA,
    ) as engine:
        outcome = engine.run(everyone)
        found = engine.observer.found_tokens.total()
    record(
        outcome,
        everyone,
        kind="LoRA adapters",
        mode="prefix caching, shared host blocks",
        async_scheduling=async_scheduling,
    )
    assert outcome.tokens == undisturbed_with_adapters(everyone)
    assert len({tuple(tokens) for tokens in outcome.tokens.values()}) == len(everyone)
    restored = {everyone[restore.job].number for restore in outcome.restores}
    assert restored == set(range(NUM_ADAPTERS + 1))
    assert outcome.recomputed_tokens == 0
    assert outcome.stats.stored_blocks > 0
    assert outcome.stats.shared_blocks == 0
    assert found == 0
