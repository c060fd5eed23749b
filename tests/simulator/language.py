"""The tokens and tags that a request must get.

The made-up model is a pure function: the tag of a position follows from the tag before it
and the position's token, and the next token follows from the last tag. Two requests with
the same tokens, adapter and weights have the same tags, as they have the same KV.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .plan import MAX_LENGTH, VOCABULARY

_MULTIPLIER, _INCREMENT, _MASK = 6364136223846793005, 1442695040888963407, (1 << 63) - 1

# In slots of rejected drafts; no tag is negative.
GARBAGE = -2


class Sentence:
    """A request's tokens, past and future, and their tags.

    Args:
        prompt: The prompt's tokens.
        adapter: The LoRA adapter; 0: none.
        weights: How often the weights have been replaced.
    """

    def __init__(self, prompt: tuple[int, ...], adapter: int, weights: int) -> None:
        self.adapter = adapter
        self.tokens = np.empty(2 * MAX_LENGTH, np.int64)
        self.tags = np.empty(2 * MAX_LENGTH, np.int64)
        self.become(prompt, weights)

    def become(self, tokens: tuple[int, ...] | list[int], weights: int) -> None:
        """Begins with ``tokens``; all that follows is said with these weights."""
        self._known = len(tokens)
        self.tokens[: self._known] = tokens
        tag = _next_tag(_next_tag(0, self.adapter), weights)
        for position, token in enumerate(tokens):
            tag = _next_tag(tag, token)
            self.tags[position] = tag

    def reach(self, length: int) -> None:
        """Has ``tokens`` and ``tags`` at least this long."""
        while self._known < length:
            before = int(self.tags[self._known - 1])
            token = self.tokens[self._known] = next_token(before)
            self.tags[self._known] = _next_tag(before, int(token))
            self._known += 1

    def tags_to(self, length: int) -> npt.NDArray[np.int64]:
        """The tags of the first ``length`` positions."""
        self.reach(length)
        return self.tags[:length]

    def said(self, start: int, end: int) -> list[int]:
        """The tokens from ``start`` to ``end``."""
        self.reach(end)
        tokens: list[int] = self.tokens[start:end].tolist()
        return tokens


def _next_tag(tag: int, token: int) -> int:
    return ((tag + token + 1) * _MULTIPLIER + _INCREMENT) & _MASK


def next_token(tag: int) -> int:
    """The token that follows a position with this tag."""
    return (tag >> 20) % VOCABULARY
