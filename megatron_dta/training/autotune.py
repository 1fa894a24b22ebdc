"""Decides on GPUs how much memory a step may use and what its work costs, where no flag does.

memory      all of the GPU, less what others hold at the moment: the CUDA context, NCCL and other processes (measured by
            the driver), pools of CUDA graphs, tensors that are not the step's (a sampler's cache), and a margin. It is
            measured before every step. From the second step on, when every communicator exists, it is only lowered.
costs       the data sheet of the GPU (``planning.costs.gpus``), corrected by the ops of the second step
failures    a step that runs out of memory nevertheless is planned again with less, once. If other ranks may be waiting
            for the one that failed, the run ends instead, and leaves a lower limit in its folder for the next attempt

All ranks make the same decisions. A checkpoint keeps both decisions, so that a continued run plans as the whole one
would have.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.common.files import read_json, replacing
from megatron_dta.core.engine import StepResult, TreeBatch, TreeEngine
from megatron_dta.core.engine.cost_inputs import why_not_predicted
from megatron_dta.core.planning.costs.correction import CostCorrection, MeasuredPass, fit_correction
from megatron_dta.core.planning.costs.memory_budget import GIB
from megatron_dta.training.config import TrainConfig
from megatron_dta.training.optimizer.build import TrainingOptimizer

# Share of the GPU that stays free: blocks that the allocator cannot join, and what libraries allocate during a step.
MARGIN_SHARE = 0.04
# Room for the buffers of communicators, which are created when they are first used.
COMMUNICATOR_BYTES = 2 * GIB
# What a step that failed gets when it is planned again.
RETRY_SHARE = 0.85
# The step whose ops correct the costs. In the first one kernels are compiled.
MEASURED_STEP = 2
# Steps after which the memory of CUDA graphs is measured again.
GRAPH_INTERVAL = 16
# The file in which a run that ran out of memory leaves a lower limit.
LEFT_LIMIT = "memory_limit.json"


@dataclass(frozen=True)
class GpuMemory:
    """The use of a GPU's memory at a moment, in bytes.

    Attributes:
        outside: in use by anything but PyTorch's allocator: the context, NCCL, other processes.
        graphs: reserved by PyTorch for CUDA graphs, and of no use to a step.
        others: tensors that are neither the step's nor its models'.
    """

    total: float
    outside: float
    graphs: float
    others: float

    def limit(self, reserved: float) -> int:
        """Whole GiB that the tensors of a step and its models may take with ``reserved`` bytes more left free."""
        held = self.outside + self.graphs + self.others
        return int((self.total * (1 - MARGIN_SHARE) - held - reserved) // GIB)


def decides_memory(config: TrainConfig, engine: TreeEngine) -> bool:
    """Whether the limit of a step's memory is left to this module."""
    can_predict = why_not_predicted(engine.tree_models[0]) is None
    return engine.device.type == "cuda" and can_predict and config.leaves_memory_open


def states_of(optimizers: Iterable[TrainingOptimizer], frozen: Iterable[torch.nn.Module]) -> Iterator[torch.Tensor]:
    """Weights, gradients and optimizer states of trained models, and the weights of frozen ones."""
    for optimizer in optimizers:
        yield from (parameter for chunk in optimizer.chunks for parameter in chunk.parameters())
        yield from optimizer.gradient_buffers()
        yield from optimizer.state_tensors()
    yield from (parameter for chunk in frozen for parameter in chunk.parameters())


def measure_gpu(device: torch.device, states: Iterable[torch.Tensor], graphs: float | None = None) -> GpuMemory:
    """The GPU's memory now.

    Args:
        states: the tensors of weights, gradients and optimizer states.
        graphs: bytes of CUDA graphs, if known; to find them takes milliseconds for a thousand tensors.
    """
    free, total = torch.cuda.mem_get_info(device)
    sizes = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in states if tensor.is_cuda
    }
    if graphs is None:
        graphs = sum(
            part["total_size"] - part["allocated_size"]
            for part in torch.cuda.memory_snapshot()
            if tuple(part["segment_pool_id"]) != (0, 0)
        )
    others = max(0, torch.cuda.memory_allocated(device) - sum(sizes.values()))
    return GpuMemory(total, total - free - torch.cuda.memory_reserved(device), graphs, others)


