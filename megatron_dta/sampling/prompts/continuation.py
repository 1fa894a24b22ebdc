"""Encodes text that follows other text whose token ids are fixed, because they were sampled or end a prompt.

The ids of a text depend on what stands before it: SentencePiece-like tokenizers put a blank before the first word of a
text, and others merge characters across the border. The ids of a continuation are those that it has in the whole text.
Only where a token of the whole text would cross the border the two sides are encoded apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from megatron_dta.sampling.prompts.tokenizer import CharacterTokenizer, NullTokenizer, Tokenizer

# Text that few tokenizers merge with what follows; it keeps the blank of a first word away.
_ANCHORS = ("a", "\n", ".", "0")
# Their ids never depend on what stands before.
_WITHOUT_CONTEXT = (CharacterTokenizer, NullTokenizer)
_NONE = np.zeros(0, np.int32)


class Continuation(NamedTuple):
    """Token ids, int32 [T], and whether a token of the whole text would cross the border before them."""

    token_ids: np.ndarray
    crosses: bool


def encode_after(tokenizer: Tokenizer, before: str, text: str) -> Continuation:
    """Encode ``text`` where it follows ``before``."""
    if not text:
        return Continuation(_NONE, False)
    if not before or isinstance(tokenizer, _WITHOUT_CONTEXT):
        return Continuation(tokenizer.encode(text), False)
    return _rest(tokenizer, tokenizer.encode(before), tokenizer.encode(before + text), text)


def _rest(tokenizer: Tokenizer, head: np.ndarray, token_ids: np.ndarray, text: str) -> Continuation:
    """The ids of ``text``, the end of a text with the ids ``token_ids`` whose beginning has the ids ``head``."""
    if _begins(token_ids, head):
        return Continuation(token_ids[len(head) :], False)
    for anchor in _ANCHORS:
        first, both = tokenizer.encode(anchor), tokenizer.encode(anchor + text)
        if _begins(both, first):
            return Continuation(both[len(first) :], True)
    return Continuation(tokenizer.encode(text), True)


def _begins(ids: np.ndarray, first: np.ndarray) -> bool:
    return len(ids) >= len(first) and np.array_equal(ids[: len(first)], first)


class PieceEncoder:
    """Encodes a text that grows piece by piece; ids once given stay.

    Attributes:
        text, token_ids: the text so far, and its ids, int32 [T].
        crossings: borders that a token of the whole text would cross.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._text_ids = tokenizer, _NONE
        self.text, self.token_ids, self.crossings = "", _NONE, 0

    def extend(self, text: str) -> int:
        """Make ``text``, which begins with the text so far, the text; returns the number of its ids."""
        token_ids = self._tokenizer.encode(text)
        if self.text:
            rest = _rest(self._tokenizer, self._text_ids, token_ids, text[len(self.text) :])
        else:
            rest = Continuation(token_ids, False)
        self.token_ids = np.concatenate([self.token_ids, rest.token_ids])
        self.crossings += rest.crosses
        self.text, self._text_ids = text, token_ids
        return len(self.token_ids)


def whole_text(tokenizer: Tokenizer, token_ids: Sequence[int] | np.ndarray) -> str:
    """The text of ids with the special tokens among them."""
    runs = [(special, list(run)) for special, run in groupby(map(int, token_ids), key=tokenizer.special_text)]
    return "".join(tokenizer.decode(run) if special is None else special * len(run) for special, run in runs)


def text_before(tokenizer: Tokenizer, token_ids: Sequence[int] | np.ndarray) -> str:
    """The end of the ids' text that decides how text after them is encoded: from the last special token on."""
    for index in range(len(token_ids) - 1, -1, -1):
        if tokenizer.special_text(int(token_ids[index])) is not None:
            return whole_text(tokenizer, token_ids[index:])
    return whole_text(tokenizer, token_ids)
