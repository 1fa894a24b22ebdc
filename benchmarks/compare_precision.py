"""Compares a training step in FP8, or with Transformer Engine's layers, with the same step in bfloat16 or float32.

    python benchmarks/compare_precision.py rollouts.jsonl --hf-checkpoint DIR --fp8-format hybrid
    python benchmarks/compare_precision.py rollouts.jsonl --model qwen3-1.7b --fp8-format e4m3 --fp8-recipe tensorwise

All steps use the same weights (those of --hf-checkpoint, or random ones of the shape --model, rounded to bfloat16), the
same sequences and the same plan. For each candidate, the script reports the differences of the trained tokens'
logprobs from the reference, the estimated Kullback-Leibler divergence, and the cosine and distance between the
gradients, for all parameters together and for each one. The reference is Megatron's layers in bfloat16. With
--reference fp32 it is float32, and bfloat16 becomes a candidate that shows the usual distance. It also runs on
CPUs if no candidate needs a GPU.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table

from megatron_dta.common.quiet import quieten_libraries

quieten_libraries()  # before Megatron is imported, which tells what is not installed

from common.benchmark_model import MODELS, benchmark_model
from common.precision_report import PrecisionReport, report_precision
from megatron_dta.common.command_line import (
    CommandLineParser,
    add_sample_granularity,
    check_at_least,
    check_output,
    json_text,
    print_json,
)
from megatron_dta.common.console import Console
from megatron_dta.common.entry_point import run_entry_point
from megatron_dta.common.measurement import measured_on
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.common.files import replacing
from megatron_dta.core.config import ModelConfig, ObjectiveConfig, ParallelConfig, TreeConfig
from megatron_dta.core.config.checks.transformer_engine import check_fp8, check_fp8_support, check_transformer_impl
from megatron_dta.core.engine import TreeEngine, prepare_batch
from megatron_dta.core.model.build import build_model
from megatron_dta.core.model.parallel.mesh import current_mesh, initialize_parallel
from megatron_dta.core.objectives.registry import make_objective
from megatron_dta.core.planning.step.sample import TrainingSample
from megatron_dta.core.rollouts.load import load_rollouts
from megatron_dta.extras.parity.outcome import Outcome
from megatron_dta.training.huggingface.config.config import architecture, read_hf_config, settings_from_hf
from megatron_dta.training.huggingface.mappings import ModelShape
from megatron_dta.training.huggingface.weights import HfWeights
from megatron_dta.training.optimizer.build import data_parallel_chunks

WORST = 5
HEADINGS = (
    "candidate",
    "s a step",
    "mean |d logprob|",
    "99%",
    "largest",
    "KL k3",
    "cosine",
    "distance",
    "lowest cosine",
)


@dataclass(frozen=True)
class Candidate:
    """A model configuration to compare."""

    name: str
    model: ModelConfig


def parse_arguments() -> argparse.Namespace:
    parser = CommandLineParser(__doc__)
    parser.add_argument("file", metavar="FILE", help="rollouts as .jsonl, .parquet or .npz")
    add_sample_granularity(parser)
    parser.add_argument("--max-sequences", type=int, default=8, help="use the file's first N sequences (default 8)")
    parser.add_argument("--max-length", type=int, help="maximum tokens of a sequence")
    parser.add_argument("--model", choices=list(MODELS), help="shape of random weights (default: tiny)")
    parser.add_argument("--hf-checkpoint", metavar="DIR", help="weights and shape of this Hugging Face checkpoint")
    parser.add_argument("--num-layers", type=int, help="number of layers of --model to use")
    parser.add_argument(
        "--reference", choices=("bf16", "fp32"), default="bf16", help="precision of the reference (default bf16)"
    )
    parser.add_argument(
        "--transformer-impl",
        choices=("local", "transformer_engine"),
        default="local",
        help="layers of a further bf16 candidate",
    )
    parser.add_argument("--fp8-format", choices=("e4m3", "hybrid"), help="add candidates in FP8; needs a GPU")
    parser.add_argument(
        "--fp8-recipe",
        nargs="+",
        choices=("blockwise", "tensorwise", "mxfp8"),
        help="recipes of the FP8 candidates (default blockwise)",
    )
    parser.add_argument("--tree-mode", choices=("dense", "packed", "dta"), default="dta")
    parser.add_argument("--tree-segment-tokens", type=int, default=4096)
    parser.add_argument(
        "--tree-activation-tokens", type=int, help="in-flight tokens whose activations are kept; 0 recomputes all"
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of random weights")
    parser.add_argument("--output", type=Path, help="JSON file for the results, with the figures of each parameter")
    parser.add_argument("--json", action="store_true", help="print the results as JSON on the last line")
    arguments = parser.parse_args()
    if arguments.fp8_recipe and arguments.fp8_format is None:
        raise InputError("--fp8-recipe has no effect without --fp8-format; leave it out or add that")
    if arguments.hf_checkpoint and (arguments.model or arguments.num_layers is not None):
        raise InputError("--hf-checkpoint has its own shape; leave --model and --num-layers out")
    check_at_least(arguments, 1, "max_sequences", "max_length", "num_layers", "tree_segment_tokens")
    check_at_least(arguments, 0, "tree_activation_tokens")
    check_output(arguments.output, "--output")
    return arguments


def load_samples(arguments: argparse.Namespace) -> list[TrainingSample]:
    """Load the file's first sequences that have a trained token."""
    rollouts = load_rollouts(
        arguments.file, sample_granularity=arguments.sample_granularity, max_sequences=arguments.max_sequences
    )
    cut = slice(arguments.max_length)
    samples = [TrainingSample(rollout.token_ids[cut], rollout.loss_mask[cut]) for rollout in rollouts]
    samples = [sample for sample in samples if sample.num_trained]
    if not samples:
        raise InputError(f"{arguments.file}: no token is trained in its first sequences; raise --max-length")
    return samples


