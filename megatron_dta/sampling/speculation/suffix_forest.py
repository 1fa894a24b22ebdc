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

``native.py`` has the C implementation (``suffix_forest.c``). ``PythonSuffixForest`` is the same algorithm on Python
objects, for machines without a C compiler: about twenty times slower and eight times larger, with identical drafts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

NO_TREE = 0
MAX_DEPTH = 255


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

    def __post_init__(self) -> None:
        if not (self.factor >= 0 and self.min_probability > 0 and 1 <= self.width <= MAX_DEPTH):
            raise ValueError(f"drafts need factor >= 0, min_probability > 0 and 1 <= width <= {MAX_DEPTH}: {self}")


@dataclass(frozen=True)
class Drafts:
    """Drafts of n texts; only the first ``lengths[i]`` entries of row i are valid.

    Attributes:
        tokens: int32 [n, width].
        probabilities: float64 [n, width], products of the count ratios; non-increasing along a row.
        lengths: int32 [n], 0 without a draft.
        matches: int32 [n], tokens of the matched context.
        trees: int32 [n], which of the text's trees the draft comes from, 0 or 1; -1 without a draft.
        supports: int32 [n], occurrences of the match in that tree.
        scores: float64 [n], sums of the probabilities.
    """

    tokens: np.ndarray
    probabilities: np.ndarray
    lengths: np.ndarray
    matches: np.ndarray
    trees: np.ndarray
    supports: np.ndarray
    scores: np.ndarray

    @classmethod
    def empty(cls, rows: int, width: int) -> Drafts:
        shape = (rows, width)
        lengths, matches, supports = (np.zeros(rows, np.int32) for _ in range(3))
        none = np.full(rows, -1, np.int32)
        return cls(np.zeros(shape, np.int32), np.zeros(shape), lengths, matches, none, supports, np.zeros(rows))


