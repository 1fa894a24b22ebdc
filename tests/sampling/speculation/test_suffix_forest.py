"""Suffix forests against a naive counter of suffixes: counts, drafts, removal, both implementations alike."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conftest import REPOSITORY, seed_all
from forked import run_python
from megatron_dta.sampling.speculation import native
from megatron_dta.sampling.speculation.suffix_forest import DraftParams, PythonSuffixForest, SuffixForest


def native_forest(depth: int, early_depth: int | None = None) -> SuffixForest:
    try:
        return native.NativeSuffixForest(depth, early_depth)
    except native.NativeUnavailable as error:
        pytest.skip(f"no C implementation here: {error}")


FORESTS = {"native": native_forest, "python": PythonSuffixForest}


class NaiveForest:
    """Counts by looking at all texts again: texts as (trees, begin, tokens, finished)."""

    def __init__(self, depth: int, early_depth: int) -> None:
        self.depth, self.early_depth = depth, early_depth
        self.texts: dict[int, list] = {}

    def runs(self, tree: int) -> list[tuple[int, ...]]:
        found = []
        for trees, begin, tokens, finished in self.texts.values():
            end = len(tokens) if finished else len(tokens) - self.depth + 1
            early_end = 0 if finished else len(tokens) - self.early_depth + 1
            own = [tuple(tokens[i : i + self.depth]) for i in range(begin, end)]
            own += [tuple(tokens[i : i + self.early_depth]) for i in range(max(begin, end), early_end)]
            found += own * trees.count(tree)
        return found

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


class Trio:
    """The same operations on the naive counter and on the forests under test."""

    def __init__(self, depth: int, early_depth: int, makers: list[str]) -> None:
        self.naive = NaiveForest(depth, early_depth)
        self.forests = [FORESTS[name](depth, early_depth) for name in makers]
        self.trees = [[forest.new_tree() for _ in range(3)] for forest in self.forests]
        self.numbers: list[dict[int, int]] = [{} for _ in self.forests]
        self.next = 0

    def open(self, first: int, second: int, begin: int) -> None:
        """Trees are numbered 1 to 3, 0 is none."""
        self.naive.texts[self.next] = [(first, second), begin, [], False]
        for forest, trees, numbers in zip(self.forests, self.trees, self.numbers, strict=True):
            own = tuple(0 if tree == 0 else trees[tree - 1] for tree in (first, second))
            numbers[self.next] = forest.new_text(own, begin)
        self.next += 1

    def extend(self, texts: list[int], pieces: list[list[int]]) -> None:
        offsets = np.cumsum([0, *map(len, pieces)])
        tokens = np.array([token for piece in pieces for token in piece], np.int32)
        for text, piece in zip(texts, pieces, strict=True):
            self.naive.texts[text][2] += piece
        for forest, numbers in zip(self.forests, self.numbers, strict=True):
            forest.extend(np.array([numbers[t] for t in texts], np.uint32), tokens, offsets)

    def finish(self, text: int) -> None:
        self.naive.texts[text][3] = True
        for forest, numbers in zip(self.forests, self.numbers, strict=True):
            forest.finish(numbers[text])

    def remove(self, text: int) -> None:
        del self.naive.texts[text]
        for forest, numbers in zip(self.forests, self.numbers, strict=True):
            forest.remove(numbers.pop(text))

    def check_counts(self) -> None:
        for tree in (1, 2, 3):
            runs = self.naive.runs(tree)
            patterns = {run[:n] for run in runs for n in range(1, len(run) + 1)} | {(99,), (0, 99), (1, 0, 1, 0)}
            for pattern in patterns:
                expected = self.naive.count(tree, pattern)
                for forest, trees in zip(self.forests, self.trees, strict=True):
                    assert forest.count(trees[tree - 1], np.array(pattern, np.int32)) == expected, (tree, pattern)
        assert len({forest.num_nodes for forest in self.forests}) == 1

    def check_drafts(self, most: int, params: DraftParams) -> None:
        texts = list(self.naive.texts)
        for forest, numbers in zip(self.forests, self.numbers, strict=True):
            caps = np.full(len(texts), most, np.int32)
            drafts = forest.draft(np.array([numbers[t] for t in texts], np.uint32), caps, params)
            for row, text in enumerate(texts):
                n = drafts.lengths[row]
                found = drafts.tokens[row, :n].tolist(), drafts.probabilities[row, :n].tolist()
                found += int(drafts.matches[row]), int(drafts.trees[row]), float(drafts.scores[row])
                assert found == self.naive.draft(text, most, params), text
                trees, _, tokens, _ = self.naive.texts[text]
                match = tuple(tokens[len(tokens) - found[2] :])
                support = self.naive.count(trees[found[3]], match) if n else 0
                assert drafts.supports[row] == support


TOKENS = st.lists(st.integers(0, 2), max_size=12)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.parametrize("makers", [["native"], ["python"], ["native", "python"]])
def test_forest_is_the_naive_counter(makers: list[str], data: st.DataObject) -> None:
    depth = data.draw(st.integers(2, 6))
    trio = Trio(depth, data.draw(st.integers(1, depth)), makers)
    for _ in range(data.draw(st.integers(1, 14))):
        live = [text for text, entry in trio.naive.texts.items() if not entry[3]]
        action = data.draw(st.sampled_from(["open", "extend", "finish", "remove"]))
        if action == "open" or not trio.naive.texts:
            first, second = data.draw(st.sampled_from([(1, 0), (1, 3), (2, 3), (0, 3), (2, 0)]))
            trio.open(first, second, data.draw(st.integers(0, 3)))
        elif action == "extend" and live:
            texts = data.draw(st.lists(st.sampled_from(live), unique=True, min_size=1))
            trio.extend(texts, [data.draw(TOKENS) for _ in texts])
        elif action == "finish" and live:
            trio.finish(data.draw(st.sampled_from(live)))
        elif action == "remove":
            trio.remove(data.draw(st.sampled_from(sorted(trio.naive.texts))))
    trio.check_counts()
    factor, offset = data.draw(st.sampled_from([(1.0, 0.0), (2.0, 0.0), (0.5, 1.0), (4.0, -2.0)]))
    trio.check_drafts(data.draw(st.integers(0, 7)), DraftParams(factor, offset, 0.15, 5))


@pytest.mark.parametrize(("name", "seed"), [("native", 0), ("native", 1), ("python", 2)])
def test_removal_undoes_insertion(name: str, seed: int) -> None:
    """Also of the newest text, whose tokens edges refer to; and an empty tree is as it was made."""
    rng = seed_all(seed)
    forest = FORESTS[name](7, 3)
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
    """All ranks, and a drafter rebuilt from a checkpoint in another order, draft alike; so do both implementations."""
    rng = seed_all(seed)
    texts = [rng.integers(0, 3, n).astype(np.int32) for n in rng.integers(1, 60, 25)]
    results = []
    for name, order in (("native", range(25)), ("native", rng.permutation(25)), ("python", rng.permutation(25))):
        forest = FORESTS[name](10, 4)
        tree, numbers = forest.new_tree(), {}
        for i in order:
            numbers[i] = forest.new_text((tree, 0))
            forest.extend(np.array([numbers[i]], np.uint32), texts[i], np.array([0, len(texts[i])]))
            forest.finish(numbers[i])
        rows = np.array([numbers[i] for i in range(25)], np.uint32)
        drafts = forest.draft(rows, np.full(25, 8, np.int32), DraftParams(width=8))
        results.append([array.tolist() for array in vars(drafts).values()])
    assert results[0] == results[1] == results[2]
    assert sum(results[0][2]) > 25


def test_no_edge_is_deeper_than_the_depth() -> None:
    forest = native_forest(4)
    tree = forest.new_tree()
    text = forest.new_text((tree, 0))
    forest.extend(np.array([text], np.uint32), np.arange(50, dtype=np.int32), np.array([0, 50]))
    forest.finish(text)
    assert forest.count(tree, np.arange(9, 13, dtype=np.int32)) == 1
    assert forest.count(tree, np.arange(9, 14, dtype=np.int32)) == 0


@pytest.mark.parametrize(("mean_length", "vocabulary"), [(400, 30), (60, 5000)])
def test_memory_of_a_token(mean_length: int, vocabulary: int) -> None:
    """Worst case, text without repetition, in two trees: a leaf for each of a token's two suffixes."""
    rng = seed_all(3)
    forest = native_forest(24, 6)
    trees, total = (forest.new_tree(), forest.new_tree()), 0
    while total < 100_000:
        tokens = rng.integers(0, vocabulary, rng.poisson(mean_length) + 1).astype(np.int32)
        text = forest.new_text(trees)
        forest.extend(np.array([text], np.uint32), tokens, np.array([0, len(tokens)]))
        forest.finish(text)
        total += len(tokens)
    assert forest.num_bytes / total < 300
    print(forest.num_bytes / total)


