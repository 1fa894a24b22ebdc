"""Times the building of prefix trees on synthetic batches: seconds, and peak memory against the tokens' own.

    python benchmarks/tree.py [--tokens 22500000] [--shape turns] [--runs 7] [--json]

Shapes of a batch:

    turns      agent trajectories, one sample per turn: one system prompt, a task prompt for 8 trajectories, 16 turns
    samples    16 samples per prompt
    unshared   sequences of 4,000 tokens that share nothing
    short      100,000 sequences (at most one per 25 tokens asked for) from one root

"seconds" is ``build_prefix_tree``; "arrays" is what the first use of parent, position and subtree_end adds. Memory is
measured in one more run that traces allocations: the peak during either, as a multiple of the sequences' own bytes.
"""

from __future__ import annotations

import statistics
import time
import tracemalloc
from collections.abc import Callable

import numpy as np
from rich.table import Table

from megatron_dta.common.command_line import CommandLineParser, check_at_least, print_json
from megatron_dta.common.console import Console
from megatron_dta.common.entry_point import run_entry_point
from megatron_dta.core.tree import PrefixTree, build_prefix_tree

VOCAB_SIZE = 151_936


def random_tokens(rng: np.random.Generator, length: int) -> np.ndarray:
    return rng.integers(0, VOCAB_SIZE, length, dtype=np.int32)


def per_turn_batch(rng: np.random.Generator, tokens: int) -> list[np.ndarray]:
    """Every turn of every trajectory is a sample that holds the turns before it."""
    sequences, total = [], 0
    system = random_tokens(rng, 3000)
    while total < tokens:
        prompt = np.concatenate([system, random_tokens(rng, 500)])
        for _ in range(8):
            trajectory = np.concatenate([prompt, random_tokens(rng, int(rng.integers(4000, 9000)))])
            for end in np.sort(rng.integers(len(prompt) + 1, len(trajectory) + 1, 16)):
                sequences.append(trajectory[:end].copy())
                total += int(end)
    return sequences


def sampled_batch(rng: np.random.Generator, tokens: int) -> list[np.ndarray]:
    sequences, total = [], 0
    while total < tokens:
        prompt = random_tokens(rng, 300)
        for _ in range(16):
            sequences.append(np.concatenate([prompt, random_tokens(rng, int(rng.integers(100, 1500)))]))
            total += len(sequences[-1])
    return sequences


def unshared_batch(rng: np.random.Generator, tokens: int) -> list[np.ndarray]:
    return [random_tokens(rng, 4000) for _ in range(-(-tokens // 4000))]


def short_batch(rng: np.random.Generator, tokens: int) -> list[np.ndarray]:
    count = max(1, min(100_000, tokens // 25))
    root = random_tokens(rng, 1)
    return [np.concatenate([root, random_tokens(rng, max(1, tokens // count - 1))]) for _ in range(count)]


SHAPES: dict[str, Callable[[np.random.Generator, int], list[np.ndarray]]] = {
    "turns": per_turn_batch,
    "samples": sampled_batch,
    "unshared": unshared_batch,
    "short": short_batch,
}


def derive_arrays(tree: PrefixTree) -> None:
    """Compute the arrays per token, which a tree derives on first use."""
    _ = tree.parent, tree.position, tree.subtree_end


def measure(shape: str, tokens: int, runs: int, seed: int) -> dict[str, float | int | str]:
    rng = np.random.default_rng(seed)
    sequences = SHAPES[shape](rng, tokens)
    sequences = [sequences[index] for index in rng.permutation(len(sequences))]  # As workers deliver: in any order.
    total = sum(map(len, sequences))
    build_seconds, array_seconds = [], []
    for _ in range(runs):
        begin = time.perf_counter()
        tree = build_prefix_tree(sequences)
        built = time.perf_counter()
        derive_arrays(tree)
        array_seconds.append(time.perf_counter() - built)
        build_seconds.append(built - begin)
        unique, nodes = tree.num_tokens, tree.num_nodes
        del tree
    tracemalloc.start()
    tree = build_prefix_tree(sequences)
    build_peak = tracemalloc.get_traced_memory()[1]
    derive_arrays(tree)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return {
        "shape": shape,
        "sequences": len(sequences),
        "tokens": total,
        "unique_tokens": unique,
        "nodes": nodes,
        "seconds_min": min(build_seconds),
        "seconds_median": statistics.median(build_seconds),
        "arrays_seconds_median": statistics.median(array_seconds),
        "build_memory_ratio": build_peak / (4 * total),
        "memory_ratio": peak / (4 * total),
    }


def print_table(rows: list[dict]) -> None:
    table = Table(title="Building prefix trees")
    for name in (
        "shape",
        "sequences",
        "tokens",
        "unique",
        "nodes",
        "s (min)",
        "(median)",
        "arrays s",
        "memory",
        "+ arrays",
    ):
        table.add_column(name, justify="left" if name == "shape" else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            row["shape"],
            *(f"{row[key]:,}" for key in ("sequences", "tokens", "unique_tokens", "nodes")),
            *(f"{row[key]:.3f}" for key in ("seconds_min", "seconds_median", "arrays_seconds_median")),
            *(f"{row[key]:.2f} x" for key in ("build_memory_ratio", "memory_ratio")),
        )
    console = Console()
    Console(width=max(console.width, 120)).print(table)


def main() -> None:
    parser = CommandLineParser(__doc__)
    parser.add_argument("--tokens", type=int, default=22_500_000, help="tokens in each batch, at least")
    parser.add_argument("--shape", choices=list(SHAPES), action="append", help="only this shape (may be repeated)")
    parser.add_argument("--runs", type=int, default=7, help="timed runs per shape; the minimum and median are printed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON list on the last line")
    arguments = parser.parse_args()
    check_at_least(arguments, 1, "tokens", "runs")
    check_at_least(arguments, 0, "seed")
    rows = [measure(shape, arguments.tokens, arguments.runs, arguments.seed) for shape in arguments.shape or SHAPES]
    print_table(rows)
    if arguments.json:
        print_json(rows)


if __name__ == "__main__":
    run_entry_point(main)
