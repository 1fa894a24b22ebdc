"""Measures forwards and backwards of segments on this machine and fits the cost model that plans training steps.

    megatron-dta fit-cost-model --model qwen3-1.7b --bf16 --output costs.json
    torchrun --nproc-per-node 4 --no-python megatron-dta fit-cost-model --model llama3-70b --num-layers 8 --bf16 \\
        --tensor-model-parallel-size 4 --sequence-parallel --output costs.json
    megatron-dta fit-cost-model --refit costs.json --output new.json

Segments run through the training engine: chains of six lengths, with many or few tokens before them and many or few
trained tokens, and forests of short sequences, which have many tokens and few attention pairs. Short segments are timed
with the device idle before each op, to measure the time that the host takes to launch them. Long segments follow each
other without a pause, as in a training step: under continuous load the clock of a GPU is lower, by 8% on an H200. A
second, shallower model separates the cost of a layer from costs that occur once. Therefore --num-layers can be less
than the model's, and the file is valid for any depth, but only for this shape, dtype, and tensor and expert
parallelism. On a GPU, the bytes of activations are measured as well, and the workspace counted for a backward is
checked. Ranks that share experts (--expert-model-parallel-size) measure equal segments at the same time.
--refit FILE fits the measurements in FILE again, without a GPU, and writes them with the new coefficients to --output.
Pass the file as --cost-model to training, benchmarks/train.py, simulate-pipeline, plan-partition and plan-run.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from megatron_dta.common.command_line import CommandLineParser, json_text, print_json
from megatron_dta.common.errors import InputError
from megatron_dta.common.files import replacing
from megatron_dta.common.measurement import measured_on
from megatron_dta.config import ObjectiveConfig, ParallelConfig, TreeConfig
from megatron_dta.config.checks.experts import check_experts
from megatron_dta.config.checks.mesh import check_context_parallel, check_tensor_parallel, check_world_size
from megatron_dta.config.derived.benchmark_model import MODELS, benchmark_model
from megatron_dta.engine import TreeEngine, prepare_batch
from megatron_dta.engine.cost_inputs import cost_shape
from megatron_dta.engine.stage_run import StageRun
from megatron_dta.model import build_model, current_mesh, initialize_parallel
from megatron_dta.objectives import make_objective
from megatron_dta.planning.costs.file import CostFile, load_cost_file, period_of
from megatron_dta.planning.costs.fit import MeasuredOp, fit_bytes, fit_errors, fit_seconds
from megatron_dta.planning.costs.refit import refit
from megatron_dta.planning.pipeline.schedule import PipelineOp
from megatron_dta.planning.segments.plan import SegmentPlan, segment_parents
from megatron_dta.planning.segments.schedule import OpKind
from megatron_dta.planning.step.choice import StepChoice
from megatron_dta.planning.step.passes import attention_pairs
from megatron_dta.planning.step.plan import StepPlan, plan_segmented_step
from megatron_dta.planning.step.sample import TrainingSample
from megatron_dta.training.optimizer import data_parallel_chunks


@dataclass(frozen=True)
class Case:
    """Segments that are measured in one step.

    Attributes:
        cuts: the length of segment i is max_length / 2 ** cuts[i].
        trained: share of the tokens that is trained.
        paused: whether the device is idle before each op.
        sequences: the segments consist of sequences of length max_length / 2 ** sequences; None for a single sequence
            through all segments.
    """

    cuts: tuple[int, ...]
    trained: float
    paused: bool = False
    sequences: int | None = None


CASES = (
    Case((7, 6, 5, 4, 7, 6, 5, 7, 6, 5), 0.3, paused=True),
    Case((5, 6, 7, 4, 5, 6, 7), 1.0, paused=True),
    Case((4,) * 5, 0.0, paused=True),
    Case((2, 2, 3, 3, 2), 0.2),
    Case((3, 2, 3), 1.0),
    Case((2,) * 5, 0.2, sequences=7),
    Case((2, 3, 2, 3), 1.0, sequences=7),
)
LEAST_LENGTH = 1 << 8
# Share of a GPU's free memory that activations may take during the measurement.
FOR_ACTIVATIONS = 0.6
SHOWN = ("forward", "backward", "bytes", "errors")
SHALLOW = 4  # The second model has 1/4 of the layers.


def parse_arguments() -> argparse.Namespace:
    parser = CommandLineParser(__doc__)
    parser.add_argument("--model", choices=list(MODELS), help="shape to measure")
    parser.add_argument(
        "--refit", type=Path, metavar="FILE", help="fit the measurements in FILE again; allows no flag but --output"
    )
    parser.add_argument("--num-layers", type=int, help="layers to measure (default: those of the model)")
    parser.add_argument(
        "--vocab-size", type=int, default=1024, help="vocabulary of a shape without one (default: %(default)s)"
    )
    parser.add_argument("--bf16", action="store_true", help="weights in bfloat16")
    parser.add_argument("--output", type=Path, required=True, help="JSON file for the cost model")
    parser.add_argument(
        "--max-length",
        type=int,
        default=1 << 15,
        help="power of two; segments have 1/4 to 1/128 of it (default: %(default)s)",
    )
    parser.add_argument("--repeats", type=int, default=3, help="timed runs of each case (default: %(default)s)")
    parser.add_argument("--logprob-chunk-tokens", type=int)
    parser.add_argument("--tree-attention-impl", choices=("auto", "triton", "reference"), default="auto")
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--expert-model-parallel-size", type=int, default=1)
    parser.add_argument("--expert-tensor-parallel-size", type=int)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    if not arguments.output.parent.is_dir():
        raise InputError(f"--output {arguments.output}: its folder does not exist")
    if arguments.refit is not None:
        for name in vars(arguments).keys() - {"refit", "output"}:
            if getattr(arguments, name) != parser.get_default(name):
                raise InputError(f"--{name.replace('_', '-')} has no effect with --refit, which measures nothing")
        return arguments
    if arguments.model is None:
        raise InputError("--model is needed: the model to measure (or --refit FILE, to fit again)")
    if arguments.num_layers is not None and arguments.num_layers < 2:
        raise InputError(f"--num-layers {arguments.num_layers}: two depths are measured, so give 2 or more")
    layers = MODELS[arguments.model].num_layers
    if arguments.num_layers is not None and arguments.num_layers > layers:
        raise InputError(f"--num-layers {arguments.num_layers}: {arguments.model} has only {layers}")
    if arguments.vocab_size < 2:
        raise InputError(f"--vocab-size must be at least 2, not {arguments.vocab_size}")
    if arguments.max_length < LEAST_LENGTH or arguments.max_length & (arguments.max_length - 1):
        raise InputError(f"--max-length {arguments.max_length}: must be a power of 2, and {LEAST_LENGTH} at least")
    if arguments.repeats < 1:
        raise InputError(f"--repeats must be at least 1, not {arguments.repeats}")
    return arguments


def depths(arguments: argparse.Namespace) -> tuple[int, int]:
    """The two depths to measure; those of a hybrid model have whole groups of its layers."""
    shape = MODELS[arguments.model]
    deepest = arguments.num_layers or shape.num_layers
    period = period_of(shape) if shape.linear_attention_layers else 1
    if deepest % period or deepest < 2 * period:
        raise InputError(
            f"--num-layers {deepest}: two depths are measured, each of groups of {period} layers; give a multiple of "
            f"{period}, at least {2 * period}"
        )
    return max(1, deepest // SHALLOW // period) * period, deepest


@dataclass
class _OpCost:
    seconds: float
    left: float | None = None
    peak: float | None = None


class CostClock:
    """Times every op; replaces the engine's clock.

    Args:
        paused: whether to synchronize the device before each op; otherwise events between the ops of a GPU time them.
    """

    def __init__(self, device: torch.device, paused: bool) -> None:
        self._device, self._on_gpu = device, device.type == "cuda"
        self._by_events = self._on_gpu and not paused
        self._costs: dict[tuple[OpKind, int], _OpCost] = {}
        self._ends: list[tuple[tuple[OpKind, int], torch.cuda.Event]] = []
        if self._on_gpu:
            torch.cuda.synchronize(device)
        self._begin = self._end = self._now()

    def _now(self) -> float | torch.cuda.Event:
        if self._by_events:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    @contextmanager
    def measure(self, op: PipelineOp) -> Iterator[None]:
        """Time an op from the end of the previous one, so its preparation is included."""
        before = 0
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats(self._device)
            before = torch.cuda.memory_allocated(self._device)
        yield
        end, key = self._now(), (op.kind, op.segment)
        self._costs[key] = cost = _OpCost(0.0)
        if self._by_events:
            self._ends.append((key, end))
        else:
            cost.seconds = end - self._end
        if self._on_gpu:
            cost.left = torch.cuda.memory_allocated(self._device) - before
            cost.peak = torch.cuda.max_memory_allocated(self._device) - before
        if not self._by_events:
            self._end = self._now()

    def costs(self) -> dict[tuple[OpKind, int], _OpCost]:
        """Return the measurements; waits for the device."""
        if self._by_events:
            torch.cuda.synchronize(self._device)
            events = [self._begin, *(event for _, event in self._ends)]
            for (key, event), before in zip(self._ends, events, strict=False):
                self._costs[key].seconds = before.elapsed_time(event) / 1e3
        return self._costs


class DepthMeasurement:
    """Builds a model of one depth and measures its ops."""

    def __init__(self, arguments: argparse.Namespace, parallel: ParallelConfig, layers: int, device: torch.device):
        self.device, self.layers, self.repeats = device, layers, arguments.repeats
        self.longest = max(sum(arguments.max_length >> cut for cut in case.cuts) for case in CASES)
        config = benchmark_model(arguments.model, arguments.vocab_size, self.longest, arguments.bf16, layers)
        config = replace(config, moe_grouped_gemm=config.num_experts is not None)
        check_tensor_parallel(config, parallel)
        check_experts(config, parallel)
        check_context_parallel(config, parallel)
        self.chunks = data_parallel_chunks(build_model(config, device, parallel), parallel)
        self.engine = TreeEngine(
            self.chunks,
            logprob_chunk_tokens=arguments.logprob_chunk_tokens,
            tree_attention_impl=arguments.tree_attention_impl,
        )
        self.objective = make_objective(ObjectiveConfig(objective="sft"))
        self.random = np.random.default_rng(arguments.seed)
        self.keepable = self.longest
        if device.type == "cuda":
            # A short chain measures the bytes that a token keeps; they limit the tokens that the other cases keep.
            first = self.run(Case((4, 4), 1.0), arguments.max_length, repeats=1)
            per_token = max(op.kept_bytes / op.tokens for op in first if op.kept_bytes is not None)
            torch.cuda.empty_cache()
            free, _ = torch.cuda.mem_get_info(device)
            least = min(current_mesh().gather_from_all(FOR_ACTIVATIONS * free / max(1.0, per_token)))
            self.keepable = int(least)

    def cases(self, max_length: int) -> list[MeasuredOp]:
        return [op for case in CASES for op in self.run(case, max_length)]

    def _sample(self, tokens: int, trained: float) -> TrainingSample:
        mask = self.random.random(tokens) < trained
        mask[0], mask[-1] = False, True
        return TrainingSample(self.random.integers(0, self.engine.true_vocab_size, tokens).astype(np.int32), mask)

    def run(self, case: Case, max_length: int, repeats: int | None = None) -> list[MeasuredOp]:
        """Measure the ops of a case: median (on a CPU, minimum) of the repeats, after one warm-up run."""
        lengths = [max_length >> cut for cut in case.cuts]
        tokens = int(sum(lengths))
        each = tokens if case.sequences is None else max_length >> case.sequences
        samples = [self._sample(each, case.trained) for _ in range(tokens // each)]
        batch = prepare_batch(samples, TreeConfig(tree_mode="dense", tree_segment_tokens=tokens))
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        tree = batch.plan.segments.tree
        segments = SegmentPlan(tree, starts, segment_parents(tree, starts), max(lengths))
        # Two of three segments keep their activations, as far as memory allows, so that all kinds of ops occur.
        kept = np.zeros(len(lengths), dtype=bool)
        for segment in reversed(range(len(lengths))):
            fits = sum(n for n, own in zip(lengths, kept, strict=True) if own) + lengths[segment] <= self.keepable
            kept[segment] = fits and (len(lengths) < 3 or segment % 3 != 1)
        choice = StepChoice(segments, kept, 0, 0.0)
        plan = plan_segmented_step(samples, choice, self.engine.pipeline(None))
        runs = []
        for _ in range(1 + (repeats or self.repeats)):
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
            run = StageRun(self.engine, replace(batch, plan=plan), self.objective)
            run.clock = CostClock(self.device, case.paused)
            run.walk()
            runs.append(run.clock.costs())
            del run  # Free its memory for the next run.
        return self._measured(plan, runs[1:])

    def _measured(self, plan: StepPlan, runs: list[dict[tuple[OpKind, int], _OpCost]]) -> list[MeasuredOp]:
        segments, edges = plan.segments, np.diff(plan.segment_edges)
        pairs, paths, found = attention_pairs(segments), segments.in_flight_tokens, []
        for kind, s in runs[0]:
            keeps = bool(plan.training.kept[0, s])
            name = "forward" if kind is OpKind.FORWARD else "backward" if keeps else "recompute"
            costs = [run[kind, s] for run in runs]
            left = max(c.left for c in costs) if name == "forward" and keeps and costs[0].left is not None else None
            peak = max(c.peak for c in costs) if costs[0].peak is not None else None
            counts = (int(segments.lengths[s]), int(paths[s]), int(pairs[s]), int(edges[s]))
            # A shared processor is measured by its fastest run; a GPU is not shared, but its clock varies.
            typical = median if self.device.type == "cuda" else min
            found.append(MeasuredOp(name, self.layers, *counts, typical(c.seconds for c in costs), left, peak))
        return found


def fit_again(arguments: argparse.Namespace) -> None:
    """Fit the measurements of ``--refit`` again and write them with the new coefficients."""
    fitted = measured_on("cost model", {}, torch.device("cpu"))
    when = {name: fitted[name] for name in ("date", "commit")} | {"command": f"--refit {arguments.refit.name}"}
    results = refit(arguments.refit, when)
    _write(results, arguments.output)
    load_cost_file(arguments.output)
    print_json({key: results[key] for key in SHOWN})


def _write(results: dict[str, Any], output: Path) -> None:
    with replacing(output) as temporary:
        temporary.write_text(json_text(results, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    arguments = parse_arguments()
    if arguments.refit is not None:
        fit_again(arguments)
        return 0
    parallel = ParallelConfig(
        tensor_model_parallel_size=arguments.tensor_model_parallel_size,
        sequence_parallel=arguments.sequence_parallel,
        expert_model_parallel_size=arguments.expert_model_parallel_size,
        expert_tensor_parallel_size=arguments.expert_tensor_parallel_size,
    )
    start = time.perf_counter()
    device = initialize_parallel(arguments.seed, parallel)
    check_world_size(parallel, torch.distributed.get_world_size())
    mesh = current_mesh()
    if mesh.data_size > len(mesh.expert_data_ranks):
        raise InputError(
            "the processes must be one tensor group, or share experts: set --tensor-model-parallel-size or "
            "--expert-model-parallel-size to their number"
        )
    all_layers = MODELS[arguments.model].num_layers
    ops: list[MeasuredOp] = []
    for layers in depths(arguments):
        measured = DepthMeasurement(arguments, parallel, layers, device)
        ops += measured.cases(arguments.max_length)
        engine = measured.engine
        shape = cost_shape(engine.config, engine.shape, engine.dtype)
        counted = engine.counted_bytes() if device.type == "cuda" else None
        del measured, engine
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    forward, backward = fit_seconds(ops)
    costs = CostFile(str(arguments.output), shape, all_layers, forward, backward, fit_bytes(ops, counted))
    if mesh.rank == 0:
        results = measured_on("cost model", vars(arguments), device) | costs.as_json()
        results |= {
            "errors": fit_errors(ops, forward, backward),
            "seconds_to_measure": time.perf_counter() - start,
            "measurements": [asdict(op) for op in ops],
        }
        _write(results, arguments.output)
        print_json({key: results[key] for key in (*SHOWN, "seconds_to_measure")})
    # Exit together: a rank that exits while others still use its connections makes them abort.
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return 0
