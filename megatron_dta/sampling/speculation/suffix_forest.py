"""Suffix trees with counts and a maximum depth, which predict the next tokens from earlier texts.

A tree holds every run of up to ``depth`` tokens of its texts (all suffixes, each cut at ``depth``), path-compressed,
with the number of occurrences of each run. To draft for a context, take every length m for which the tree contains the
last m tokens. From there, follow the most frequent next token while the product of the count ratios is at least
``min_probability``. The draft with the largest sum of probabilities is used. This weighs the reliability of a long
match against the higher counts of a short one (Oliaro et al., "SuffixDecoding", arXiv 2411.04975).

A suffix is inserted by a walk from the root when it has ``early_depth`` tokens, and extended by a second walk when it
has its full depth or the text ends. A running text therefore lags by ``early_depth`` - 1 tokens. Removing a text
repeats the walks and lowers the counts.

The structure is canonical: it depends on the suffixes in the tree and not on their order. Ties between counts go to the
lower token id, ties between scores to the longer match, then to the first tree. So all ranks make the same drafts, a
restored drafter continues as the saved one, and a removal undoes its insertion exactly.

The trees are written in C (``suffix_forest.c``); ``native.py`` compiles and loads it.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np

from megatron_dta.sampling.speculation.native import load_library

NO_TREE = 0


@dataclass(frozen=True)
class DraftParams:
    """Settings of drafts.

    Attributes:
        factor, offset: a match of m tokens allows a draft of m x factor + offset tokens.
        min_probability: a draft ends before the product of its count ratios falls below this.
        width: maximum number of tokens in a draft.
    """

    factor: float = 2.0
    offset: float = 0.0
    min_probability: float = 0.1
    width: int = 24


@dataclass(frozen=True)
class Drafts:
    """Drafts of n texts; only the first ``lengths[i]`` entries of row i are valid.

    Attributes:
        tokens: int32 [n, width].
        probabilities: float64 [n, width], products of the count ratios; non-increasing along a row.
        lengths: int32 [n], 0 without a draft.
        matches: int32 [n], tokens of the matched context.
        supports: int32 [n], occurrences of the match in the draft's tree.
    """

    tokens: np.ndarray
    probabilities: np.ndarray
    lengths: np.ndarray
    matches: np.ndarray
    supports: np.ndarray

    @classmethod
    def unwritten(cls, rows: int, width: int) -> Drafts:
        """Drafts of ``rows`` texts, whose lengths, matches and supports are undefined."""
        return cls(np.zeros((rows, width), np.int32), np.zeros((rows, width)), *np.empty((3, rows), np.int32))


class SuffixForest:
    """Trees and texts, identified by numbers that the forest assigns and that are never 0. Not thread-safe."""

    def __init__(self, depth: int, early_depth: int) -> None:
        self.depth, self.early_depth = depth, min(early_depth, depth)
        self._library = load_library()
        self._forest = self._library.sf_new(self.depth, self.early_depth)
        if not self._forest:
            raise MemoryError("no memory for a suffix forest")

    def __del__(self) -> None:
        if getattr(self, "_forest", None):
            self._library.sf_delete(self._forest)
            self._forest = None

    def new_tree(self) -> int:
        return _checked(self._library.sf_new_tree(self._forest))

    def delete_tree(self, tree: int) -> None:
        """Delete an empty tree; ``ValueError`` if it has texts."""
        if self._library.sf_delete_tree(self._forest, tree):
            raise ValueError(f"tree {tree} still has texts")

    def new_text(self, trees: tuple[int, int], begin: int = 0) -> int:
        """A text without tokens in up to two trees, which will contain its suffixes from position ``begin`` on."""
        return _checked(self._library.sf_new_text(self._forest, trees[0], trees[1], begin))

    def extend(self, texts: np.ndarray, tokens: np.ndarray, offsets: np.ndarray, inserts: bool = True) -> None:
        """Append ``tokens[offsets[i] : offsets[i + 1]]`` (int32) to text number ``texts[i]`` (uint32 [n]). Without
        ``inserts`` the trees get the tokens with the next call."""
        texts, tokens = np.ascontiguousarray(texts, np.uint32), np.ascontiguousarray(tokens, np.int32)
        offsets = np.ascontiguousarray(offsets, np.int64)
        inputs = texts.ctypes.data, tokens.ctypes.data, offsets.ctypes.data
        _check_status(self._library.sf_extend(self._forest, len(texts), *inputs, inserts))

    def finish(self, text: int) -> None:
        """End a text: insert its last suffixes, which are shorter than the depth."""
        _check_status(self._library.sf_finish(self._forest, text))

    def remove(self, text: int) -> None:
        """Remove a text and all its suffixes."""
        if self._library.sf_remove(self._forest, text):
            raise RuntimeError(f"text {text} is not in its trees: the forest is damaged")

    def draft(self, texts: np.ndarray, most: np.ndarray, params: DraftParams) -> Drafts:
        """Continuations of the texts (uint32 [n]), of up to ``most`` (int32 [n]) tokens each."""
        texts, most = np.ascontiguousarray(texts, np.uint32), np.ascontiguousarray(most, np.int32)
        drafts = Drafts.unwritten(len(texts), params.width)
        outputs = (array.ctypes.data for array in vars(drafts).values())
        inputs = len(texts), texts.ctypes.data, most.ctypes.data, params.width, params.factor, params.offset
        _check_status(self._library.sf_draft(self._forest, *inputs, params.min_probability, *outputs))
        return drafts

    def count(self, tree: int, pattern: np.ndarray) -> int:
        """Occurrences of a run of up to ``depth`` tokens (int32) in a tree."""
        pattern = np.ascontiguousarray(pattern, np.int32)
        return self._library.sf_count(self._forest, tree, len(pattern), pattern.ctypes.data)

    def tokens(self, text: int) -> np.ndarray:
        """A copy of a text's tokens, int32."""
        length = ctypes.c_int64()
        address = self._library.sf_tokens(self._forest, text, ctypes.byref(length))
        if not length.value:
            return np.zeros(0, np.int32)
        return np.ctypeslib.as_array((ctypes.c_int32 * length.value).from_address(address)).copy()

    @property
    def num_nodes(self) -> int:
        return self._size()[0]

    @property
    def num_bytes(self) -> int:
        """Memory held by nodes, edges and texts."""
        return self._size()[1]

    def _size(self) -> tuple[int, int]:
        size = np.zeros(2, np.int64)
        self._library.sf_size(self._forest, size.ctypes.data)
        return int(size[0]), int(size[1])


def _checked(number: int) -> int:
    if not number:
        raise MemoryError("no memory for the suffix forest; lower --das-window")
    return number


def _check_status(status: int) -> None:
    if status:
        raise MemoryError("no memory for the suffix forest; lower --das-window")
