"""Measures a training step (forward, backward, reduction of gradients; no optimizer) on a rollout file: trees against
dense.

    python benchmarks/train.py FILE ... [--model qwen3-1.7b] [--tree-mode dense dta] [--bf16] [--json]
    torchrun --nproc-per-node 4 benchmarks/train.py FILE --tensor-model-parallel-size 4 --sequence-parallel ...

Weights are random; gradients are accumulated in float32. Every mode takes one step to warm up and then --steps timed
ones, of which the median counts. Operations are counted once for every token of the mode's forest
(megatron_dta/core/planning/step/flops.py); the share of the peak is against a measured product of 8192 x 8192
matrices. The speed-up of a mode over dense cannot be more than the ratio of their operations, the bound. On several
pipeline stages the ops of the last timed step are timed too: the share of the stages' time that they compute is
reported with the planned one and that of a replay, the plan in the measured times of its ops (common/planning).
Several files are measured one after another on the same model; each row names its file.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_dta.common.quiet import quieten_libraries

quieten_libraries()  # before Megatron is imported, which tells what is not installed

from common.benchmark_model import MODELS, TINY, benchmark_model
from common.planning.plan_accuracy import replay, stage_seconds
from common.profile import profile_step
from common.report import Report
from common.training_step import EngineOptions, StepTimer, compared
from megatron_dta.common.command_line import CommandLineParser, check_at_least, check_output, print_json
from megatron_dta.common.entry_point import run_entry_point
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.config import ModelConfig, ParallelConfig, TreeConfig
from megatron_dta.core.engine import StepResult
from megatron_dta.core.planning.pipeline.timeline import timeline_span, timeline_utilisation
from megatron_dta.core.planning.step.sample import TrainingSample
from megatron_dta.core.rollouts.load import load_rollouts
from megatron_dta.training.autotune import Autotuner, measure_gpu
from megatron_dta.training.config.derived.device_queues import set_device_queues
from megatron_dta.training.monitor.timeline_files import beside_plan, write_timelines

PARALLEL = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "num_virtual_stages_per_pipeline_rank",
    "expert_model_parallel_size",
    "sequence_parallel",
    "overlap_grad_reduce",
)


def parse_arguments() -> argparse.Namespace:
    parser = CommandLineParser(__doc__)
    parser.add_argument("files", nargs="+", metavar="FILE", help="rollouts: .jsonl, .parquet or .npz")
    parser.add_argument(
        "--sample-granularity", choices=("trajectory", "turn"), default="trajectory", help="of .npz files"
    )
    parser.add_argument(
        "--renumber-tokens", action="store_true", help="number the tokens that occur from 0: for another vocabulary"
    )
    parser.add_argument("--max-sequences", type=int, help="use at most this many sequences of each file")
    parser.add_argument("--max-tokens", type=int, help="use sequences of each file up to this many tokens")
    parser.add_argument("--model", choices=list(MODELS), default="qwen3-1.7b")
    parser.add_argument("--num-layers", type=int, help="use this many layers of the model")
    parser.add_argument("--bf16", action="store_true", help="weights in bfloat16")
    parser.add_argument("--bf16-gradients", action="store_true", help="with --bf16: gradients in bfloat16 too")
    parser.add_argument("--tree-mode", nargs="+", choices=("dense", "packed", "dta"), default=["dense", "dta"])
    parser.add_argument(
        "--tree-segment-tokens",
        type=int,
        help="default: 4096, or chosen with --tree-memory-gib; on a GPU without any of these flags as in training",
    )
    parser.add_argument(
        "--pack-tokens", type=int, help="maximum number of tokens in a pack (default: the longest sequence)"
    )
    parser.add_argument(
        "--tree-memory-gib", type=float, help="memory of weights, gradients and the step; as in training"
    )
    parser.add_argument("--tree-memory-tokens", type=int)
    parser.add_argument("--tree-activation-tokens", type=int)
    parser.add_argument("--fused-layer-impl", choices=("auto", "triton", "reference"), default="auto")
    parser.add_argument("--kv-offload-fraction", type=float, default=0.0, help="as in training")
    parser.add_argument("--tree-attention-impl", choices=("auto", "triton", "reference"), default="auto")
    parser.add_argument("--transformer-impl", choices=("local", "transformer_engine"), default="local")
    parser.add_argument("--fp8-format", choices=("e4m3", "hybrid"), help="layers' products in FP8")
    parser.add_argument("--fp8-recipe", choices=("blockwise", "tensorwise", "mxfp8"), help="as in training")
    for name in PARALLEL:
        flag, default = f"--{name.replace('_', '-')}", getattr(ParallelConfig(), name)
        if isinstance(default, bool):
            parser.add_argument(flag, action="store_true")
        else:
            parser.add_argument(flag, type=int, default=default)
    parser.add_argument("--steps", type=int, default=3, help="timed steps; the median counts")
    parser.add_argument("--profile", action="store_true", help="one more step that says which kernels take the time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    parser.add_argument(
        "--timeline-dir", type=Path, help="on several stages: write when each ran which segment, planned and measured"
    )
    parser.add_argument("--json", action="store_true", help="print the results as JSON on the last line")
    arguments = parser.parse_args()
    check_arguments(arguments)
    return arguments


def check_arguments(arguments: argparse.Namespace) -> None:
    """Refuse flags that contradict each other, and fill in what follows from the others."""
    counts = ("max_sequences", "max_tokens", "num_layers", "tree_segment_tokens", "tree_memory_tokens", "steps")
    sizes = (name for name in PARALLEL if not isinstance(getattr(ParallelConfig(), name), bool))
    check_at_least(arguments, 1, *counts, *sizes)
    check_at_least(arguments, 0, "tree_activation_tokens", "seed")
    check_output(arguments.output, "--output")
    if arguments.tree_memory_gib is not None and not 0 < arguments.tree_memory_gib < math.inf:
        raise InputError(f"--tree-memory-gib must be above 0, not {arguments.tree_memory_gib}")
    for flag in ("tree_memory_tokens", "tree_activation_tokens"):
        if arguments.tree_memory_gib is not None and getattr(arguments, flag) is not None:
            raise InputError(f"--tree-memory-gib decides what --{flag.replace('_', '-')} says; give one of the two")
    limits = ("segment_tokens", "memory_gib", "memory_tokens", "activation_tokens")
    is_given = any(getattr(arguments, f"tree_{name}") is not None for name in limits)
    # A GPU decides as in training.
    is_divided = arguments.tensor_model_parallel_size > 1
    is_divided |= arguments.expert_model_parallel_size > 1 and arguments.pipeline_model_parallel_size > 1
    is_sparse = MODELS[arguments.model].num_experts is not None and is_divided
    can_decide = torch.cuda.is_available() and "packed" not in arguments.tree_mode and not is_sparse
    arguments.automatic = can_decide and not is_given
    if not arguments.automatic and not is_given:
        arguments.tree_segment_tokens = 4096
    names = [Path(file).name for file in arguments.files]
    if len(set(names)) < len(names):
        raise InputError("two of the files have the same name, so rows could not be told apart")
    if arguments.num_virtual_stages_per_pipeline_rank > 1 and arguments.pipeline_model_parallel_size == 1:
        raise InputError("--num-virtual-stages-per-pipeline-rank needs --pipeline-model-parallel-size above 1")
    if arguments.num_layers is not None and arguments.num_layers > MODELS[arguments.model].num_layers:
        layers = MODELS[arguments.model].num_layers
        raise InputError(f"--num-layers {arguments.num_layers}: {arguments.model} has only {layers}")
    if arguments.profile and not torch.cuda.is_available():
        raise InputError("--profile says which kernels of a CUDA GPU take the time, and there is none; leave it out")
    if arguments.bf16_gradients and not arguments.bf16:
        raise InputError("--bf16-gradients needs --bf16")
    if arguments.timeline_dir is not None and arguments.pipeline_model_parallel_size == 1:
        raise InputError("--timeline-dir is of a pipeline's stages; give --pipeline-model-parallel-size too")


def load_samples(arguments: argparse.Namespace, file: str) -> list[TrainingSample]:
    """The sequences of a file, of which the first are taken."""
    rollouts = load_rollouts(
        file, sample_granularity=arguments.sample_granularity, max_sequences=arguments.max_sequences
    )
    token_ids = [rollout.token_ids for rollout in rollouts]
    if arguments.renumber_tokens:
        # The distinct tokens in their order: the same forest.
        vocabulary = np.unique(np.concatenate(token_ids))
        token_ids = [np.searchsorted(vocabulary, ids).astype(ids.dtype) for ids in token_ids]
    samples = [TrainingSample(ids, rollout.loss_mask) for ids, rollout in zip(token_ids, rollouts, strict=True)]
    if arguments.max_tokens is None:
        return samples
    lengths = np.cumsum([len(sample.token_ids) for sample in samples])
    count = int(np.searchsorted(lengths, arguments.max_tokens, side="right"))
    if not count:
        raise InputError(f"--max-tokens {arguments.max_tokens}: the first sequence of {file} has {lengths[0]} tokens")
    return samples[:count]


def model_config(arguments: argparse.Namespace, sets: dict[str, list[TrainingSample]]) -> ModelConfig:
    most = {file: 1 + max(int(sample.token_ids.max()) for sample in samples) for file, samples in sets.items()}
    vocab_size = max(most.values()) if arguments.model in TINY else MODELS[arguments.model].vocab_size
    for file, needed in most.items():
        if needed > vocab_size:
            raise InputError(
                f"{file}: has token id {needed - 1}, but {arguments.model} has {vocab_size}; give --renumber-tokens"
            )
    longest = max(len(sample.token_ids) for samples in sets.values() for sample in samples)
    shape = benchmark_model(
        arguments.model, vocab_size, longest, arguments.bf16, arguments.num_layers, arguments.fused_layer_impl
    )
    names = ("transformer_impl", "fp8_format", "fp8_recipe")
    return replace(shape, **{name: getattr(arguments, name) for name in names})


class Benchmark:
    """The steps of the flags, timed on one model."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.sets = arguments, {file: load_samples(arguments, file) for file in arguments.files}
        self.samples = self.sets[arguments.files[0]]
        parallel = ParallelConfig(**{name: getattr(arguments, name) for name in PARALLEL})
        options = EngineOptions(**{field.name: getattr(arguments, field.name) for field in fields(EngineOptions)})
        self.timer = StepTimer(model_config(arguments, self.sets), parallel, arguments.seed, options)
        self.mesh, self.device, self.engine = self.timer.mesh, self.timer.device, self.timer.engine
        if arguments.tree_memory_gib is not None:
            self.timer.limit_memory(arguments.tree_memory_gib)
        self.tuner = None
        if arguments.automatic:
            buffers = [buffer.grad_data for chunk in self.timer.chunks for buffer in chunk.buffers]
            states = [*self.timer.model.parameters(), *buffers]
            self.tuner = Autotuner(
                self.engine, self.timer.constant, lambda graphs: measure_gpu(self.device, states, graphs)
            )
            print(self.tuner.describe(), file=sys.stderr)

    def measure(self, file: str, mode: str) -> dict[str, Any]:
        """Plan and time a mode's step over the sequences of a file."""
        self.samples = self.sets[file]
        longest = max(len(sample.token_ids) for sample in self.samples)
        segment_tokens = self.arguments.tree_segment_tokens
        tree = TreeConfig(
            tree_mode=mode,
            # A pack must hold the longest sequence.
            tree_segment_tokens=max(self.arguments.pack_tokens or 0, longest) if mode == "packed" else segment_tokens,
            tree_memory_tokens=None if mode == "packed" else self.arguments.tree_memory_tokens,
            tree_activation_tokens=self.arguments.tree_activation_tokens,
            tree_memory_gib=self.arguments.tree_memory_gib,
        )
        self._run_first_steps(tree)
        start = time.perf_counter()
        batch = self.timer.plan(self.samples, tree)
        plan_seconds = time.perf_counter() - start
        timing = self.timer.time(batch, self.arguments.steps)
        row = self.timer.row(batch, timing)
        profiled = {}
        if self.arguments.profile and self.device.type == "cuda":
            step = lambda: self.engine.forward_backward(batch, self.timer.objective)  # noqa: E731
            self.engine.prepare_ahead(batch, self.timer.objective)
            profiled["profile"] = profile_step(step)
        return (
            profiled
            | self._pipeline(timing.result, file, mode)
            | self.timer.predicted(batch, timing.seconds)
            | {"seconds": timing.seconds, "plan_seconds": plan_seconds}
            | row
        )

    def _pipeline(self, result: StepResult, file: str, mode: str) -> dict[str, Any]:
        """Shares of the stages' time that they compute, as planned and as it was, and each stage's seconds."""
        if self.mesh.pipeline_size == 1:
            return {}
        segments, stages = result.plan.segments.num_segments, self.mesh.pipeline_size
        planned, parents = result.plan.training, result.plan.segments.segment_parent
        start, end = timeline_span(result.timeline)
        busy, waited = stage_seconds(result.timeline, stages)
        folder = self.arguments.timeline_dir
        if folder is not None and self.mesh.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"{Path(file).stem}_{mode}.json"
            write_timelines(path, beside_plan(result.timeline, planned.planned_events()))
        return {
            "planned_utilisation": planned.timeline.utilisation,
            "replayed_utilisation": replay(planned.schedule, parents, result.timeline).utilisation,
            "measured_utilisation": timeline_utilisation(result.timeline, stages),
            "pipeline_seconds": end - start,
            "planned_busy_seconds": planned.timeline.busy,
            "busy_seconds": busy,
            "waiting_seconds": waited,
            "ideal_utilisation": segments / (segments + stages - 1),
        }

    def _run_first_steps(self, tree: TreeConfig) -> None:
        """The two steps by which a run corrects its costs and its memory."""
        for _ in range(2 if self.tuner is not None else 0):
            self.timer.zero_gradients()
            batch, is_timed = self.timer.plan(self.samples, tree), self.tuner.measures_next_step
            self.tuner.observe(self.engine.forward_backward(batch, self.timer.objective, record_timeline=is_timed))
            self.tuner.update()


