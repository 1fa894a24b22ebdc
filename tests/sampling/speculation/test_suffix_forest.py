"""Suffix forests against a naive counter of suffixes: counts, drafts, removal."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conftest import REPOSITORY, seed_all
from megatron_dta.sampling.speculation.suffix_forest import DraftParams, SuffixForest


class NaiveForest:
    """Counts by looking at all texts again: texts as (trees, begin, tokens, finished)."""

    def __init__(self, depth: int, early_depth: int) -> None:
        self.depth, self.early_depth = depth, early_depth
        self.texts: dict[int, list] = {}

    def runs(self, tree: int) -> list[tuple[int, ...]]:
        result = []
        for trees, begin, tokens, finished in self.texts.values():
            end = len(tokens) if finished else len(tokens) - self.depth + 1
            early_end = 0 if finished else len(tokens) - self.early_depth + 1
            text_runs = [tuple(tokens[i : i + self.depth]) for i in range(begin, end)]
            text_runs += [tuple(tokens[i : i + self.early_depth]) for i in range(max(begin, end), early_end)]
            result += text_runs * trees.count(tree)
        return result

    def count(self, tree: int, pattern: tuple[int, ...]) -> int:
        return sum(run[: len(pattern)] == pattern for run in self.runs(tree))

    def draft(self, text: int, most: int, params: DraftParams) -> tuple[list[int], list[float], int, int, float]:
        trees, _, tokens, _ = self.texts[text]
        best: tuple[list[int], list[float], int, int, float] = ([], [], 0, -1, 0.0)
        for which, tree in enumerate(trees):
            if tree == 0:
                continue
            runs = self.runs(tree)
            for match in range(1, min(self.depth - 1, len(tokens)) + 1):
                path = tuple(tokens[-match:])
                if not any(run[:match] == path for run in runs):
                    break
                drafted, probabilities, probability = [], [], 1.0
                for _ in range(min(most, params.width, int(match * params.factor + params.offset))):
                    here = [run for run in runs if run[: len(path)] == path]
                    following = [run[len(path)] for run in here if len(run) > len(path)]
                    if not following:
                        break
                    token = min(set(following), key=lambda t: (-following.count(t), t))
                    # A ratio of equal counts leaves the product as it is, so the roundings are the tree's.
                    probability *= following.count(token) / len(here)
                    if probability < params.min_probability:
                        break
                    drafted.append(token)
                    probabilities.append(probability)
                    path += (token,)
                score = 0.0
                for p in probabilities:
                    score += p
                if drafted and (score > best[4] or (score == best[4] and best[3] == which)):
                    best = (drafted, probabilities, match, which, score)
        return best


class Pair:
    """The same operations on the naive counter and on a forest."""

    def __init__(self, depth: int, early_depth: int) -> None:
        self.naive, self.forest = NaiveForest(depth, early_depth), SuffixForest(depth, early_depth)
        self.trees = [0, *(self.forest.new_tree() for _ in range(3))]
        self.numbers: dict[int, int] = {}
        self.next = 0

    def open(self, first: int, second: int, begin: int) -> None:
        """Trees are numbered 1 to 3, 0 is none."""
        self.naive.texts[self.next] = [(first, second), begin, [], False]
        self.numbers[self.next] = self.forest.new_text((self.trees[first], self.trees[second]), begin)
        self.next += 1

    def extend(self, texts: list[int], pieces: list[list[int]]) -> None:
        for text, piece in zip(texts, pieces, strict=True):
            self.naive.texts[text][2] += piece
        tokens = np.array([token for piece in pieces for token in piece], np.int32)
        numbers = np.array([self.numbers[text] for text in texts], np.uint32)
        self.forest.extend(numbers, tokens, np.cumsum([0, *map(len, pieces)]))

    def finish(self, text: int) -> None:
        self.naive.texts[text][3] = True
        self.forest.finish(self.numbers[text])

    def remove(self, text: int) -> None:
        del self.naive.texts[text]
        self.forest.remove(self.numbers.pop(text))

    def check_counts(self) -> None:
        for tree in (1, 2, 3):
            runs = self.naive.runs(tree)
            patterns = {run[:n] for run in runs for n in range(1, len(run) + 1)} | {(99,), (0, 99), (1, 0, 1, 0)}
            for pattern in patterns:
                counted = self.forest.count(self.trees[tree], np.array(pattern, np.int32))
                assert counted == self.naive.count(tree, pattern), (tree, pattern)

    def check_drafts(self, most: int, params: DraftParams) -> None:
        texts = list(self.naive.texts)
        numbers = np.array([self.numbers[text] for text in texts], np.uint32)
        drafts = self.forest.draft(numbers, np.full(len(texts), most, np.int32), params)
        for row, text in enumerate(texts):
            n, match = drafts.lengths[row], int(drafts.matches[row])
            *expected, tree, _ = self.naive.draft(text, most, params)
            assert [drafts.tokens[row, :n].tolist(), drafts.probabilities[row, :n].tolist(), match] == expected, text
            trees, _, tokens, _ = self.naive.texts[text]
            support = self.naive.count(trees[tree], tuple(tokens[len(tokens) - match :])) if n else 0
            assert drafts.supports[row] == support


TOKENS = st.lists(st.integers(0, 2), max_size=12)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_forest_is_the_naive_counter(data: st.DataObject) -> None:
    depth = data.draw(st.integers(2, 6))
    pair = Pair(depth, data.draw(st.integers(1, depth)))
    for _ in range(data.draw(st.integers(1, 14))):
        live = [text for text, entry in pair.naive.texts.items() if not entry[3]]
        action = data.draw(st.sampled_from(["open", "extend", "finish", "remove"]))
        if action == "open" or not pair.naive.texts:
            first, second = data.draw(st.sampled_from([(1, 0), (1, 3), (2, 3), (0, 3), (2, 0)]))
            pair.open(first, second, data.draw(st.integers(0, 3)))
        elif action == "extend" and live:
            texts = data.draw(st.lists(st.sampled_from(live), unique=True, min_size=1))
            pair.extend(texts, [data.draw(TOKENS) for _ in texts])
        elif action == "finish" and live:
            pair.finish(data.draw(st.sampled_from(live)))
        elif action == "remove":
            pair.remove(data.draw(st.sampled_from(sorted(pair.naive.texts))))
    pair.check_counts()
    factor, offset = data.draw(st.sampled_from([(1.0, 0.0), (2.0, 0.0), (0.5, 1.0), (4.0, -2.0)]))
    pair.check_drafts(data.draw(st.integers(0, 7)), DraftParams(factor, offset, 0.15, 5))


def test_drafts_of_running_texts() -> None:
    """Whose longer suffixes are in the trees before shorter ones are."""
    rng, pair = seed_all(1), Pair(8, 6)
    for _ in range(3):
        pair.open(1, 2, 0)
    base = rng.integers(0, 6, 20)
    for _ in range(30):
        pair.extend([0, 1, 2], [base[begin : begin + rng.integers(0, 6)].tolist() for begin in rng.integers(0, 16, 3)])
        pair.check_drafts(9, DraftParams(1.0, 0.0, 0.1, 9))


@pytest.mark.parametrize("seed", [0, 1])
def test_removal_undoes_insertion(seed: int) -> None:
    """Also of the newest text, whose tokens edges refer to; and an empty tree is as it was made."""
    rng = seed_all(seed)
    forest = SuffixForest(7, 3)
    trees = forest.new_tree(), forest.new_tree()
    params = DraftParams(width=9)

    def add(begin: int = 0) -> int:
        text = forest.new_text(trees, begin)
        for _ in range(3):
            tokens = rng.integers(0, 4, rng.integers(0, 40)).astype(np.int32)
            forest.extend(np.array([text], np.uint32), tokens, np.array([0, len(tokens)]))
        return text

    kept = [add() for _ in range(12)]
    for text in kept[::2]:
        forest.finish(text)
    probes = np.array(kept, np.uint32)

    def state() -> tuple:
        drafts = forest.draft(probes, np.full(len(kept), 9, np.int32), params)
        return (forest.num_nodes, *(array.tolist() for array in vars(drafts).values()))

    before = state()
    for _ in range(5):
        extra = [add(int(rng.integers(0, 3))) for _ in range(6)]
        for text in extra[::3]:
            forest.finish(text)
        assert state() != before
        for i in rng.permutation(len(extra)):
            forest.remove(extra[i])
        assert state() == before
    with pytest.raises(ValueError, match="still has texts"):
        forest.delete_tree(trees[0])
    for text in kept:
        forest.remove(text)
    assert forest.num_nodes == 2
    for tree in trees:
        forest.delete_tree(tree)
    assert forest.num_nodes == 0


@pytest.mark.parametrize("seed", [0, 1])
def test_order_of_texts_does_not_matter(seed: int) -> None:
    """All ranks, and a drafter rebuilt from a checkpoint in another order, draft alike."""
    rng = seed_all(seed)
    texts = [rng.integers(0, 3, n).astype(np.int32) for n in rng.integers(1, 60, 25)]
    results = []
    for order in (range(25), rng.permutation(25)):
        forest = SuffixForest(10, 4)
        tree, numbers = forest.new_tree(), {}
        for i in order:
            numbers[i] = forest.new_text((tree, 0))
            forest.extend(np.array([numbers[i]], np.uint32), texts[i], np.array([0, len(texts[i])]))
            forest.finish(numbers[i])
        rows = np.array([numbers[i] for i in range(25)], np.uint32)
        drafts = forest.draft(rows, np.full(25, 8, np.int32), DraftParams(width=8))
        results.append([array.tolist() for array in vars(drafts).values()])
    assert results[0] == results[1]
    assert sum(results[0][2]) > 25


def test_without_a_compiler(tmp_path) -> None:
    code = "from megatron_dta.sampling.speculation.suffix_forest import SuffixForest\nSuffixForest(5, 2)"
    environment = {"PATH": str(tmp_path), "MEGATRON_DTA_CACHE": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=REPOSITORY, check=False
    )
    assert "InputError: drafts need a C compiler, and none was found (cc, gcc, clang); install one" in done.stderr
