"""Times training steps of one model over the same sequences: dense packed, packed trees, and trees in segments.

Kernels, model and loss are those of training in all modes. On a GPU the memory of dense and tree steps is decided as in
training; a packed tree is one forward and one backward, so its capacity decides its memory. What does not fit is a row
without seconds that says so.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads

from common.profile import now
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.config import ModelConfig, ObjectiveConfig, ParallelConfig, TreeConfig
from megatron_dta.core.engine import TreeBatch, TreeEngine, prepare_batch
from megatron_dta.core.model.build import build_model
from megatron_dta.core.model.parallel.mesh import initialize_parallel
from megatron_dta.core.objectives.registry import make_objective
from megatron_dta.training.autotune import Autotuner, measure_gpu
from megatron_dta.training.constant_memory import constant_bytes
from megatron_dta.training.optimizer.build import data_parallel_chunks
from papers.tree_training_parts.data import TreeSet

MODES = ("dense", "packed", "dta")


class StepTimer:
    """A model with random weights and gradient buffers, on which steps are timed.

    Args:
        steps: timed steps after one to warm up; the median counts.
    """

    def __init__(self, model: ModelConfig, steps: int) -> None:
        self.steps, self.device = steps, initialize_parallel(seed=1)
        built = build_model(model, self.device)
        self._chunks = data_parallel_chunks(built, ParallelConfig())
        self._engine = TreeEngine(self._chunks)
        self._objective = make_objective(ObjectiveConfig(objective="sft"))
        self._tuner, self._first_steps = None, 0
        if self.device.type == "cuda" and model.num_experts is None:
            states = [*built.parameters(), *(b.grad_data for chunk in self._chunks for b in chunk.buffers)]
            constant = constant_bytes(self._chunks)
            self._tuner = Autotuner(self._engine, constant, lambda graphs: measure_gpu(self.device, states, graphs))
            self._first_steps = 2

    def compare(self, trees: TreeSet, capacity: int) -> dict[str, Any]:
        """A row with the steps of all modes over ``trees``, and their speed-ups over dense with the bounds."""
        capacity = max(capacity, trees.longest)
        row = {"set": trees.name, "overlap": trees.overlap, "sequences": len(trees.samples), "tokens": trees.tokens}
        row |= {"unique_tokens": trees.tree.num_tokens, "pack_capacity": capacity}
        for mode in MODES:
            row |= {f"{mode}_{name}": value for name, value in self.measure(trees, mode, capacity).items()}
        for mode in MODES[1:]:
            row[f"{mode}_bound"] = row["dense_tflop"] / row[f"{mode}_tflop"] if f"{mode}_tflop" in row else None
            if row.get(f"{mode}_seconds") and row.get("dense_seconds"):
                row[f"{mode}_speed_up"] = row["dense_seconds"] / row[f"{mode}_seconds"]
                row[f"{mode}_share_of_bound"] = row[f"{mode}_speed_up"] / row[f"{mode}_bound"]
        return row

    def measure(self, trees: TreeSet, mode: str, capacity: int) -> dict[str, Any]:
        """Seconds, operations and memory of a mode's step."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
        figures: dict[str, Any] = {}
        try:
            while mode != "packed" and self._first_steps:
                self._tune(self._plan(trees, mode, capacity))
            batch = self._plan(trees, mode, capacity)
            figures["tflop"] = self._engine.operations(batch.plan)[0] / 1e12
            seconds = [self._step(batch) for _ in range(1 + self.steps)]
        except (InputError, torch.OutOfMemoryError) as error:
            return figures | {"error": str(error).splitlines()[0][:200]}
        figures |= {
            "seconds": median(seconds[1:]),
            "computed_tokens": batch.plan.segments.tree.num_tokens,
            "segments": batch.plan.segments.num_segments,
            "largest_segment": int(batch.plan.segments.lengths.max()),
        }
        if self.device.type == "cuda":
            figures["peak_memory_gib"] = torch.cuda.max_memory_allocated(self.device) / 2**30
        return figures

    def _plan(self, trees: TreeSet, mode: str, capacity: int) -> TreeBatch:
        size = capacity if mode == "packed" else None
        pipeline = self._engine.pipeline(size)
        if mode == "packed":
            pipeline = replace(pipeline, memory=None)
        return prepare_batch(trees.samples, TreeConfig(tree_mode=mode, tree_segment_tokens=size), pipeline=pipeline)

    def _step(self, batch: TreeBatch) -> float:
        self._zero()
        start = now(self.device)
        self._engine.forward_backward(batch, self._objective)
        finalize_model_grads(self._chunks)
        return now(self.device) - start

    def _tune(self, batch: TreeBatch) -> None:
        """One of the first steps of a run, which correct its costs and its memory."""
        self._zero()
        is_timed = self._tuner.measures_next_step
        self._tuner.observe(self._engine.forward_backward(batch, self._objective, record_timeline=is_timed))
        self._tuner.update()
        self._first_steps -= 1

    def _zero(self) -> None:
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
