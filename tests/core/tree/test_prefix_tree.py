"""The prefix forest against a slow twin made of nested dictionaries, and at the extremes of depth and width."""

import sys
import time
import tracemalloc

import numpy as np
import pytest

from conftest import seed_all
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.tree import PrefixTree, build_forest_without_sharing, build_prefix_tree, tree_statistics


def random_sequences(rng: np.random.Generator) -> list[np.ndarray]:
    """Few symbols and lengths around the chunk width: shared prefixes, prefixes of others and duplicates abound."""
    symbols = int(rng.integers(1, 4))
    stems = [rng.integers(0, symbols, int(rng.integers(0, 300))) for _ in range(int(rng.integers(1, 4)))]
    sequences = []
    for _ in range(int(rng.integers(0, 25))):
        stem = stems[int(rng.integers(len(stems)))]
        head = stem[: int(rng.choice([0, len(stem), rng.integers(0, len(stem) + 1)]))]
        tokens = np.concatenate([head, rng.integers(0, symbols, int(rng.integers(0, 7)))])
        if len(tokens):
            sequences.append(tokens.astype(np.int32))
    if sequences:
        sequences += [sequences[int(i)].copy() for i in rng.integers(0, len(sequences), int(rng.integers(0, 4)))]
        sequences = [sequences[int(i)] for i in rng.permutation(len(sequences))]
    return sequences


class Trie:
    """One dictionary per token: child token -> (child, how many sequences end there)."""

    def __init__(self, sequences: list[np.ndarray]) -> None:
        self.prefixes: dict[tuple[int, ...], int] = {}  # prefix -> sequences that end with it
        self.children: dict[tuple[int, ...], set[int]] = {}
        for sequence in sequences:
            tokens = tuple(sequence.tolist())
            for length in range(1, len(tokens) + 1):
                self.prefixes.setdefault(tokens[:length], 0)
                self.children.setdefault(tokens[: length - 1], set()).add(tokens[length - 1])
            self.prefixes[tokens] += 1

    def node_starts(self) -> set[tuple[int, ...]]:
        """Prefixes whose last token begins a node: a root, a branch, or what follows the end of a sequence."""
        return {
            prefix
            for prefix in self.prefixes
            if len(prefix) == 1 or len(self.children[prefix[:-1]]) > 1 or self.prefixes[prefix[:-1]]
        }


def prefix_of_each_token(tree: PrefixTree) -> list[tuple[int, ...]]:
    prefixes: list[tuple[int, ...]] = []
    for token, parent in zip(tree.token_ids.tolist(), tree.parent.tolist(), strict=True):
        assert parent < len(prefixes)
        prefixes.append((prefixes[parent] if parent >= 0 else ()) + (token,))
    return prefixes


def check_structure(tree: PrefixTree, sequences: list[np.ndarray]) -> None:
    """What holds for every forest of these sequences, shared or not: dtypes, preorder, subtrees, nodes, maps."""
    n, m, q = tree.num_tokens, tree.num_nodes, tree.num_sequences
    for array, dtype, size in (
        (tree.token_ids, np.int32, n),
        (tree.parent, np.int32, n),
        (tree.position, np.int32, n),
        (tree.subtree_end, np.int32, n),
        (tree.node_start, np.int64, m + 1),
        (tree.node_parent, np.int32, m),
        (tree.node_position, np.int32, m),
        (tree.node_subtree_end, np.int32, m),
        (tree.sequence_node, np.int32, q),
        (tree.sequence_lengths, np.int64, q),
    ):
        assert array.dtype == dtype
        assert array.shape == (size,)
    parent = tree.parent.tolist()
    ancestors: list[set[int]] = []
    for i in range(n):
        ancestors.append({i} | (ancestors[parent[i]] if parent[i] >= 0 else set()))
        assert tree.position[i] == len(ancestors[i]) - 1
    for k in range(n):  # The visibility rule is the ancestor relation.
        sees = [q_index for q_index in range(n) if k in ancestors[q_index]]
        assert sees == list(range(k, tree.subtree_end[k]))
    node_of = np.repeat(np.arange(m), np.diff(tree.node_start))
    assert len(node_of) == n
    for node in range(m):
        begin, end = tree.node_start[node], tree.node_start[node + 1]
        assert end > begin
        assert parent[begin + 1 : end] == list(range(begin, end - 1))
        up = parent[begin]
        assert tree.node_parent[node] == (node_of[up] if up >= 0 else -1)
        assert up < 0 or up == tree.node_start[node_of[up] + 1] - 1
        assert tree.node_position[node] == tree.position[begin]
        assert tree.node_depth[node] == len({node_of[i] for i in ancestors[begin]}) - 1
        after = tree.subtree_end[begin]
        assert tree.node_subtree_end[node] == (node_of[after] if after < n else m)
    assert tree.num_leaves == m - len(set(tree.node_parent.tolist()) - {-1})
    assert tree.sequence_lengths.tolist() == [len(sequence) for sequence in sequences]
    picked = np.arange(q)[::-1]
    everything, offsets = tree.stream_indices_of(picked)
    assert everything.dtype == np.int32
    assert offsets.dtype == np.int64
    for index, sequence in enumerate(sequences):
        indices = tree.stream_indices(index)
        assert indices.dtype == np.int32
        np.testing.assert_array_equal(tree.token_ids[indices], sequence)
        assert set(indices.tolist()) == ancestors[indices[-1]]
        assert indices[-1] == tree.node_start[tree.sequence_node[index] + 1] - 1
        row = q - 1 - index
        np.testing.assert_array_equal(everything[offsets[row] : offsets[row + 1]], indices)


