"""Runs the passes of a step on this rank's part of the model and combines the results of all ranks.

A pass executes an op list (``stage_run``). Every sequence through a segment ends in that segment or in a descendant,
and the backward of a segment comes after those of its descendants. A backward therefore always finds its loss computed,
and objectives over whole sequences need no second pass. Dense and packed training are other forests for the same op
list. A pass for logprobs only is an op list without backwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch

from megatron_dta.core.engine.batch import TreeBatch
from megatron_dta.core.engine.cost_inputs import costs_of_gpu, counted_bytes, why_not_predicted
from megatron_dta.core.engine.loss_pass import Objective
from megatron_dta.core.engine.rank_model import RankModel
from megatron_dta.core.engine.stage_run import StageRun
from megatron_dta.core.engine.step_result import StepResult, TokenOutputs
from megatron_dta.core.extensions import KV_OFFLOAD, TRANSFORMER_ENGINE
from megatron_dta.core.model.parallel.mesh import Mesh
from megatron_dta.core.model.parallel.staged_model import Model
from megatron_dta.core.planning.costs.correction import CostCorrection
from megatron_dta.core.planning.costs.memory_budget import MemoryBudget, StageBytes
from megatron_dta.core.planning.costs.model import CostModel
from megatron_dta.core.planning.costs.segment_bytes import RankTensors, SegmentBytes
from megatron_dta.core.planning.step.flops import StepCounts
from megatron_dta.core.planning.step.passes import PipelineShape, RankGroup
from megatron_dta.core.planning.step.plan import StepPlan
from megatron_dta.core.planning.step.search import DEFAULT_SEGMENT_TOKENS, SIZES

if TYPE_CHECKING:
    from megatron_dta.core.engine.op_clock import OpClock


class TreeEngine(RankModel):
    """Runs batches on a model.

    Args:
        model, temperature, logprob_chunk_tokens, tree_attention_impl, routing_replay: see ``RankModel``.

    Attributes:
        memory: the memory that a step may use; None means no limit. ``limit_memory`` sets it.
        correction: factors on the costs of the data sheet.
    """

    def __init__(
        self,
        model: Model | Sequence[torch.nn.Module],
        temperature: float = 1.0,
        logprob_chunk_tokens: int | None = None,
        tree_attention_impl: str = "auto",
        routing_replay: bool = False,
    ) -> None:
        self.memory: MemoryBudget | None = None
        self._next_run: StageRun | None = None
        super().__init__(model, temperature, logprob_chunk_tokens, tree_attention_impl, routing_replay)
        self.correction = CostCorrection()

    def offload_kv(self, fraction: float) -> None:
        """Keep the K/V slots of this share of the layers on the host (``--kv-offload-fraction``)."""
        self.kv_on_host = KV_OFFLOAD.part(fraction, self.device) if fraction > 0 else None

    def limit_memory(self, gib: float, constant_bytes: float, automatic: bool = False) -> None:
        """Plan steps within ``gib`` GiB, of which ``constant_bytes`` are this rank's weights, gradients and optimizer
        states. All ranks of a replica call this.

        Args:
            automatic: the limit is what the GPU has; otherwise it is a user's, which messages name.
        """
        ranks = self.mesh.gather_over_replica((self.mesh.pipeline_rank, float(constant_bytes)))
        constant = [max(size for rank, size in ranks if rank == stage) for stage in range(self.mesh.pipeline_size)]
        self.memory = MemoryBudget(gib, tuple(constant), self.stage_bytes(), automatic)

    def stage_bytes(self) -> tuple[StageBytes, ...]:
        """Bytes of each virtual stage."""
        from megatron_dta.core.planning.costs.state_bytes import StateBytes

        ends = np.cumsum(self.tree_models[0].stage_layers).tolist()
        ranges = [range(begin, end) for begin, end in pairwise([0, *ends])]
        divisor = self.config.tensor_model_parallel_size * self.mesh.context_size
        return tuple(
            StageBytes(
                self.counted_bytes(layers), StateBytes.of_shape(self.shape, self.dtype.itemsize, divisor, layers)
            )
            for layers in ranges
        )

    def counted_bytes(self, layers: range | None = None) -> SegmentBytes:
        """Bytes that a step needs for each token in ``layers``, None for all, by counting; raises InputError for a
        model with experts.
        """
        part, config = self.tree_models[0], self.config
        in_buffers = part.adds_to_main_grad and all(parameter.requires_grad for parameter in part.parameters())
        rank = RankTensors(
            self.dtype.itemsize,
            config.tensor_model_parallel_size,
            config.sequence_parallel,
            self.logprob_chunk_tokens,
            part.has_fused_layers,
            self.uses_kernels,
            in_buffers,
            part.fp32_lm_head,
            config.expert_model_parallel_size,
            self.mesh.context_size,
            config.expert_tensor_parallel_size or 1,
            self.kv_on_host.fraction if self.kv_on_host is not None else 0.0,
        )
        return counted_bytes(part, self.shape, rank, layers)

    def cost_model(self, segment_tokens: int | None) -> CostModel:
        """Costs of tokens, attention pairs and logprobs for the whole model, up to a common factor.

        Args:
            segment_tokens: maximum number of tokens of a segment. None if the planner chooses the segment size: the
                costs are then for the usual size or, if they are in seconds, for the largest size that may be chosen.
        """
        size = segment_tokens or max(SIZES) * self.mesh.context_size
        of_gpu = costs_of_gpu(self.tree_models[0], self.shape, size, self.mesh.context_size)
        if of_gpu is not None:
            return self.correction.apply(of_gpu)
        return CostModel.from_shape(self.shape, segment_tokens or DEFAULT_SEGMENT_TOKENS)

    @property
    def has_device_costs(self) -> bool:
        """Whether ``cost_model`` is in seconds of this rank's device."""
        return self.device.type == "cuda" and why_not_predicted(self.tree_models[0]) is None

    def pipeline(self, segment_tokens: int | None) -> PipelineShape:
        """The ranks for which a step must be planned (``prepare_batch``).

        If gradients are reduced in a backward, a rank without segments runs an empty one, so that it joins the
        reduction in the same order.
        """
        ranks, least = self.mesh.expert_data_ranks, int(self.syncs_in_backward)
        group = None
        if len(ranks) > 1 or least:
            group = RankGroup(ranks.index(self.mesh.data_rank), self.mesh.gather_over_experts, least)
        return PipelineShape(
            num_stages=self.mesh.pipeline_size,
            num_model_chunks=len(self.chunks),
            layers=self.tree_models[0].stage_layers,
            cost_model=self.cost_model(segment_tokens),
            memory=self.memory,
            is_measured=self.has_device_costs,
            group=group,
            context_size=self.mesh.context_size,
        )

    def operations(self, plan: StepPlan) -> tuple[float, float]:
        """Floating-point operations of forward and backward of the whole model: over the plan's forest, and over its
        sequences one by one (``planning.step.flops``).
        """
        return StepCounts.of(plan).flops(self.shape), StepCounts.without_sharing(plan).flops(self.shape)

    def prepare_ahead(self, batch: TreeBatch, objective: Objective) -> None:
        """Upload what ``forward_backward`` of the same arguments will begin with, while the device computes a step."""
        if getattr(objective, "pair_function", None) is None:  # which changes the batch
            self._next_run = StageRun(self, batch, objective)
            self._next_run.prepare()

    def forward_backward(
        self,
        batch: TreeBatch,
        objective: Objective,
        forbid_synchronization: bool = False,
        record_timeline: bool = False,
        return_outputs: bool = False,
    ) -> StepResult:
        """Add the gradient of the batch's loss to the parameters' gradients.

        Every data-parallel rank must call this with its own part of the step, which may be empty. All ranks of a
        pipeline must call it with the same batch.

        Args:
            forbid_synchronization: on a GPU, raise an error if an op waits for the device (a check of this engine).
            record_timeline: measure when each op runs; must be the same on all ranks.
            return_outputs: copy logprobs and entropies to the host; must be the same on all ranks.
        """
        pair_metrics: dict[str, float] = {}
        pair_function = getattr(objective, "pair_function", None)
        if pair_function is not None:
            from megatron_dta.core.engine.preference_pairs import with_pair_terms

            batch, pair_metrics = with_pair_terms(batch, pair_function, self.compute_logprobs(batch), self.mesh)
        self._check_agreement(batch, training=True)
        run, self._next_run = self._next_run, None
        if run is None or run.batch is not batch or run.loss.objective is not objective:
            run = StageRun(self, batch, objective)
        run.clock = self._clock() if record_timeline else None
        with _synchronization_is_an_error() if forbid_synchronization else nullcontext(), self._constant_weights():
            run.walk()
        result = _result(run, batch, self.mesh)
        if run.experts:
            from megatron_dta.core.engine.expert_pass import with_auxiliary_losses

            result = with_auxiliary_losses(result, run.experts, self.mesh)
        if pair_metrics:
            tensors = {name: result.loss.new_tensor(value) for name, value in pair_metrics.items()}
            result = replace(result, metrics=result.metrics | tensors)
        if return_outputs:
            result = replace(result, outputs=self._outputs(run, batch))
        if run.clock is None:
            return result
        is_first = self.mesh.tensor_rank == 0 and self.mesh.context_rank == 0
        stages = self.mesh.gather_over_replica(run.clock.events() if is_first else [])
        timeline = [event for events in stages for event in events]
        return replace(result, timeline=timeline, plan=batch.plan)

    def _clock(self) -> OpClock:
        from megatron_dta.core.engine.op_clock import OpClock

        return OpClock(self.mesh, self.device)

    def _constant_weights(self) -> AbstractContextManager:
        """Share tensors that are derived from the weights among the passes of a step."""
        if not self.config.fp8:
            return nullcontext()
        return TRANSFORMER_ENGINE.part.weights_quantized_once(self.tree_models)

    def compute_logprobs(self, batch: TreeBatch) -> list[np.ndarray]:
        """Logprobs of the trained tokens under the current weights, one array [T] per sequence, 0 elsewhere."""
        return self.compute_outputs(batch).logprobs

    @torch.no_grad()
    def compute_outputs(self, batch: TreeBatch) -> TokenOutputs:
        """Logprobs and entropies of the trained tokens under the current weights."""
        self._check_agreement(batch, training=False)
        run = StageRun(self, batch, objective=None)
        with self._constant_weights():
            run.walk()
        return self._outputs(run, batch)

    @torch.no_grad()
    def compute_row_states(self, batch: TreeBatch) -> torch.Tensor | None:
        """Hidden states [R, hidden size] of the plan's rows after the final norm, on the host; None on ranks without
        the last stage.
        """
        self._check_agreement(batch, training=False)
        run = StageRun(self, batch, objective=None)
        run.keep_row_states()
        with self._constant_weights():
            run.walk()
        return run.row_states if self.mesh.pipeline_rank == self.mesh.pipeline_size - 1 else None

    def _outputs(self, run: StageRun, batch: TreeBatch) -> TokenOutputs:
        pairs = torch.stack(run.loss.pair_outputs()).cpu().numpy()
        if self.mesh.pipeline_size > 1:
            pairs = self.mesh.from_last_stage(pairs)
        return TokenOutputs(*(batch.per_sequence(values) for values in pairs))

    def _check_agreement(self, batch: TreeBatch, training: bool) -> None:
        """Compare the plans of a replica's ranks, which would wait for each other forever if these were different."""
        if batch.plan.context_size != self.mesh.context_size:
            raise ValueError(
                f"the step is planned for context groups of {batch.plan.context_size}, but there are groups of "
                f"{self.mesh.context_size}; give prepare_batch pipeline=engine.pipeline(...)"
            )
        if batch.plan.num_ranks != len(self.mesh.expert_data_ranks):
            raise ValueError(
                f"the step is planned for {batch.plan.num_ranks} ranks that share experts, but there are "
                f"{len(self.mesh.expert_data_ranks)}; give prepare_batch pipeline=engine.pipeline(...)"
            )
        if self.mesh.pipeline_size * self.mesh.context_size == 1:
            return
        plan = batch.plan.training if training else batch.plan.forward_only
        if plan.schedule.num_stages != self.mesh.pipeline_size or plan.schedule.num_model_chunks != len(self.chunks):
            raise ValueError(
                f"the step is planned for {plan.schedule.num_stages} pipeline stages of "
                f"{plan.schedule.num_model_chunks} model chunks, the model is on {self.mesh.pipeline_size} of "
                f"{len(self.chunks)}; give prepare_batch pipeline=engine.pipeline(...)"
            )
        # The shape and dtype of a message of 8 tokens. A rank cannot detect in a message that its shape is wrong.
        message = (*self.tree_models[0].stage_shape(8, self.mesh.context_size), str(self.dtype))
        ranks = self.mesh.gather_over_replica((self.mesh.rank, batch.plan.digest(plan), message))
        for rank, digest, other in ranks:
            both = f"ranks {ranks[0][0]} and {rank} of one replica"
            if digest != ranks[0][1]:
                raise RuntimeError(f"{both} have planned different steps: their rollouts or settings differ")
            if other != ranks[0][2]:
                raise RuntimeError(f"{both} have messages of different shapes: {ranks[0][2]} and {other}")


