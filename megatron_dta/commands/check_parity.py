"""Trains a small random model on a rollout file as trees and one sequence at a time, and compares every gradient.

    megatron-dta check-parity rollouts.jsonl --max-sequences 16 --max-length 256

Each tree mode runs with kept and with recomputed activations, and is compared in float64 with the stock Megatron model
and in float32 with Hugging Face transformers (pip install "megatron_dta[parity]"). Advantages, old logprobs and masks
are random, so sequences that share a token differ in them. The exit status is 1 if an error is above its tolerance.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch
from rich.progress import track
from rich.table import Table

from megatron_dta.common.command_line import CommandLineParser, add_sample_granularity, check_at_least, print_json
from megatron_dta.common.console import Console
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.config import ModelConfig, ObjectiveConfig, TreeConfig
from megatron_dta.core.model.build import build_model
from megatron_dta.core.model.parallel.mesh import initialize_parallel
from megatron_dta.core.objectives.registry import make_objective
from megatron_dta.core.planning.step.sample import TrainingSample
from megatron_dta.core.rollouts.load import load_rollouts
from megatron_dta.core.shapes.moe_layers import parse_mixer_layer_freq
from megatron_dta.extras.parity import (
    Outcome,
    ParityErrors,
    compare_outcomes,
    random_training_samples,
    run_stock,
    run_tree,
)
from megatron_dta.extras.parity.cases import compact_vocabulary
from megatron_dta.extras.parity.huggingface import run_huggingface, to_huggingface
from megatron_dta.training.huggingface.config.config import settings_from_hf

MODES = ("dense", "packed", "dta")
DEFAULT_LAYERS = 2


@dataclass(frozen=True)
class Row:
    """Errors of one tree mode against both references."""

    mode: str
    recompute: str
    stock: ParityErrors
    huggingface: ParityErrors


def parse_arguments() -> argparse.Namespace:
    parser = CommandLineParser(__doc__)
    parser.add_argument("file", metavar="FILE", help="rollouts as .jsonl, .parquet or .npz")
    add_sample_granularity(parser)
    parser.add_argument("--max-sequences", type=int, default=16, help="use the file's first N sequences (default 16)")
    parser.add_argument("--max-length", type=int, default=256, help="maximum tokens of a sequence (default 256)")
    parser.add_argument(
        "--tolerance", type=float, default=1e-12, help="tolerance of float64 against Megatron (default 1e-12)"
    )
    parser.add_argument(
        "--hf-tolerance", type=float, default=1e-5, help="tolerance of float32 against Hugging Face (default 1e-5)"
    )
    parser.add_argument("--tree-mode", choices=MODES, help="check one mode only (default: all three)")
    parser.add_argument("--tree-segment-tokens", type=int, default=64, help="maximum tokens of a segment (default 64)")
    parser.add_argument(
        "--tree-memory-tokens", type=int, help="limit on in-flight tokens (default: chosen by the planner)"
    )
    parser.add_argument(
        "--objective",
        choices=("grpo", "gspo", "gspo-token", "cispo", "sft"),
        default="grpo",
        help="loss to compare (default grpo)",
    )
    parser.add_argument("--temperature", type=float, default=0.8, help="divides the logits (default 0.8)")
    parser.add_argument(
        "--num-layers", type=int, help="layers of the random model (default 2, or until every kind of layer occurs)"
    )
    parser.add_argument(
        "--hf-checkpoint", metavar="DIR", help="the rest of its shape and its positions are those of DIR/config.json"
    )
    parser.add_argument("--hidden-size", type=int, help="its width, a multiple of 4 heads (default 64)")
    parser.add_argument("--add-qkv-bias", action="store_true", help="Qwen2's QKV bias in place of Qwen3's QK-norm")
    parser.add_argument(
        "--untie-embeddings-and-output-weights", action="store_true", help="use a separate output matrix"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, masks and advantages (default 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    for name in ("hidden_size", "add_qkv_bias", "untie_embeddings_and_output_weights"):
        if arguments.hf_checkpoint and getattr(arguments, name):
            raise InputError(f"--{name.replace('_', '-')} has no effect with --hf-checkpoint; leave it out")
    if arguments.hidden_size is None:
        arguments.hidden_size = 64
    counts = ("max_sequences", "max_length", "tree_segment_tokens", "tree_memory_tokens", "num_layers", "hidden_size")
    check_at_least(arguments, 1, *counts)
    check_at_least(arguments, 0, "tolerance", "hf_tolerance", "seed")
    if arguments.hidden_size % 4:
        raise InputError(
            f"--hidden-size {arguments.hidden_size} is not a multiple of the 4 heads; "
            f"use {4 * -(-arguments.hidden_size // 4)}"
        )
    if not arguments.temperature > 0:
        raise InputError(f"--temperature is {arguments.temperature}; it must be above 0")
    return arguments


def load_samples(arguments: argparse.Namespace) -> tuple[list[TrainingSample], int]:
    """Return the file's first sequences, cut and with random fields, and the size of their renumbered vocabulary."""
    rollouts = load_rollouts(
        arguments.file, sample_granularity=arguments.sample_granularity, max_sequences=arguments.max_sequences
    )
    sequences = [rollout.token_ids[: arguments.max_length] for rollout in rollouts]
    masks = [rollout.loss_mask[: arguments.max_length] for rollout in rollouts]
    # A sequence without trained tokens after the cut (long system prompts) is trained on all of its tokens.
    masks = [mask if mask.any() else np.ones_like(mask) for mask in masks]
    compact, vocab_size = compact_vocabulary(sequences)
    samples = random_training_samples(compact, arguments.seed, masks)
    if not samples:
        raise InputError(f"{arguments.file}: no sequence has two tokens; raise --max-length")
    return samples, vocab_size