@pytest.mark.parametrize("seed", range(10))
def test_random_forests_against_a_trie(seed: int) -> None:
    rng = seed_all(seed)
    sequences = random_sequences(rng)
    tree, trie = build_prefix_tree(sequences), Trie(sequences)
    check_structure(tree, sequences)
    prefixes = prefix_of_each_token(tree)
    assert len(set(prefixes)) == len(prefixes)
    assert set(prefixes) == set(trie.prefixes)
    assert {prefixes[start] for start in tree.node_start[:-1]} == trie.node_starts()
    by_tokens: dict[tuple[int, ...], int] = {}
    for sequence, node in zip(sequences, tree.sequence_node.tolist(), strict=True):
        assert by_tokens.setdefault(tuple(sequence.tolist()), node) == node


@pytest.mark.parametrize("seed", range(4))
def test_the_forest_does_not_depend_on_the_order_of_the_sequences(seed: int) -> None:
    rng = seed_all(seed)
    sequences = random_sequences(rng)
    permutation = rng.permutation(len(sequences))
    tree, shuffled = build_prefix_tree(sequences), build_prefix_tree([sequences[int(i)] for i in permutation])
    for name in ("token_ids", "parent", "position", "subtree_end", "node_start", "node_parent"):
        np.testing.assert_array_equal(getattr(tree, name), getattr(shuffled, name))
    np.testing.assert_array_equal(tree.sequence_node[permutation], shuffled.sequence_node)


@pytest.mark.parametrize("seed", range(2))
def test_forest_without_sharing(seed: int) -> None:
    rng = seed_all(seed)
    sequences = random_sequences(rng)
    tree = build_forest_without_sharing(sequences)
    check_structure(tree, sequences)
    np.testing.assert_array_equal(tree.token_ids, np.concatenate([np.zeros(0, np.int32), *sequences]))
    assert tree.num_nodes == tree.num_leaves == len(sequences)
    assert tree_statistics(tree).token_reuse == tree_statistics(tree).attention_reuse == 1.0


def random_preorder(rng: np.random.Generator, tree: PrefixTree) -> list[int]:
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(tree.node_parent.tolist()):
        children.setdefault(parent, []).append(node)
    order, stack = [], [-1]
    while stack:
        node = stack.pop()
        if node >= 0:
            order.append(node)
        below = children.get(node, [])
        stack += [below[int(i)] for i in rng.permutation(len(below))]
    return order


@pytest.mark.parametrize("seed", range(4))
def test_siblings_reordered(seed: int) -> None:
    rng = seed_all(seed)
    sequences = random_sequences(rng)
    tree = build_prefix_tree(sequences)
    order = random_preorder(rng, tree)
    reordered = tree.with_node_order(np.asarray(order, dtype=np.int64))
    check_structure(reordered, sequences)
    assert sorted(prefix_of_each_token(reordered)) == sorted(prefix_of_each_token(tree))
    starts = tree.node_start
    moved = [tree.token_ids[starts[node] : starts[node + 1]] for node in order]
    np.testing.assert_array_equal(reordered.token_ids, np.concatenate([np.zeros(0, np.int32), *moved]))


def test_no_sequences() -> None:
    for tree in (build_prefix_tree([]), build_forest_without_sharing([])):
        check_structure(tree, [])
        assert tree.num_tokens == tree.num_nodes == tree.num_leaves == 0
        indices, offsets = tree.stream_indices_of(np.zeros(0, np.int64))
        assert len(indices) == 0
        assert offsets.tolist() == [0]
        statistics = tree_statistics(tree.with_node_order([]))
        assert (statistics.tokens, statistics.token_reuse, statistics.attention_reuse, statistics.depth) == (0, 1, 1, 0)


