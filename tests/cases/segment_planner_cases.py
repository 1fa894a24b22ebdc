"""Random sequences with shared prefixes, and the rollout sets to plan."""

import numpy as np

ROLLOUTS = (
    "aime24_skyt1_long",
    "gsm8k_openai_4x400",
    "humaneval_codegen16b_100x40",
    "math_qwen25_8x100",
    "mint_math_8x100",
    "mint_math_thinkstrip_perturn",
    "swe_openhands_django",
    "tau1_airline_gpt4o_4x50",
    "tau1_airline_llama8b_3x50",
    "tau1_airline_qwen25_3x50",
    "tau1_retail_5x115",
    "tau2_airline_7x50",
    "tau2_retail_3x40",
    "tot_game24_bfs",
)


def random_sequences(rng: np.random.Generator, count: int, vocabulary: int, longest: int) -> list[np.ndarray]:
    """Sequences that share prefixes, among them duplicates and prefixes of others."""
    sequences: list[np.ndarray] = []
    for _ in range(count):
        prefix = np.zeros(0, dtype=np.int64)
        if sequences and rng.random() < 0.7:
            prefix = sequences[rng.integers(len(sequences))]
            prefix = prefix[: rng.integers(0, len(prefix) + 1)]
        more = rng.integers(0, vocabulary, rng.integers(0 if len(prefix) else 1, longest + 1))
        sequences.append(np.concatenate([prefix, more]).astype(np.int32))
    return sequences
