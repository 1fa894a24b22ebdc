"""What all peers share: sequences of stored rollouts, a folder of weights, operation counts and a float32 reference."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from torch import Tensor

from common.benchmark_model import MODELS, benchmark_model
from megatron_dta.core import TrainingSample, TreeConfig, prepare_batch
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.config import ModelConfig
from megatron_dta.core.planning.step.flops import StepCounts
from megatron_dta.core.rollouts.load import load_rollouts
from megatron_dta.training.huggingface.config.config import settings_from_hf
from megatron_dta.training.huggingface.config.config_output import huggingface_config
from megatron_dta.training.huggingface.mappings import ModelShape

# Name -> file and granularity; the order is that in which they are measured.
SETS = {
    "tau1": ("tau1_airline_gpt4o_4x50.npz", "trajectory"),
    "tau1-turn": ("tau1_airline_gpt4o_4x50.npz", "turn"),
    "math": ("math_qwen25_8x100.npz", "trajectory"),
    "tot": ("tot_game24_bfs.npz", "trajectory"),
}
# The gradient's distance is that of the first sequences of a set, cut to this many tokens each.
PIECE_SET, PIECE_SEQUENCES, PIECE_TOKENS = "tau1", 4, 4096
LONGEST = 1 << 18


@dataclass(frozen=True)
class Sequence:
    """A sequence as every peer gets it: int64 tokens [T], bool mask [T] of the trained ones, and one advantage."""

    token_ids: np.ndarray
    mask: np.ndarray
    advantage: float
    group: int

    def sample(self) -> TrainingSample:
        """The sequence for our engine."""
        advantages = np.full(len(self.token_ids), self.advantage)
        return TrainingSample(self.token_ids.astype(np.int32), self.mask, advantages)


def load_set(name: str, folder: Path, max_tokens: int, vocab_size: int) -> list[Sequence]:
    """The first sequences of a set, of at most ``max_tokens`` tokens together, shared ones counted each time.

    Tokens that the vocabulary lacks are avoided by numbering the set's tokens from 0, which keeps the forest.
    """
    file, granularity = SETS[name]
    rollouts = load_rollouts(folder / file, sample_granularity=granularity)
    count = int(np.searchsorted(np.cumsum([len(row.token_ids) for row in rollouts]), max_tokens, side="right"))
    if not count:
        raise InputError(f"--tokens {max_tokens}: the first sequence of {file} has {len(rollouts[0].token_ids)} tokens")
    rollouts = rollouts[:count]
    ids = [row.token_ids.astype(np.int64) for row in rollouts]
    if max(int(row.max()) for row in ids) >= vocab_size:
        distinct = np.unique(np.concatenate(ids))
        if len(distinct) > vocab_size:
            raise InputError(f"{file}: {len(distinct)} distinct tokens, but the model has {vocab_size}")
        ids = [np.searchsorted(distinct, row) for row in ids]
    rng, groups = np.random.default_rng(1), {}
    return [
        Sequence(tokens, row.loss_mask, float(rng.normal()), groups.setdefault(str(row.group_id), len(groups)))
        for tokens, row in zip(ids, rollouts, strict=True)
    ]


def piece(sequences: list[Sequence]) -> list[Sequence]:
    """The beginning of the first sequences, over which gradients are compared."""
    cut = [
        Sequence(row.token_ids[:PIECE_TOKENS], row.mask[:PIECE_TOKENS], row.advantage, row.group) for row in sequences
    ]
    return [row for row in cut if row.mask.any()][:PIECE_SEQUENCES]


def branching_tree(tokens: int, vocab_size: int, trunk: int = 8192, branch: int = 8192) -> list[Sequence]:
    """One tree of about ``tokens`` unique random tokens: a trunk with branches of fixed length, all of them trained."""
    rng = np.random.default_rng(2)
    start = rng.integers(0, vocab_size, trunk)
    mask = np.arange(trunk + branch) >= trunk
    count = max(1, round((tokens - trunk) / branch))
    rows = (np.concatenate([start, rng.integers(0, vocab_size, branch)]) for _ in range(count))
    return [Sequence(row, mask, 1.0, 0) for row in rows]


def num_trained(sequences: list[Sequence]) -> int:
    """Trained tokens, the denominator of the loss."""
    return sum(int(row.mask.sum()) for row in sequences)


def model_config(folder: Path, dtype: torch.dtype) -> ModelConfig:
    """Our settings of the model in a Hugging Face folder."""
    settings = settings_from_hf(folder, {})
    settings |= {"max_position_embeddings": LONGEST, "bf16": dtype == torch.bfloat16}
    return ModelConfig(**settings)


def write_model(name: str, folder: Path, device: torch.device) -> None:
    """Write a folder with random bfloat16 weights of a named shape."""
    values = huggingface_config(benchmark_model(name, None, LONGEST, bf16=True))
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    torch.manual_seed(1)
    with device:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)


def known_models() -> list[str]:
    """Shapes that ``write_model`` knows."""
    return [name for name in MODELS if MODELS[name].vocab_size > 1]


def counts(sequences: list[Sequence], config: ModelConfig) -> dict[str, float]:
    """Tokens and least operations of a step over the sequences, with and without sharing (``planning.step.flops``)."""
    plan = prepare_batch([row.sample() for row in sequences], TreeConfig(tree_segment_tokens=4096)).plan
    tree, dense, shape = StepCounts.of(plan), StepCounts.without_sharing(plan), ModelShape.of(config)
    return {
        "sequences": len(sequences),
        "tokens": dense.tokens,
        "unique_tokens": tree.tokens,
        "tree_tflop": tree.flops(shape) / 1e12,
        "dense_tflop": dense.flops(shape) / 1e12,
    }


def is_compared(name: str, num_layers: int) -> bool:
    """Whether the gradient of a Hugging Face tensor is compared: those of the first, middle and last layer."""
    layers = {f"layers.{layer}." for layer in (0, num_layers // 2, num_layers - 1)}
    return any(layer in name for layer in layers) or name.endswith("model.norm.weight")


def reference_gradients(folder: Path, sequences: list[Sequence], device: torch.device) -> dict[str, Tensor]:
    """Gradients in float32 of transformers' model over one sequence at a time, with PyTorch's own attention."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    model.to(device).train()
    total = num_trained(sequences)
    for row in sequences:
        ids, mask = (torch.as_tensor(array, device=device) for array in (row.token_ids, row.mask))
        hidden = model.model(input_ids=ids[None], use_cache=False).last_hidden_state[0, :-1][mask[1:]]
        logprobs = torch.log_softmax(model.lm_head(hidden), -1).gather(1, ids[1:][mask[1:], None])
        (-row.advantage * logprobs.sum() / total).backward()
    layers = model.config.num_hidden_layers
    return {name: p.grad for name, p in model.named_parameters() if is_compared(name, layers)}


def distance(gradients: Iterable[tuple[str, Tensor]], reference: dict[str, Tensor]) -> float:
    """Norm of the difference from the reference over the norm of the reference, over the reference's tensors."""
    by_name = dict(gradients)
    pairs = [(by_name[name].detach().cpu().double(), values.cpu().double()) for name, values in reference.items()]
    square = sum(float((left - right).square().sum()) for left, right in pairs)
    return (square / sum(float(right.square().sum()) for _, right in pairs)) ** 0.5
