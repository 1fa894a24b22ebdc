"""Small model configurations, and sequences that share prefixes."""

import numpy as np
import torch

from megatron_dta.core.config import ModelConfig, ObjectiveConfig, TreeConfig
from megatron_dta.core.model.build import build_model
from megatron_dta.core.model.parallel.mesh import initialize_parallel
from megatron_dta.core.objectives.registry import make_objective
from megatron_dta.extras.parity import random_training_samples, run_tree

VOCABULARY = 7
TEMPERATURE = 0.7
GRPO = make_objective(ObjectiveConfig(objective="grpo", kl_loss_coef=0.05, entropy_coef=0.02, dual_clip=3.0))
QWEN3 = {"qk_layernorm": True}
QWEN2 = {"add_qkv_bias": True, "untie_embeddings_and_output_weights": True}
LLAMA = {"make_vocab_size_divisible_by": 1, "norm_epsilon": 1e-6}


def model_config(dtype: torch.dtype = torch.float64, **settings: object) -> ModelConfig:
    shape = dict(
        num_layers=2, hidden_size=24, ffn_hidden_size=40, num_attention_heads=4, num_query_groups=2, kv_channels=8,
        vocab_size=VOCABULARY, max_position_embeddings=160, swiglu=True, disable_bias_linear=True, init_method_std=0.15,
        params_dtype=dtype,
    )  # fmt: skip
    return ModelConfig(**{**shape, **settings})


def weights_of(model: ModelConfig, seed: int) -> dict[str, torch.Tensor]:
    device = initialize_parallel(seed)
    return {name: p.detach() for name, p in build_model(model, device).named_parameters()}


def branching_sequences(generator: np.random.Generator, count: int = 12, longest: int = 28) -> list[np.ndarray]:
    """Sequences that share prefixes, with a duplicate, a prefix of another and one that is a lone token pair."""
    sequences = [generator.integers(0, VOCABULARY, size=generator.integers(2, longest))]
    while len(sequences) < count:
        base = sequences[generator.integers(len(sequences))]
        kept = base[: generator.integers(0 if generator.random() < 0.1 else 1, len(base) + 1)]
        sequences.append(np.append(kept, generator.integers(0, VOCABULARY, size=generator.integers(1, 20)))[:longest])
    sequences += [sequences[3].copy(), sequences[5][: max(2, len(sequences[5]) // 2)], sequences[0][:2]]
    return [sequence.astype(np.int32) for sequence in sequences]


def siblings(changed: bool) -> list:
    """Three branches of one trunk, of odd length; ``changed`` gives the middle one other tokens."""
    generator = np.random.default_rng(31)
    trunk = generator.integers(0, VOCABULARY, size=11)
    tails = [np.append([first], generator.integers(0, VOCABULARY, size=n)) for first, n in ((0, 6), (1, 5), (2, 14))]
    if changed:
        tails[1][1:] = (tails[1][1:] + 1) % VOCABULARY
    return random_training_samples([np.append(trunk, tail).astype(np.int32) for tail in tails], seed=1)


def check_siblings(before: list[np.ndarray], after: list[np.ndarray]) -> None:
    """The middle one of ``siblings`` changed; no bit of the logprobs of the others did."""
    same = [np.array_equal(first, other) for first, other in zip(before, after, strict=True)]
    assert same == [True, False, True]


def check_trained_siblings(model: ModelConfig, weights: dict[str, torch.Tensor], sizes: tuple[int, ...]) -> None:
    """``check_siblings`` for the logprobs of a step, with segments of each of ``sizes``."""
    for segment_tokens in sizes:
        tree = tree_config("dta", segment_tokens)
        both = (run_tree(model, weights, siblings(changed), GRPO, tree)[0].logprobs for changed in (False, True))
        check_siblings(*both)


def tree_config(mode: str, segment_tokens: int, activation_tokens: int | None = None, **settings: object) -> TreeConfig:
    return TreeConfig(
        tree_mode=mode,
        tree_segment_tokens=segment_tokens,
        tree_activation_tokens=activation_tokens,
        logprob_chunk_tokens=5,
        **settings,
    )