class SuffixForest(ABC):
    """Trees and texts, identified by numbers that the forest assigns and that are never 0."""

    def __init__(self, depth: int, early_depth: int | None = None) -> None:
        if not 2 <= depth <= MAX_DEPTH:
            raise ValueError(f"the depth of a suffix tree must be in [2, {MAX_DEPTH}], got {depth}")
        self.depth = depth
        self.early_depth = depth if early_depth is None else min(early_depth, depth)
        if self.early_depth < 1:
            raise ValueError(f"the early depth must be at least 1, got {early_depth}")

    @abstractmethod
    def new_tree(self) -> int: ...

    @abstractmethod
    def delete_tree(self, tree: int) -> None:
        """Delete an empty tree; ``ValueError`` if it has texts."""

    @abstractmethod
    def new_text(self, trees: tuple[int, int], begin: int = 0) -> int:
        """A text without tokens in up to two trees, which will contain its suffixes from position ``begin`` on."""

    @abstractmethod
    def extend(self, texts: np.ndarray, tokens: np.ndarray, offsets: np.ndarray) -> None:
        """Append ``tokens[offsets[i] : offsets[i + 1]]`` (int32) to text number ``texts[i]`` (uint32 [n])."""

    @abstractmethod
    def finish(self, text: int) -> None:
        """End a text: insert its last suffixes, which are shorter than the depth."""

    @abstractmethod
    def remove(self, text: int) -> None:
        """Remove a text and all its suffixes."""

    @abstractmethod
    def draft(self, texts: np.ndarray, most: np.ndarray, params: DraftParams) -> Drafts:
        """Continuations of the texts (uint32 [n]), of up to ``most`` (int32 [n]) tokens each."""

    @abstractmethod
    def count(self, tree: int, pattern: np.ndarray) -> int:
        """Occurrences of a run of up to ``depth`` tokens (int32) in a tree."""

    @abstractmethod
    def tokens(self, text: int) -> np.ndarray:
        """A copy of a text's tokens, int32."""

    @property
    @abstractmethod
    def num_nodes(self) -> int: ...

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Memory held by nodes, edges and texts."""


class _Node:
    __slots__ = ("best", "children", "count", "length", "parent", "position", "text", "token")

    def __init__(self, token: int, parent: _Node | None, count: int, text: list[int], position: int, length: int):
        self.token, self.parent, self.count = token, parent, count
        self.text, self.position, self.length = text, position, length  # the edge: text[position : position + length]
        self.children: dict[int, _Node] = {}
        self.best: _Node | None = None  # None: not known, see best_child

    def best_child(self) -> _Node | None:
        if self.best is None and self.children:
            self.best = min(self.children.values(), key=lambda child: (-child.count, child.token))
        return self.best


@dataclass
class _Text:
    trees: tuple[int, int]
    begin: int
    inserted: int  # suffixes [begin, inserted) are in the trees with their full depth
    early: int  # suffixes [inserted, early) are in the trees, cut at the early depth
    tokens: list[int]


class PythonSuffixForest(SuffixForest):
    def __init__(self, depth: int, early_depth: int | None = None) -> None:
        super().__init__(depth, early_depth)
        self._roots: dict[int, _Node] = {}
        self._texts: dict[int, _Text] = {}
        self._next_tree = self._next_text = 1
        self._num_nodes = 0

    def new_tree(self) -> int:
        tree, self._next_tree = self._next_tree, self._next_tree + 1
        self._roots[tree] = _Node(-1, None, 0, [], 0, 0)
        self._num_nodes += 1
        return tree

    def delete_tree(self, tree: int) -> None:
        if self._roots[tree].count:
            raise ValueError(f"tree {tree} still has texts")
        del self._roots[tree]
        self._num_nodes -= 1

    def new_text(self, trees: tuple[int, int], begin: int = 0) -> int:
        text, self._next_text = self._next_text, self._next_text + 1
        self._texts[text] = _Text(trees, begin, begin, begin, [])
        return text

    def extend(self, texts: np.ndarray, tokens: np.ndarray, offsets: np.ndarray) -> None:
        new = tokens.tolist()
        for number, first, end in zip(texts.tolist(), offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
            text = self._texts[number]
            text.tokens += new[first:end]
            length = len(text.tokens)
            self._insert_until(text, length - self.depth + 1, length - self.early_depth + 1)

    def finish(self, text: int) -> None:
        self._insert_until(self._texts[text], len(self._texts[text].tokens), 0)

    def remove(self, text: int) -> None:
        removed = self._texts[text]
        for start in range(removed.begin, max(removed.inserted, removed.early)):
            self._take_out(removed, start, self.depth if start < removed.inserted else self.early_depth)
        del self._texts[text]

    def draft(self, texts: np.ndarray, most: np.ndarray, params: DraftParams) -> Drafts:
        drafts = Drafts.empty(len(texts), params.width)
        for row, (number, cap) in enumerate(zip(texts.tolist(), most.tolist(), strict=True)):
            text = self._texts[number]
            context = text.tokens[1 - self.depth :]
            for which, tree in enumerate(text.trees):
                if tree != NO_TREE and cap > 0:
                    self._draft_from(drafts, row, which, self._roots[tree], context, min(cap, params.width), params)
        return drafts

    def count(self, tree: int, pattern: np.ndarray) -> int:
        point = self._find(self._roots[tree], pattern.tolist())
        return point[0].count if point else 0

    def tokens(self, text: int) -> np.ndarray:
        return np.array(self._texts[text].tokens, np.int32)

    @property
    def num_nodes(self) -> int:
        return self._num_nodes

    @property
    def num_bytes(self) -> int:
        """An estimate of the nodes with their dictionaries and of the texts' lists."""
        return 420 * self._num_nodes + sum(88 + 8 * len(text.tokens) for text in self._texts.values())

    def _insert_until(self, text: _Text, end: int, early_end: int) -> None:
        while text.inserted < end:
            self._insert(text, text.inserted, self.depth, self.early_depth if text.inserted < text.early else 0)
            text.inserted += 1
        text.early = max(text.early, text.inserted)
        while text.early < early_end:
            self._insert(text, text.early, self.early_depth, 0)
            text.early += 1

    def _insert(self, text: _Text, start: int, depth: int, counted: int) -> None:
        end = min(start + depth, len(text.tokens))
        for tree in text.trees:
            if tree != NO_TREE:
                self._insert_suffix(self._roots[tree], text.tokens, start, end, start + counted)

    def _take_out(self, text: _Text, start: int, depth: int) -> None:
        for tree in text.trees:
            if tree != NO_TREE:
                self._remove_suffix(self._roots[tree], text.tokens[start : start + depth])

    def _insert_suffix(self, root: _Node, tokens: list[int], start: int, end: int, counted: int) -> None:
        """Insert the suffix [start, end), or extend the one that ends at ``counted`` (``start`` for a new one)."""
        node, is_new, old_end = root, counted == start, None
        root.count += is_new
        while start < end:
            if start == counted and not is_new:
                old_end = node
            child = node.children.get(tokens[start])
            if child is None:
                child = node.children[tokens[start]] = _Node(tokens[start], node, 1, tokens, start, end - start)
                self._num_nodes += 1
                start = end
            else:
                same = _common(child, tokens, start, end)
                if same < child.length:
                    child = self._split(child, same)
                child.count += start >= counted
                child.text, child.position = tokens, start
                start += same
            best = node.best
            if best is not None and (-child.count, child.token) < (-best.count, best.token):
                node.best = child
            node = child
        if old_end is not None:
            self._join_with_only_child(old_end, root)  # the suffix no longer ends there

    def _remove_suffix(self, root: _Node, suffix: list[int]) -> None:
        node, done = root, 0
        root.count -= 1
        while done < len(suffix):
            child = node.children[suffix[done]]
            child.count -= 1
            if node.best is child:
                node.best = None
            if not child.count:
                del node.children[child.token]
                self._num_nodes -= 1
                break
            done += child.length
            node = child
        self._join_with_only_child(node, root)

    def _split(self, lower: _Node, length: int) -> _Node:
        parent = lower.parent
        upper = _Node(lower.token, parent, lower.count, lower.text, lower.position, length)
        parent.children[lower.token] = upper
        if parent.best is lower:
            parent.best = upper
        lower.position += length
        lower.length -= length
        lower.token, lower.parent = lower.text[lower.position], upper
        upper.children[lower.token] = upper.best = lower
        self._num_nodes += 1
        return upper

    def _join_with_only_child(self, node: _Node, root: _Node) -> None:
        """Merge a node and its only child if no suffix ends at the node."""
        if node is root or len(node.children) != 1:
            return
        (child,) = node.children.values()
        if child.count != node.count:
            return
        parent = node.parent
        child.position -= node.length
        child.length += node.length
        child.token, child.parent = node.token, parent
        parent.children[child.token] = child
        if parent.best is node:
            parent.best = child
        self._num_nodes -= 1

    @staticmethod
    def _find(root: _Node, pattern: Sequence[int]) -> tuple[_Node, int] | None:
        """The node in whose edge the path ``pattern`` ends, and the tokens of that edge on the path; None: no path."""
        node, done, taken = root, 0, 0
        while done < len(pattern):
            node = node.children.get(pattern[done])
            if node is None:
                return None
            taken = min(node.length, len(pattern) - done)
            if node.text[node.position : node.position + taken] != pattern[done : done + taken]:
                return None
            done += taken
        return node, taken

    def _draft_from(
        self, drafts: Drafts, row: int, which: int, root: _Node, context: list[int], cap: int, params: DraftParams
    ) -> None:
        for match in range(1, len(context) + 1):
            allowed = min(cap, int(match * params.factor + params.offset), self.depth - match)
            best = drafts.scores[row]
            if allowed <= 0 or allowed < best:
                continue  # even probabilities of 1 would not win
            point = self._find(root, context[-match:])
            if point is None:
                return  # longer matches do not exist either
            tokens, probabilities, score = _walk(*point, allowed, params)
            if tokens and (score > best or (score == best and drafts.trees[row] == which)):
                drafts.tokens[row, : len(tokens)] = tokens
                drafts.probabilities[row, : len(tokens)] = probabilities
                drafts.lengths[row], drafts.matches[row] = len(tokens), match
                drafts.trees[row], drafts.scores[row] = which, score
                drafts.supports[row] = point[0].count


def _common(node: _Node, tokens: list[int], start: int, end: int) -> int:
    """Length of the common prefix of the node's edge and ``tokens[start:end]``."""
    most = min(node.length, end - start)
    edge, own = node.text[node.position : node.position + most], tokens[start : start + most]
    if edge == own:
        return most
    return next(i for i in range(most) if edge[i] != own[i])


def _walk(node: _Node, taken: int, most: int, params: DraftParams) -> tuple[list[int], list[float], float]:
    tokens: list[int] = []
    probabilities: list[float] = []
    probability, score = 1.0, 0.0
    while len(tokens) < most:
        if taken == node.length:
            child = node.best_child()
            if child is None:
                break
            probability *= child.count / node.count
            if probability < params.min_probability:
                break
            node, taken = child, 0
        tokens.append(node.text[node.position + taken])
        probabilities.append(probability)
        score += probability
        taken += 1
    return tokens, probabilities, score