def test_a_longer_chunk_of_zeros_is_not_a_shorter_sequence() -> None:
    """Chunks are padded with zeros when compared: token id 0 must not be taken for padding."""
    sequences = [np.zeros(length, np.int32) for length in (1, 2, 63, 64, 65, 191, 192, 193, 700)]
    sequences += [np.append(np.zeros(length, np.int32), np.int32(1)) for length in (1, 64, 192, 448)]
    check_structure(build_prefix_tree(sequences), sequences)


@pytest.mark.parametrize("build", [build_prefix_tree, build_forest_without_sharing])
@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (np.zeros(0, np.int32), "sequence 1 .* one or more"),
        (np.zeros((2, 2), np.int32), "sequence 1 .* flat"),
        (np.zeros(2, np.float32), "sequence 1 .* integer"),
        (np.array([1, 2**31]), "sequence 1 .* 32 bits"),
    ],
)
def test_bad_sequences_are_refused(build, bad: np.ndarray, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        build([np.ones(3, np.int32), bad])


def test_a_deep_chain() -> None:
    """A chain of 100,000 tokens: no recursion, and seconds rather than minutes."""
    depth = 100_000
    assert depth > sys.getrecursionlimit()
    chain = np.random.default_rng(0).integers(0, 1000, depth).astype(np.int32)
    tree = build_prefix_tree([chain, chain[: depth // 2], chain])
    np.testing.assert_array_equal(tree.stream_indices(0), np.arange(depth))
    assert tree.num_nodes == 2


def test_a_wide_tree() -> None:
    """100,000 leaves below one root, in well under the time that a loop of numpy calls per sequence would take."""
    width = 100_000
    rng = seed_all(3)
    sequences = list(np.stack([np.full(width, 5), rng.permutation(width), np.arange(width)], axis=1).astype(np.int32))
    begin = time.process_time()
    tree = build_prefix_tree(sequences)
    assert time.process_time() - begin < 10
    assert tree.num_nodes == tree.num_leaves + 1 == width + 1
    assert tree.num_tokens == 1 + 2 * width
    assert np.all(tree.parent[tree.node_start[1:-1]] == 0)
    assert tree.subtree_end[0] == tree.num_tokens
    indices, _ = tree.stream_indices_of(np.arange(width))
    np.testing.assert_array_equal(tree.token_ids[indices], np.concatenate(sequences))
    assert tree_statistics(tree).max_branching == width


def test_memory_stays_within_four_times_the_tokens() -> None:
    """Peak of building and of all arrays per token, as allocated; nothing shared is the worst case (slack: nodes)."""
    rng = seed_all(4)
    stem = rng.integers(0, 1000, 3000).astype(np.int32)
    shared = [np.concatenate([stem, rng.integers(0, 1000, 1000).astype(np.int32)]) for _ in range(200)]
    alone = [rng.integers(0, 10**6, 4000).astype(np.int32) for _ in range(200)]
    for sequences, limit in ((shared, 2.0), (alone, 4.05)):
        tracemalloc.start()
        tree = build_prefix_tree(sequences)
        building = tracemalloc.get_traced_memory()[1]
        _ = tree.parent, tree.position, tree.subtree_end
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        token_bytes = sum(sequence.nbytes for sequence in sequences)
        assert building < 2.0 * token_bytes
        assert peak < limit * token_bytes


@pytest.mark.parametrize("seed", range(4))
def test_statistics_against_counting(seed: int) -> None:
    rng = seed_all(100 + seed)
    sequences = random_sequences(rng)
    statistics, trie = tree_statistics(build_prefix_tree(sequences)), Trie(sequences)
    lengths = [len(sequence) for sequence in sequences]
    starts = trie.node_starts()
    ends = [prefix for prefix in trie.prefixes if len(trie.children.get(prefix, ())) != 1 or trie.prefixes[prefix]]
    branching = [len(trie.children[prefix]) for prefix in trie.prefixes if len(trie.children.get(prefix, ())) > 1]
    assert statistics.sequences == len(sequences)
    assert statistics.tokens == sum(lengths)
    assert statistics.unique_tokens == len(trie.prefixes)
    assert statistics.trees == len(trie.children.get((), ()))
    assert statistics.nodes == len(starts) == len(ends)
    assert statistics.leaves == sum(prefix not in trie.children for prefix in trie.prefixes)
    depths = [sum(prefix[:i] in starts for i in range(1, len(prefix) + 1)) for prefix in trie.prefixes]
    assert statistics.depth == max(depths, default=0)
    assert statistics.branching == pytest.approx(float(np.mean(branching)) if branching else 0.0, rel=1e-15)
    assert statistics.longest_sequence == max(lengths, default=0)
    if sequences:
        assert statistics.token_reuse == sum(lengths) / len(trie.prefixes)
        separate = sum(sum(range(1, length + 1)) for length in lengths)
        assert statistics.attention_reuse == separate / sum(map(len, trie.prefixes))