def build_autotuner(
    config: TrainConfig,
    engine: TreeEngine,
    constant_bytes: float,
    optimizers: Sequence[TrainingOptimizer],
    frozen: Iterable[torch.nn.Module] = (),
) -> Autotuner:
    """The autotuner of a run with these settings.

    Args:
        constant_bytes: weights, gradients and optimizer states of all models on this rank.
        optimizers: of the trained models.
        frozen: the chunks of models that are not trained.
    """
    frozen = list(frozen)
    return Autotuner(
        engine,
        constant_bytes,
        lambda graphs: measure_gpu(engine.device, states_of(optimizers, frozen), graphs),
        decides_memory(config, engine),
        config.optimization.deterministic_mode,
        None if config.checkpoint.save is None else Path(config.checkpoint.save),
    )


def _left_limit(folder: Path | None) -> float:
    """The limit in GiB that an earlier attempt left in the run's folder; infinite if there is none."""
    path = None if folder is None else folder / LEFT_LIMIT
    if path is None or not path.exists():
        return math.inf
    values = read_json(path)
    limit = values.get("memory_gib") if isinstance(values, dict) else None
    if not isinstance(limit, int) or limit < 1:
        raise InputError(f"{path}: memory_gib must be a whole number above 0; delete the file")
    return limit


def _leave_limit(folder: Path, limit: int) -> None:
    with replacing(folder / LEFT_LIMIT) as temporary:
        temporary.write_text(json.dumps({"memory_gib": limit}) + "\n", encoding="utf-8")


