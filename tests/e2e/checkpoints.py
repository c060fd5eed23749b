"""Small checkpoints of every kind of model whose KV cache differs, with strong weights.

They are made by ``transformers``, so its forward is a reference that shares no code with
vLLM's. As in ``preempt_offload.tiny_model``, every matrix is normal with a standard
deviation of ``2 / sqrt(fan_in)``; what else decides how far a layer looks back is set by
``Kind.remember``, so that wrong KV or a wrong state changes what comes out.
"""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

VOCABULARY = 512
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of model.

    Attributes:
        config: The config class of ``transformers``.
        settings: Its arguments, beside those that all kinds share.
        dtype: That of weights and activations.
        embedding_std: Standard deviation of the embeddings.
        remember: Values for vectors that decide how far back a layer looks, by the end of
            their names: the bounds of a uniform distribution.
        unused: Vectors, with their lengths, that some vLLM wants to find and does not use.
    """

    config: str
    settings: Mapping[str, Any]
    dtype: torch.dtype = torch.float32
    embedding_std: float = 1
    remember: Mapping[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    unused: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def write(self, folder: Path, *, seed: int = 0) -> Path:
        """Writes a checkpoint of this kind into ``folder`` and returns it."""
        config = getattr(transformers, self.config)(**COMMON | self.settings)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=self.dtype)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                bounds = [value for end, value in self.remember.items() if name.endswith(end)]
                if bounds:
                    weight.uniform_(*bounds[0], generator=generator)
                elif weight.dim() > 1:
                    fan_in = math.prod(weight.shape[1:])
                    is_embedding = "embed_tokens" in name
                    std = self.embedding_std if is_embedding else 2 / fan_in**0.5
                    weight.normal_(0, std, generator=generator)
        unused = {
            name: torch.ones(length, dtype=self.dtype) for name, length in self.unused.items()
        }
        model.save_pretrained(folder, state_dict=model.state_dict() | unused)
        return folder


KINDS = {
    "fp8": Kind("LlamaConfig", {"num_hidden_layers": 3, "num_key_value_heads": 2, "head_dim": 32}),
    "shared-layers": Kind(
        "Gemma3nTextConfig",
        {
            "num_hidden_layers": 6,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "sliding_window": 64,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            # The last two layers use the KV of the two before.
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": VOCABULARY,
            "laurel_rank": 8,
            "altup_num_inputs": 2,
            "activation_sparsity_pattern": [0.0] * 6,
            "tie_word_embeddings": True,
        },
        # So small that what a token says of itself does not decide which comes next.
        embedding_std=0.01,
        # Which makes the logits small, too.
        remember={"model.norm.weight": (20, 20)},
        unused={f"model.layers.{i}.self_attn.k_norm.weight": 32 for i in (4, 5)},
    ),
    "sliding-window": Kind(
        "Gemma3TextConfig",
        {
            "num_hidden_layers": 6,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "sliding_window": 64,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            # Queries and keys are normalised; without this every token would count the same.
            "query_pre_attn_scalar": 2,
        },
        # The model multiplies them by the square root of the hidden size.
        embedding_std=128**-0.5,
    ),
    "mla": Kind(
        "DeepseekV2Config",
        {
            "num_hidden_layers": 3,
            "num_key_value_heads": 4,
            "q_lora_rank": None,
            # The kernel on CPUs is compiled for these two alone.
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
            "first_k_dense_replace": 3,
        },
    ),
    "mamba2": Kind(
        "FalconH1Config",
        {
            "num_hidden_layers": 3,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "mamba_d_ssm": 128,
            "mamba_n_heads": 4,
            "mamba_d_state": 16,
            "mamba_chunk_size": 64,
        },
        remember={"dt_bias": (-5, -2)},
    ),
    "gated-delta-net": Kind(
        "Qwen3NextConfig",
        {
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        },
        dtype=torch.bfloat16,
        remember={"A_log": (-4, -1), "q_norm.weight": (0.5, 1), "k_norm.weight": (0.5, 1)},
    ),
}
