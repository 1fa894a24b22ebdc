"""``benchmarks/attention.py``: its cases and candidates; without a GPU it refuses in one line."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from common.attention_candidates import forward_candidates, key_gradient_candidates, query_gradient_candidates
from common.attention_cases import chain, choose_sequences, probe_case, segment_cases, whole_tree
from conftest import REPOSITORY, rollout_file, seed_all
from dta_kernels.tree_attention.config import default_config
from dta_kernels.tree_attention.plan import AttentionShape, plan_tree_attention
from forked import run_python
from megatron_dta.core.tree import build_prefix_tree

TOOLS = REPOSITORY / "benchmarks"


def random_sequences(generator: np.random.Generator, count: int) -> list[np.ndarray]:
    sequences = [generator.integers(0, 50, 40)]
    while len(sequences) < count:
        base = sequences[generator.integers(len(sequences))]
        kept = base[: generator.integers(1, len(base) + 1)]
        sequences.append(np.append(kept, generator.integers(0, 50, generator.integers(1, 30))))
    return [sequence.astype(np.int32) for sequence in sequences]


def brute_pairs(key_end: np.ndarray, num_queries: int) -> int:
    key, query = np.arange(len(key_end)), len(key_end) - num_queries + np.arange(num_queries)
    return int(((key <= query[:, None]) & (query[:, None] < key_end)).sum())


@pytest.mark.parametrize("seed", range(4))
def test_segments_together_have_the_pairs_of_the_whole_tree(seed):
    tree = build_prefix_tree(random_sequences(seed_all(seed), 20))
    whole = whole_tree(tree, "tree")
    # A token sees itself and what is above it.
    assert whole.pairs == int((tree.position + 1).sum())
    for segment_tokens in (13, 40, 100):
        cases = segment_cases(tree, segment_tokens, "tree")
        assert sum(case.num_queries for case in cases) == tree.num_tokens
        assert sum(case.pairs for case in cases) == whole.pairs
        assert any(case.num_ancestors for case in cases)
        for case in cases:
            assert case.pairs == brute_pairs(case.key_end, case.num_queries)


def test_chains_and_the_probe():
    assert chain(0, 7, "c").pairs == 28
    assert chain(5, 3, "c").pairs == 5 * 3 + 6
    probe = probe_case()
    assert min(probe.num_ancestors, probe.num_queries) > 100
    assert probe.pairs == brute_pairs(probe.key_end, probe.num_queries)


@pytest.mark.parametrize("unique_tokens", [30, 100, 250, 10_000])
def test_chosen_sequences_fit_and_one_more_would_not(unique_tokens):
    sequences = random_sequences(seed_all(9), 25)
    chosen = choose_sequences(sequences, unique_tokens)
    assert build_prefix_tree(chosen).num_tokens <= unique_tokens
    if len(sequences[0]) <= unique_tokens and len(chosen) < len(sequences):
        assert build_prefix_tree(sequences[: len(chosen) + 1]).num_tokens > unique_tokens


@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_every_candidate_can_be_planned_and_is_tried_once(head_size):
    case, cpu = probe_case(), torch.device("cpu")
    base = default_config(head_size, torch.bfloat16, cpu)
    for candidates in (
        list(forward_candidates(base, head_size, True, True)),
        list(key_gradient_candidates(base, head_size, True)),
        list(query_gradient_candidates(base, head_size, True)),
    ):
        assert len(set(candidates)) == len(candidates) > 5
        for config in candidates[::3]:
            shape = AttentionShape(8, 2, head_size, torch.bfloat16)
            plan = plan_tree_attention(case.key_end, case.num_queries, shape, cpu, config)
            assert plan.stored_groups > 0


def test_a_real_file_gives_cases():
    path = rollout_file("tau1_airline_qwen25_3x50.npz")
    code = (
        "from pathlib import Path; from attention import cases_of_file;"
        f"whole, by_size = cases_of_file(Path({str(path)!r}), 32768, [2048]);"
        "assert 20000 < whole.num_queries <= 32768; assert sum(c.pairs for c in by_size[2048]) == whole.pairs"
    )
    subprocess.run([sys.executable, "-c", code], cwd=TOOLS, check=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_refuses_without_a_gpu_in_one_line():
    command = [str(TOOLS / "attention.py"), "any.npz", "--json"]
    run = run_python(command)
    assert run.returncode == 2
    assert run.stderr.strip().splitlines() == [
        "error: benchmarks/attention.py measures a CUDA GPU, and there is none here"
    ]
