"""A tokenizer for the tests' checkpoints: bytes, and pairs of letters up to the vocabulary."""

import itertools

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from harness import VOCABULARY

SPECIAL = ("<pad>", "<s>", "</s>")
LETTERS = "etaoinshrdlucmfwypvbgk"


def make(more_special=()):
    """A byte-level BPE tokenizer; special tokens have the first ids, in their order."""
    names = [*SPECIAL, *more_special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    pairs = list(itertools.product(LETTERS, LETTERS))[: VOCABULARY - len(names)]
    names += map("".join, pairs)
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    pad, bos, eos = SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        bos_token=bos,
        eos_token=eos,
        additional_special_tokens=list(more_special),
    )
