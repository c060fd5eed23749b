"""Checkpoints that guess what others say, made of the weights of those.

So their guesses are often right, though nobody has trained them.
"""

import json

import torch
from safetensors.torch import load_file, save_file


def derive(source, folder, weights, **config):
    """Writes a checkpoint of these weights, with the source's config but for what is given."""
    folder.mkdir()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    text = json.dumps(json.loads((source / "config.json").read_text()) | config)
    (folder / "config.json").write_text(text)
    return folder


def load(checkpoint):
    """The weights of a checkpoint, by name."""
    return load_file(checkpoint / "model.safetensors")


def window(source, folder):
    """A model whose first layer says most; the others look back 64 tokens and say less."""
    weights = load(source)
    for name in weights:
        if "layers.0." not in name and name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] *= 0.25
    kinds = ["full_attention", "sliding_attention", "sliding_attention"]
    return derive(source, folder, weights, layer_types=kinds, sliding_window=64)


def first_layer(source, folder):
    """A draft model: the first layer of its target."""
    return derive(source, folder, _of_first_layer(source), num_hidden_layers=1, layer_types=None)


def eagle(source, folder):
    """An EAGLE head: all layers of its target, and next to nothing of the hidden states."""
    weights = {name: weight for name, weight in load(source).items() if "layers." in name}
    weights = {name.removeprefix("model."): weight for name, weight in weights.items()}
    # EAGLE's first layer has no norm.
    del weights["layers.0.input_layernorm.weight"]
    weights["fc.weight"] = _embeddings_and_hidden_states()
    return derive(source, folder, weights, architectures=["EagleLlamaForCausalLM"])


def mtp(source, folder):
    """A model of one layer with a layer for multi-token prediction (MTP), as MiMo's."""
    weights = _of_first_layer(source)
    for part in "qkv":
        name = f"model.layers.0.self_attn.{part}_proj."
        weights[name + "bias"] = torch.zeros(len(weights[name + "weight"]))
    for name in [name for name in weights if "layers." in name]:
        weights[name.replace("layers", "mtp_layers")] = weights[name].clone()
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        weights[f"model.mtp_layers.0.{name}.weight"] = weights["model.norm.weight"].clone()
    projection = _embeddings_and_hidden_states().roll(HIDDEN, dims=1)
    weights["model.mtp_layers.0.input_proj.weight"] = projection
    return derive(
        source,
        folder,
        weights,
        architectures=["MiMoForCausalLM"],
        model_type="qwen2",
        num_hidden_layers=1,
        num_nextn_predict_layers=1,
    )


HIDDEN = 128


def _of_first_layer(source):
    weights = load(source)
    return {n: weight for n, weight in weights.items() if "layers." not in n or "layers.0." in n}


def _embeddings_and_hidden_states():
    generator = torch.Generator().manual_seed(0)
    noise = 0.02 * torch.randn(HIDDEN, HIDDEN, generator=generator)
    return torch.cat([torch.eye(HIDDEN), noise], dim=1)
