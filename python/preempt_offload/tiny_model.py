"""A small checkpoint with strong weights, for the demo and the tests.

With weights as small as those of vLLM's ``load_format="dummy"`` the output hardly
depends on the KV cache, so wrong KV would go unnoticed. Here every matrix is normal with
a standard deviation of ``2 / sqrt(fan_in)``, and one wrong block changes what comes out.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "float32",
}


def write(folder: Path, *, seed: int = 0) -> Path:
    """Writes a dense Llama-like checkpoint in float32 into ``folder`` and returns it."""
    from safetensors.numpy import save_file

    rng = np.random.default_rng(seed)
    hidden, inner = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    queries = CONFIG["num_attention_heads"] * CONFIG["head_dim"]
    keys = CONFIG["num_key_value_heads"] * CONFIG["head_dim"]

    def matrix(rows: int, columns: int) -> npt.NDArray[np.float32]:
        return rng.normal(0, 2 / columns**0.5, (rows, columns)).astype(np.float32)

    ones = np.ones(hidden, np.float32)
    weights = {
        "model.embed_tokens.weight": rng.normal(0, 1, (CONFIG["vocab_size"], hidden)).astype(
            np.float32
        ),
        "model.norm.weight": ones,
        "lm_head.weight": matrix(CONFIG["vocab_size"], hidden),
    }
    for i in range(CONFIG["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        weights |= {
            layer + "input_layernorm.weight": ones,
            layer + "post_attention_layernorm.weight": ones,
            layer + "self_attn.q_proj.weight": matrix(queries, hidden),
            layer + "self_attn.k_proj.weight": matrix(keys, hidden),
            layer + "self_attn.v_proj.weight": matrix(keys, hidden),
            layer + "self_attn.o_proj.weight": matrix(hidden, queries),
            layer + "mlp.gate_proj.weight": matrix(inner, hidden),
            layer + "mlp.up_proj.weight": matrix(inner, hidden),
            layer + "mlp.down_proj.weight": matrix(hidden, inner),
        }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2))
    return folder


def write_tokenizer(folder: Path) -> Path:
    """Writes a tokenizer for that vocabulary, and returns its folder.

    There is a token for each byte and then words, ``" w300"`` for example, which no text is
    tokenized to. A conversation is its roles' first letters and what was said.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokens = ["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    # As a tokenizer of bytes spells a space.
    tokens += [
        f"\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}w{i}"
        for i in range(len(tokens), CONFIG["vocab_size"])
    ]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}a:",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
    return folder