def model_config(arguments: argparse.Namespace, vocab_size: int) -> ModelConfig:
    longest = max(64, arguments.max_length)
    if arguments.hf_checkpoint:
        settings = settings_from_hf(arguments.hf_checkpoint, {"max_position_embeddings": longest})
        if "num_experts" in settings:
            raise InputError(f"--hf-checkpoint {arguments.hf_checkpoint}: a mixture of experts cannot be checked here")
        settings |= _first_layers(settings, arguments) | {"vocab_size": vocab_size}
        return ModelConfig(**settings, params_dtype=torch.float64)
    return ModelConfig(
        num_layers=arguments.num_layers or DEFAULT_LAYERS,
        hidden_size=arguments.hidden_size,
        ffn_hidden_size=3 * arguments.hidden_size,
        num_attention_heads=4,
        num_query_groups=2,
        max_position_embeddings=longest,
        vocab_size=vocab_size,
        norm_epsilon=1e-6,
        swiglu=True,
        disable_bias_linear=True,
        qk_layernorm=not arguments.add_qkv_bias,
        add_qkv_bias=arguments.add_qkv_bias,
        untie_embeddings_and_output_weights=arguments.untie_embeddings_and_output_weights,
        init_method_std=0.05,
        params_dtype=torch.float64,
    )


def _first_layers(settings: dict[str, object], arguments: argparse.Namespace) -> dict[str, object]:
    """The settings of the first ``--num-layers`` layers; by default 2, or as many as have layers of every kind."""
    pattern, letters = settings.get("mixer_layer_freq"), settings.get("hybrid_layer_pattern")
    if pattern is None and letters is None:
        return {"num_layers": arguments.num_layers or DEFAULT_LAYERS}
    layers = list(str(letters))
    if letters is None:
        layers = parse_mixer_layer_freq(str(pattern), int(str(settings["num_layers"])))
    least = max(map(layers.index, layers)) + 1
    count = arguments.num_layers or least
    if not least <= count <= len(layers):
        raise InputError(
            f"--num-layers {count}: {arguments.hf_checkpoint} has {len(layers)} layers, of which the first {least} are "
            f"needed for layers of every kind; give {least} to {len(layers)}"
        )
    if letters is not None:
        return {"num_layers": count, "hybrid_layer_pattern": str(letters)[:count]}
    return {"num_layers": count, "mixer_layer_freq": str(list(map(int, layers[:count])))}