def base_model(arguments: argparse.Namespace, samples: list[TrainingSample]) -> ModelConfig:
    """Return the model in bfloat16 with Megatron's layers."""
    longest = max(len(sample.token_ids) for sample in samples)
    needed = 1 + max(int(sample.token_ids.max()) for sample in samples)
    if arguments.hf_checkpoint:
        settings = settings_from_hf(arguments.hf_checkpoint, {"max_position_embeddings": longest})
        model = ModelConfig(**settings, bf16=True)
    else:
        model = benchmark_model(arguments.model or "tiny", needed, longest, True, arguments.num_layers)
    if needed > model.vocab_size:
        raise InputError(f"{arguments.file}: has token id {needed - 1}, but the model has {model.vocab_size}")
    return model


def candidates(arguments: argparse.Namespace, model: ModelConfig) -> list[Candidate]:
    """Return the reference followed by the candidates."""
    runs = [Candidate("bf16 local", model)]
    if arguments.reference == "fp32":
        runs.insert(0, Candidate("fp32 local", replace(model, bf16=False, params_dtype=torch.float32)))
    if arguments.transformer_impl != "local":
        runs.append(Candidate("bf16 transformer_engine", replace(model, transformer_impl=arguments.transformer_impl)))
    recipes = (arguments.fp8_recipe or ["blockwise"]) if arguments.fp8_format else []
    for recipe in recipes:
        fp8 = replace(model, transformer_impl="transformer_engine", fp8_format=arguments.fp8_format, fp8_recipe=recipe)
        runs.append(Candidate(f"fp8 {arguments.fp8_format} {recipe}", fp8))
    if len(runs) == 1:
        raise InputError(
            "nothing to compare; give --fp8-format, --transformer-impl transformer_engine or --reference fp32"
        )
    for run in runs:
        check_transformer_impl(run.model)
        check_fp8(run.model, ParallelConfig())
        check_fp8_support(run.model)
    return runs