class Autotuner:
    """Keeps the decisions of a run and applies them to its engine.

    Args:
        engine: plans with the decisions.
        constant_bytes: weights, gradients and optimizer states of all models on this rank.
        measure: returns the use of this rank's GPU; its argument is what CUDA graphs use, None to measure that, too.
        sets_memory: whether the memory of a step is decided here; otherwise only costs are corrected.
        folder: the run's folder, in which attempts leave their limits; None if it has none.
        deterministic: follow no clock: costs stay those of the data sheet.

    Attributes:
        limit: GiB that the step and its models may take; None if that is not decided here.
        follows: raise the limit again when others free memory, rather than keep one plan for the whole run.
    """

    def __init__(
        self,
        engine: TreeEngine,
        constant_bytes: float,
        measure: Callable[[float | None], GpuMemory],
        sets_memory: bool = True,
        deterministic: bool = False,
        folder: Path | None = None,
    ) -> None:
        self._engine, self._constant, self._measure = engine, constant_bytes, measure
        self._sets_memory, self._folder = sets_memory, folder
        self._corrects_costs = engine.has_device_costs and not deterministic
        # Steps of this process, and whether a checkpoint's decisions are continued.
        self._steps, self._is_continued, self._retried = 0, False, False
        # A limit with which a step has run out of memory is not tried again.
        self._most = _left_limit(folder)
        self.limit: int | None = None
        self.follows = False
        self._total, self._graphs = 0.0, 0.0
        self.update()

    def update(self) -> bool:
        """Measure the memory and set the limit of the next steps; returns whether plans of earlier calls exceed it."""
        if not self._sets_memory:
            return False
        is_usual = self._steps > MEASURED_STEP and self._steps % GRAPH_INTERVAL != 0
        mesh, gpu = self._engine.mesh, self._measure(self._graphs if is_usual else None)
        self._graphs = gpu.graphs
        reserved = COMMUNICATOR_BYTES if self._steps == 0 and mesh.world_size > 1 else 0.0
        limit, self._total = map(min, zip(*mesh.gather_from_all((gpu.limit(reserved), gpu.total)), strict=True))
        limit, before = min(limit, self._most), self.limit
        may_rise = self.follows or (self._steps == 1 and not self._is_continued)
        if before is not None and limit > before and not may_rise:
            return False
        if limit != before:
            self._set(limit)
        return before is not None and limit < before

    def _set(self, limit: int) -> None:
        self.limit = limit
        self._engine.limit_memory(limit, self._constant, automatic=True)

    @property
    def measures_next_step(self) -> bool:
        """Whether the next step must record its timeline."""
        return self._corrects_costs and self._steps + 1 == MEASURED_STEP

    def observe(self, result: StepResult) -> bool:
        """Take note of a finished step; returns whether it changed the costs."""
        self._steps += 1
        self._retried = False
        if not (self._corrects_costs and self._steps == MEASURED_STEP and result.timeline):
            return False
        self._corrects_costs = False
        engine, plan = self._engine, result.plan
        measured = MeasuredPass(
            (plan.segments.lengths, plan.segments.attention_pairs, np.diff(plan.segment_edges)),
            engine.tree_models[0].stage_layers,
            engine.mesh.pipeline_size,
            plan.training.kept,
            result.timeline,
        )
        correction = fit_correction(engine.cost_model(None), measured)
        engine.correction = CostCorrection.mean(engine.mesh.gather_from_all(correction))
        return True

    def retry(self, batch: TreeBatch, error: torch.OutOfMemoryError) -> str:
        """Lower the limit after ``batch`` ran out of memory, and return a line that says so.

        Raises:
            InputError: the step has failed twice, or other ranks may be waiting for this one.
        """
        step = f"a step over {batch.plan.segments.tree.num_tokens:,} tokens ran out of GPU memory"
        fix = f"lower --tree-memory-gib (it was {self._in_force()})"
        if not self._sets_memory or self._retried:
            raise InputError(f"{step}; {fix}") from error
        self._retried, before = True, self.limit
        self._most = int(RETRY_SHARE * before)
        if self._engine.mesh.world_size > 1:
            if self._folder is not None:
                _leave_limit(self._folder, self._most)
                fix = f"the same command continues within {self._most} GiB instead of {before}"
            raise InputError(f"{step}; {fix}") from error
        self._set(self._most)
        return f"{step}: planning it again within {self.limit} GiB instead of {before}"

    def _in_force(self) -> str:
        memory = self._engine.memory
        return "not limited" if memory is None else f"{memory.gib:g}"

    def describe(self) -> str | None:
        """The limit and the reasons for it; None if a flag decides it."""
        if not self._sets_memory:
            return None
        gpu = self._measure(None)
        parts = [f"{gpu.total / GIB:.1f} on the GPU", f"{gpu.outside / GIB:.1f} outside PyTorch"]
        parts += [f"{gpu.graphs / GIB:.1f} of CUDA graphs"] if gpu.graphs else []
        parts += [f"{gpu.others / GIB:.1f} of other tensors"] if gpu.others >= GIB / 20 else []
        parts.append(f"{MARGIN_SHARE:.0%} margin")
        return f"at most {self.limit} GiB with a step ({', less '.join(parts)}; or --tree-memory-gib)"

    def state_dict(self) -> dict[str, Any]:
        """The decisions, as plain values."""
        correction = None if self._corrects_costs else asdict(self._engine.correction)
        return {"memory_gib": self.limit, "gpu_bytes": self._total, "correction": correction}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the decisions of a checkpoint, unless it has none or was written on other GPUs."""
        if not state or state["gpu_bytes"] != self._total:
            return
        if self.limit is not None and state["memory_gib"] is not None:
            self._is_continued = True
            self._set(min(state["memory_gib"], self.limit))
        if self._corrects_costs and state["correction"] is not None:
            self._engine.correction, self._corrects_costs = CostCorrection(**state["correction"]), False