def compare_with_dense(rows: dict[str, dict[str, Any]]) -> None:
    """Fill in the speed-up over dense of all modes of a file, once dense is measured."""
    dense = rows.get("dense")
    for row in rows.values():
        if dense is not None and row is not dense:
            row.update(compared(row, dense))


def main() -> int:
    arguments = parse_arguments()
    queues = arguments.tensor_model_parallel_size, arguments.pipeline_model_parallel_size
    warning = set_device_queues(os.environ, *queues)
    if warning is not None and os.environ.get("RANK", "0") == "0":
        print(f"warning: {warning}", file=sys.stderr)
    benchmark = Benchmark(arguments)
    is_first = benchmark.mesh.rank == 0
    settings = vars(arguments)
    settings |= {"gemm_tflops": benchmark.timer.peak / 1e12, "processes": benchmark.mesh.world_size}
    report = Report("training step", settings, benchmark.device, arguments.output if is_first else None)
    for file in arguments.files:
        rows: dict[str, dict[str, Any]] = {}
        for mode in arguments.tree_mode:
            rows[mode] = {"file": Path(file).name, "mode": mode, **benchmark.measure(file, mode)}
            compare_with_dense(rows)
            if is_first:
                report.add(rows[mode])
    if arguments.json and is_first:
        print_json(report.results)
    # Together: a rank that goes while others still use its connections makes them abort.
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(run_entry_point(main))