def test_without_a_compiler(tmp_path) -> None:
    """The fallback is taken, said once, and drafts."""
    code = (
        "import logging; logging.basicConfig()\n"
        "from megatron_dta.sampling.speculation.native import create_forest\n"
        "print([type(create_forest(5)).__name__ for _ in range(2)])"
    )
    environment = {"PATH": str(tmp_path), "MEGATRON_DTA_CACHE": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=REPOSITORY, check=True
    )
    assert done.stdout.strip() == "['PythonSuffixForest', 'PythonSuffixForest']"
    assert done.stderr.count("plain Python") == 1
    assert "no C compiler" in done.stderr


@pytest.mark.parametrize("depth", [1, 256])
def test_depth_out_of_range(depth: int) -> None:
    with pytest.raises(ValueError, match="depth"):
        PythonSuffixForest(depth)


def test_the_benchmark_measures_both() -> None:
    flags = "--live 3 --tokens 12 --rounds 1 --depth 6 --json"
    done = run_python(["benchmarks/drafter.py", *flags.split()])
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert [row["code"] for row in rows] == ["c", "python"]
    assert all(row["insert_microseconds"] > 0 and row["draft_microseconds"] > 0 for row in rows if "error" not in row)
    done = run_python(["benchmarks/drafter.py", "--live", "0"])
    assert (done.returncode, done.stderr.strip()) == (2, "error: --live 0: must be at least 1")