def random_weights(model: ModelConfig, device: torch.device) -> dict[str, torch.Tensor]:
    """Freshly drawn weights, with slow decay in recurrences: the usual one forgets within a few tokens."""
    weights = {name: p.detach() for name, p in build_model(model, device).named_parameters()}
    for name, weight in weights.items():
        if name.endswith(".A_log"):
            weight.sub_(4.0)
    return weights


def compare_modes(arguments: argparse.Namespace) -> tuple[list[Row], list[TrainingSample]]:
    """Compute the errors of every mode, with kept and recomputed activations."""
    samples, vocab_size = load_samples(arguments)
    device = initialize_parallel(arguments.seed)
    double = model_config(arguments, vocab_size)
    single = replace(double, params_dtype=torch.float32)
    objective = make_objective(ObjectiveConfig(objective=arguments.objective, kl_loss_coef=0.05, entropy_coef=0.01))
    weights = random_weights(double, device)
    single_weights = {name: p.float() for name, p in weights.items()}
    stock = run_stock(double, weights, samples, objective, arguments.temperature)
    huggingface = run_huggingface(single, single_weights, samples, objective, arguments.temperature)

    cases = [(mode, keep) for mode in ([arguments.tree_mode] if arguments.tree_mode else MODES) for keep in (None, 0)]
    rows = []
    for mode, activation_tokens in track(cases, "Tree modes", console=Console(stderr=True), transient=True):
        longest = max(len(sample.token_ids) for sample in samples)
        tree = TreeConfig(
            tree_mode=mode,
            # A pack must hold the longest sequence.
            tree_segment_tokens=max(arguments.tree_segment_tokens, longest if mode == "packed" else 1),
            tree_memory_tokens=None if mode == "packed" else arguments.tree_memory_tokens,
            tree_activation_tokens=activation_tokens,
            logprob_chunk_tokens=37,
        )
        outcome, result = run_tree(double, weights, samples, objective, tree, arguments.temperature)
        in_single, _ = run_tree(single, single_weights, samples, objective, tree, arguments.temperature)
        renamed = Outcome(in_single.loss, in_single.logprobs, to_huggingface(in_single.gradients, single))
        share = result.recomputed_tokens / max(1, result.computed_tokens)
        recompute = f"{share:.0%} recomputed" if share else "kept"
        rows.append(Row(mode, recompute, compare_outcomes(outcome, stock), compare_outcomes(renamed, huggingface)))
    return rows, samples


def largest(rows: list[Row], reference: str, error: str) -> float:
    return float(np.max([getattr(getattr(row, reference), error) for row in rows]))


def main() -> int:
    arguments = parse_arguments()
    rows, samples = compare_modes(arguments)
    table = Table(
        title=f"{len(samples)} sequences, {sum(len(s.token_ids) for s in samples)} tokens: largest relative errors"
    )
    for heading in ("mode", "activations", "reference", "loss", "logprobs", "gradients", "worst parameter"):
        table.add_column(heading)
    for row in rows:
        for name, errors in (("Megatron float64", row.stock), ("Hugging Face float32", row.huggingface)):
            figures = (f"{errors.loss:.1e}", f"{errors.logprob:.1e}", f"{errors.gradient:.1e}")
            table.add_row(row.mode, row.recompute, name, *figures, errors.worst_parameter)
    Console().print(table)

    summary = {
        f"{prefix}max_{error}_error": largest(rows, reference, error)
        for prefix, reference in (("", "stock"), ("hf_", "huggingface"))
        for error in ("loss", "logprob", "gradient")
    }
    limits = {name: arguments.hf_tolerance if name.startswith("hf_") else arguments.tolerance for name in summary}
    failed = [name for name, error in summary.items() if not error <= limits[name]]
    for name in failed:
        print(f"{name} is {summary[name]:.3e}, above the tolerance {limits[name]:.0e}")
    if not failed:
        print("all errors are within tolerance")
    if arguments.json:
        cases = [asdict(row) for row in rows]
        print_json({**summary, "sequences": len(samples), "passed": not failed, "cases": cases})
    return 1 if failed else 0