class Step:
    """Runs the same training step for each candidate."""

    def __init__(self, arguments: argparse.Namespace, samples: list[TrainingSample], model: ModelConfig) -> None:
        self.device = initialize_parallel(arguments.seed)
        self.samples, self.objective = samples, make_objective(ObjectiveConfig(objective="sft"))
        longest = max(len(sample.token_ids) for sample in samples)
        self.tree = TreeConfig(
            tree_mode=arguments.tree_mode,
            # A pack must hold the longest sequence.
            tree_segment_tokens=max(arguments.tree_segment_tokens, longest if arguments.tree_mode == "packed" else 1),
            tree_activation_tokens=arguments.tree_activation_tokens,
        )
        self.weights = self._weights(arguments, model)

    def _weights(self, arguments: argparse.Namespace, model: ModelConfig) -> dict[str, torch.Tensor]:
        """Return the bfloat16 weights on the host."""
        built = build_model(model, self.device)
        if arguments.hf_checkpoint:
            family = architecture(read_hf_config(Path(arguments.hf_checkpoint)))
            weights = HfWeights([built], family.architecture, ModelShape.of(model), current_mesh().host_group)
            weights.load(arguments.hf_checkpoint)
        return {name: parameter.detach().cpu() for name, parameter in built.named_parameters()}

    @contextmanager
    def outcome(self, model: ModelConfig) -> Iterator[tuple[Outcome, float]]:
        """Yield the step's outcome and the seconds of its second run.

        Gradients are float32 and stay on the model's device until the context ends, as comparing billions of values
        takes minutes on a host.
        """
        built = build_model(model, self.device)
        built.load_state_dict(self.weights)
        chunks = data_parallel_chunks(built, ParallelConfig())
        engine = TreeEngine(chunks)
        batch = prepare_batch(self.samples, self.tree, pipeline=engine.pipeline(self.tree.tree_segment_tokens))
        logprobs = engine.compute_logprobs(batch)
        for _ in range(2):
            for chunk in chunks:
                chunk.zero_grad_buffer()
            start = self._now()
            result = engine.forward_backward(batch, self.objective)
            seconds = self._now() - start
        gradients = {name: parameter.main_grad for name, parameter in built.named_parameters()}
        yield Outcome(float(result.loss), logprobs, gradients), seconds
        # Gradient buffers and hooks refer to each other; the next model needs the memory.
        del built, chunks, engine, batch, result, gradients
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def as_json(name: str, seconds: float, report: PrecisionReport, with_parameters: bool) -> dict[str, Any]:
    values = asdict(report)
    if not with_parameters:
        del values["parameters"]
    worst = [{"parameter": name} | asdict(distance) for name, distance in report.lowest_cosines(WORST)]
    return {"candidate": name, "seconds": seconds, **values, "lowest_cosines": worst}


def main() -> int:
    arguments = parse_arguments()
    samples = load_samples(arguments)
    model = base_model(arguments, samples)
    runs = candidates(arguments, model)
    begin = time.perf_counter()

    def report_progress(what: str) -> None:
        print(f"{time.perf_counter() - begin:6.1f} s  {what}", file=sys.stderr, flush=True)

    step = Step(arguments, samples, model)
    report_progress(f"weights loaded; next: {runs[0].name}, the reference")
    with step.outcome(runs[0].model) as (outcome, seconds):
        on_host = {name: gradient.to("cpu", copy=True) for name, gradient in outcome.gradients.items()}
        reference = replace(outcome, gradients=on_host)
    del outcome
    table = Table(title=f"{len(samples)} sequences, distances from {runs[0].name} ({seconds:.3f} s a step)")
    for heading in HEADINGS:
        table.add_column(heading)
    rows = []
    trained = [np.asarray(sample.loss_mask) for sample in samples]
    for run in runs[1:]:
        report_progress(f"next: {run.name}")
        with step.outcome(run.model) as (outcome, took):
            report = report_precision(outcome, reference, trained)
        del outcome
        rows.append((run.name, took, report))
        name, worst = report.lowest_cosines(1)[0]
        logprobs, gradient = report.logprobs, report.gradient
        figures = (logprobs.mean_absolute, logprobs.percentile_99, logprobs.largest, logprobs.kl_k3)
        angles = (f"{gradient.cosine:.6f}", f"{gradient.distance:.4f}", f"{worst.cosine:.4f} {name}")
        table.add_row(run.name, f"{took:.3f}", *(f"{figure:.2e}" for figure in figures), *angles)
    Console(width=200).print(table)
    summary = measured_on("steps compared with a reference of another precision", vars(arguments), step.device)
    summary |= {"reference": runs[0].name, "reference_seconds": seconds}
    if arguments.output is not None:
        results = summary | {"candidates": [as_json(*row, with_parameters=True) for row in rows]}
        with replacing(arguments.output) as temporary:
            temporary.write_text(json_text(results, indent=1) + "\n", encoding="utf-8")
    if arguments.json:
        print_json(summary | {"candidates": [as_json(*row, with_parameters=False) for row in rows]})
    return 0


if __name__ == "__main__":
    run_entry_point(main)
