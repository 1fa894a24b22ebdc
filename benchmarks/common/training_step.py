"""Times training steps (forward, backward, reduction of gradients; no optimizer) of a model with random weights.

Operations are counted once for every token of the step's forest (``planning.step.flops``). The speed-up of a step over
dense training of the same sequences cannot be more than the ratio of their operations, the *bound*.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads

from common.planning.plan_accuracy import predicted_seconds
from common.profile import gemm_peak, now
from megatron_dta.core.config import ModelConfig, ObjectiveConfig, ParallelConfig, TreeConfig
from megatron_dta.core.config.checks.experts import check_experts
from megatron_dta.core.config.checks.mesh import check_context_parallel, check_tensor_parallel, check_world_size
from megatron_dta.core.engine import StepPart, StepResult, TreeBatch, TreeEngine, prepare_batch
from megatron_dta.core.engine.cost_inputs import why_not_predicted
from megatron_dta.core.model.build import build_model
from megatron_dta.core.model.parallel.mesh import initialize_parallel, training_mesh
from megatron_dta.core.objectives.registry import make_objective
from megatron_dta.core.objectives.weights import count_trained
from megatron_dta.core.planning.costs.memory_budget import GIB, MemoryBudget
from megatron_dta.core.planning.step.passes import stage_peak_bytes
from megatron_dta.core.planning.step.sample import TrainingSample
from megatron_dta.training.constant_memory import constant_bytes
from megatron_dta.training.data.division import partition_samples
from megatron_dta.training.optimizer.build import data_parallel_chunks


@dataclass(frozen=True)
class EngineOptions:
    """Settings of the engine and of the gradient buffers; see the flags of ``benchmarks/train.py``."""

    tree_attention_impl: str = "auto"
    bf16_gradients: bool = False
    kv_offload_fraction: float = 0.0


@dataclass(frozen=True)
class StepTiming:
    """A measured step: the median of its timed runs on the slowest rank, and the result of the last run.

    Attributes:
        steps: number of timed runs.
        peak_memory_gib: PyTorch's peak of allocated memory; None on a CPU.
    """

    seconds: float
    steps: int
    result: StepResult
    peak_memory_gib: float | None


class StepTimer:
    """A model with gradient buffers, and the steps that are timed on it."""

    def __init__(
        self, model_config: ModelConfig, parallel: ParallelConfig, seed: int, options: EngineOptions | None = None
    ) -> None:
        self.model_config, self.parallel, self.options = model_config, parallel, options or EngineOptions()
        check_tensor_parallel(model_config, parallel)
        check_context_parallel(model_config, parallel)
        check_experts(model_config, parallel)
        self.device = initialize_parallel(seed, parallel)
        check_world_size(parallel, torch.distributed.get_world_size())
        self.mesh = training_mesh()
        self.model = build_model(model_config, self.device, parallel)
        in_float32 = not self.options.bf16_gradients
        self.chunks = data_parallel_chunks(self.model, parallel, in_float32=in_float32)
        self.constant = constant_bytes(self.chunks)
        self.engine = self._make_engine()
        self.objective = make_objective(ObjectiveConfig(objective="sft"))
        self.peak = gemm_peak(self.device, model_config.params_dtype)

    def _make_engine(self) -> TreeEngine:
        options = self.options
        engine = TreeEngine(
            self.chunks,
            tree_attention_impl=options.tree_attention_impl,
        )
        engine.offload_kv(options.kv_offload_fraction)
        return engine

    def limit_memory(self, gib: float | None) -> None:
        """Plan the steps that follow within this memory; None for no limit."""
        if gib is None:
            self.engine.memory = None
        else:
            self.engine.limit_memory(gib, self.constant)

    def plan(self, samples: Sequence[TrainingSample], tree: TreeConfig) -> TreeBatch:
        """The step over this rank's part of the samples."""
        indices = list(range(len(samples)))
        if self.mesh.data_size > 1:
            indices = partition_samples(samples, self.engine, tree).sequences_of(self.mesh.data_rank).tolist()
        counts = count_trained([sample.num_trained for sample in samples])
        pipeline = self.engine.pipeline(tree.tree_segment_tokens)
        return prepare_batch([samples[i] for i in indices], tree, pipeline=pipeline, part=StepPart(counts))

    def zero_gradients(self) -> None:
        """Zero the gradients of all chunks."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()

    def time(self, batch: TreeBatch, steps: int, longest_warm_up: float = math.inf) -> StepTiming:
        """Run a step once to warm up and then ``steps`` times.

        Args:
            longest_warm_up: a first run that takes more seconds than this counts as the measurement.
        """
        seconds = []
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        for step in range(1 + steps):
            self.zero_gradients()
            self.mesh.wait_for_all()
            recorded = self.mesh.pipeline_size > 1 and step == steps
            # In a run, where the step before is still being computed.
            self.engine.prepare_ahead(batch, self.objective)
            start = now(self.device)
            result = self.engine.forward_backward(batch, self.objective, record_timeline=recorded)
            finalize_model_grads(self.chunks)
            seconds.append(now(self.device) - start)
            if step == 0 and max(self.mesh.gather_from_all(seconds[0])) > longest_warm_up:
                break
        timed = seconds[1:] or seconds
        is_cuda = self.device.type == "cuda"
        memory = torch.cuda.max_memory_allocated(self.device) / 2**30 if is_cuda else None
        return StepTiming(max(self.mesh.gather_from_all(median(timed))), len(timed), result, memory)

    def row(self, batch: TreeBatch, timing: StepTiming) -> dict[str, Any]:
        """Rates, counts and memory of a measured step."""
        is_first = self.mesh.is_first_of_replica
        flops = sum(self.mesh.gather_from_all(self.engine.operations(batch.plan)[0] if is_first else 0.0))
        seconds, result = timing.seconds, timing.result
        return {
            "tokens_per_second": result.sequence_tokens / seconds,
            "unique_tokens_per_second": result.computed_tokens / seconds,
            "tokens": result.sequence_tokens,
            "unique_tokens": result.computed_tokens,
            "segments": result.segments,
            "segment_tokens": batch.plan.segments.segment_tokens,
            "tflop": flops / 1e12,
            "share_of_gemm_peak": flops / seconds / (self.peak * self.mesh.world_size),
            "peak_memory_gib": timing.peak_memory_gib,
            "memory_limit_gib": None if self.engine.memory is None else self.engine.memory.gib,
            "predicted_peak_gib": self._predicted_peak(batch),
            "peak_in_flight_tokens": result.peak_in_flight_tokens,
            "recomputed_tokens": result.recomputed_tokens,
        }

    def predicted(self, batch: TreeBatch, seconds: float) -> dict[str, float]:
        """Seconds that the cost model predicts for the slowest replica, and their error against ``seconds``."""
        if not self.engine.has_device_costs:
            return {}
        shape = self.engine.pipeline(batch.plan.segments.segment_tokens)
        expected = max(self.mesh.gather_from_all(predicted_seconds(batch.plan, shape)))
        return {"predicted_seconds": expected, "prediction_error": expected / seconds - 1}

    def _predicted_peak(self, batch: TreeBatch) -> float | None:
        """GiB of this process by counted bytes, weights and gradients included; None if unknown."""
        if why_not_predicted(self.engine.tree_models[0]) is not None:
            return None
        shape = self.engine.pipeline(batch.plan.segments.segment_tokens)
        budget = MemoryBudget(0.0, (self.constant,) * shape.num_stages, self.engine.stage_bytes())
        plan, stage = batch.plan, self.mesh.pipeline_rank
        step = stage_peak_bytes(plan.segments, plan.training, replace(shape, memory=budget), stage)
        return (self.constant + step) / GIB


def compared(row: dict[str, Any], dense: dict[str, Any]) -> dict[str, float]:
    """Speed-up of a row over that of dense training, its bound, and the share of the bound."""
    speed_up, bound = dense["seconds"] / row["seconds"], dense["tflop"] / row["tflop"]
    return {"speed_up": speed_up, "bound": bound, "share_of_bound": speed_up / bound}