def _result(run: StageRun, batch: TreeBatch, mesh: Mesh) -> StepResult:
    """The step's result, the same on every rank: the ranks' results are added in rank order.

    A rank without sequences, or before the last stage, does not know the names of the metrics, so the ranks exchange
    small objects on the host.
    """
    plan, loss, num_parts = batch.plan, run.loss.loss, len(run.pools)
    counts = (
        plan.num_pairs,
        plan.num_sequence_tokens,
        plan.segments.tree.num_tokens,
        plan.segments.num_segments,
        run.recomputed_tokens // num_parts,
    )
    peak, metric_sums, maxima = run.peak_tokens // num_parts, run.loss.metric_sums, run.loss.maxima
    if mesh.data_size > 1 or mesh.pipeline_size > 1:
        named = [{name: float(value) for name, value in metrics.items()} for metrics in (metric_sums, maxima)]
        gathered = mesh.gather_over_stages((float(loss), *named, counts, peak))
        losses, sums, largest, all_counts, _ = zip(*(stages[-1] for stages in gathered), strict=True)
        names = next((list(of_rank) for of_rank in sums if of_rank), [])
        loss = loss.new_tensor(sum(losses))
        metric_sums = {name: loss.new_tensor(sum(of_rank.get(name, 0.0) for of_rank in sums)) for name in names}
        names = next((list(of_rank) for of_rank in largest if of_rank), [])
        # NumPy's maximum is NaN if any value is NaN; the result of Python's max depends on the position of the NaN.
        peaks = {name: np.max([of_rank.get(name, 0.0) for of_rank in largest]) for name in names}
        maxima = {name: loss.new_tensor(float(value)) for name, value in peaks.items()}
        counts = tuple(map(sum, zip(*all_counts, strict=True)))
        # Stages recompute different forwards: take the stage with the most recomputed tokens of each replica.
        recomputed = sum(max(of_stage[-2][-1] for of_stage in stages) for stages in gathered)
        counts = (*counts[:-1], recomputed)
        peak = max(of_stage[-1] for stages in gathered for of_stage in stages)
    num_pairs, sequence_tokens, computed_tokens, segments, recomputed_tokens = counts
    means = {name: total / max(1, num_pairs) for name, total in metric_sums.items()}
    return StepResult(loss, means | maxima, sequence_tokens, computed_tokens, segments, peak, recomputed_tokens)


@contextmanager
def _synchronization_is_an_error() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
