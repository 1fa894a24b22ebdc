"""The one executor: it walks an op list of forwards and backwards over segments.

    F(segment)  tokens and positions in; K and V stay in the pool for descendants; logprobs and entropies of the
                segment's edges out
    loss        of the sequences whose last row the segment holds; its gradient is kept per (sequence, token) pair
    B(segment)  gradients enter at its edges (from the loss) and at its K and V (from its descendants); they leave as
                weight gradients and as dK and dV of its ancestors; its activations and slots are free afterwards

Every sequence through a segment ends in it or in a descendant, and a segment's backward comes after its descendants',
so the loss
is always there when a backward asks for it: objectives of whole sequences need no second pass. Dense and packed
training are other forests in the same op list, and a pass for logprobs only is an op list without backwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_dta.config import TreeConfig
from megatron_dta.engine.batch import TreeBatch, prepare_batch
from megatron_dta.engine.device_plan import DevicePlan
from megatron_dta.engine.expert_pass import ExpertPass
from megatron_dta.engine.loss_pass import LossPass, Objective
from megatron_dta.model import KVPool, Mesh, SegmentContext, TreeGPTModel, accumulation_dtype, current_mesh
from megatron_dta.objectives import TokenLosses
from megatron_dta.planning.sample import TrainingSample
from megatron_dta.planning.schedule import OpKind

# Logits alive at once by default: enough rows to fill a GPU; on a CPU more of them gain nothing.
LOGIT_ELEMENTS = {"cuda": 1 << 26, "cpu": 1 << 22}


@dataclass(frozen=True)
class StepResult:
    """Outcome of one step, of all data-parallel ranks together; gradients are in the model's parameters.

    Counts are sums over the ranks: tokens that two ranks compute count twice.

    Attributes:
        loss: scalar tensor, the step's loss under the one global denominator.
        metrics: scalar tensors, means over the step's trained tokens.
        sequence_tokens, computed_tokens, segments: tokens of the sequences counted separately, tokens of the forests,
            and the segments that they were cut into.
        peak_in_flight_tokens: most tokens whose K and V were alive at once, as run, on any rank.
        recomputed_tokens: tokens whose forward ran twice.
    """

    loss: Tensor
    metrics: dict[str, Tensor]
    sequence_tokens: int
    computed_tokens: int
    segments: int
    peak_in_flight_tokens: int
    recomputed_tokens: int


@dataclass
class _InFlight:
    """A segment between its forward and its backward; the graph is None where it is recomputed."""

    context: SegmentContext
    graph: tuple[Tensor, Tensor, Tensor] | None


class TreeEngine:
    """Runs batches on ``model``, a ``TreeGPTModel`` or Megatron's DistributedDataParallel around one.

    Args:
        temperature: the logits are divided by it, in training as in sampling.
        logprob_chunk_tokens: rows of logits alive at once; None for ``LOGIT_ELEMENTS`` over the vocabulary.
    """

    def __init__(
        self, model: torch.nn.Module, temperature: float = 1.0, logprob_chunk_tokens: int | None = None
    ) -> None:
        self.model = model
        self.tree_model: TreeGPTModel = model if isinstance(model, TreeGPTModel) else model.module
        self.temperature = temperature
        self.mesh = current_mesh()
        parameter = next(self.tree_model.parameters())
        self.dtype, self.device = parameter.dtype, parameter.device
        most = LOGIT_ELEMENTS[self.device.type] // self.tree_model.true_vocab_size
        self.logprob_chunk_tokens = logprob_chunk_tokens or max(1, most)

    def forward_backward(
        self, batch: TreeBatch, objective: Objective, forbid_synchronization: bool = False
    ) -> StepResult:
        """Add the gradient of the batch's loss to the parameters' gradients.

        With several data-parallel ranks every rank calls this with its own part of the step, which may be empty.

        Args:
            forbid_synchronization: on a GPU, raise where an op would wait for the device (a check of this engine).
        """
        run = _Run(self, batch, objective)
        with _synchronization_is_an_error() if forbid_synchronization else nullcontext():
            self._train(run, batch)
            if not batch.plan.training_ops and self._syncs_in_backward():
                self._train_nothing()
        result = _result(run, batch, self.mesh)
        return result if run.experts is None else run.experts.complete(result, self.mesh)

    def _train(self, run: _Run, batch: TreeBatch) -> None:
        num_backwards = sum(op.kind is OpKind.BACKWARD for op in batch.plan.training_ops)
        for op in batch.plan.training_ops:
            if op.kind is OpKind.FORWARD:
                run.forward(op.segment, keep=bool(batch.plan.keep_activations[op.segment]))
                run.loss.complete(op.segment)
            else:
                num_backwards -= 1
                # Gradients of replicas are reduced once, with the step's last backward.
                is_last = num_backwards == 0
                with nullcontext() if is_last else self._no_sync():
                    run.backward(op.segment, is_last)

    def _syncs_in_backward(self) -> bool:
        """Whether replicas' gradients are reduced within the last backward, and not only after it."""
        return hasattr(self.model, "ddp_config") and self.model.ddp_config.overlap_grad_reduce

    def _train_nothing(self) -> None:
        """A backward with gradients of zero: a rank without sequences joins the reduction, in the same order."""
        sample = TrainingSample(np.zeros(2, np.int32), np.array([False, True]))
        batch = prepare_batch([sample], TreeConfig())
        run = _Run(
            self, batch, lambda logprobs, entropy, fields: TokenLosses(torch.zeros_like(logprobs) * logprobs, {})
        )
        self._train(run, batch)

    @torch.no_grad()
    def compute_logprobs(self, batch: TreeBatch) -> list[np.ndarray]:
        """Logprobs of the trained tokens under the current weights, one array [T] per sequence, 0 elsewhere."""
        run = _Run(self, batch, objective=None)
        for op in batch.plan.forward_ops:
            run.forward(op.segment, keep=False)
        return batch.per_sequence(run.loss.pair_logprobs().cpu().numpy())

    def _no_sync(self) -> object:
        return self.model.no_sync() if hasattr(self.model, "no_sync") else nullcontext()


class _Run:
    """State of one walk over the ops."""

    def __init__(self, engine: TreeEngine, batch: TreeBatch, objective: Objective | None) -> None:
        self.engine, self.training = engine, objective is not None
        step, config = batch.plan, engine.tree_model.config
        self.plan = DevicePlan(step, engine.device, not self.training, engine.logprob_chunk_tokens)
        self.loss = LossPass(batch, self.plan, objective, accumulation_dtype(engine.dtype), engine.device)
        self.pool = KVPool(
            num_layers=config.num_layers,
            num_slots=step.num_slots if self.training else step.forward_num_slots,
            num_kv_heads=config.num_query_groups // config.tensor_model_parallel_size,
            head_size=config.kv_channels,
            dtype=engine.dtype,
            device=engine.device,
            with_gradients=self.training,
        )
        has_experts = config.num_moe_experts is not None
        self.experts = ExpertPass(engine.tree_model, batch, self.plan, self.training) if has_experts else None
        self.in_flight: dict[int, _InFlight] = {}
        self.tokens = self.peak_tokens = self.recomputed_tokens = 0

    def forward(self, segment: int, keep: bool) -> None:
        """F: run the segment; ``keep`` holds its graph for the backward."""
        context = self._context(segment)
        self.pool.open(context.slots)
        with torch.set_grad_enabled(keep):
            graph = self._run_model(segment, context)
        self.loss.store(segment, *graph[1:])
        if self.experts is not None:
            self.experts.after_forward(segment, context.routing)
        if self.training:
            self.in_flight[segment] = _InFlight(context, graph if keep else None)
            self.tokens += self.plan.start[segment + 1] - self.plan.start[segment]
            self.peak_tokens = max(self.peak_tokens, self.tokens)

    def backward(self, segment: int, is_last: bool) -> None:
        """B: the segment's share of the gradient; its activations, K and V are free afterwards.

        The step's last backward reaches every parameter, the output weight too: it may be what starts its reduction.
        """
        live = self.in_flight.pop(segment)
        length = self.plan.start[segment + 1] - self.plan.start[segment]
        graph = live.graph
        if graph is None:
            self.recomputed_tokens += length
            with torch.enable_grad():
                graph = self._run_model(segment, live.context)
        hidden, logprobs, entropy = graph
        # Without edges of its own a segment still passes on what its descendants left at its K and V.
        outputs, gradients = [hidden], [torch.zeros_like(hidden)]
        if logprobs.shape[0] or is_last:
            grad_logprobs, grad_entropy = self.loss.gradients(segment)
            outputs.append(logprobs)
            gradients.append(grad_logprobs)
            if grad_entropy is not None:
                outputs.append(entropy)
                gradients.append(grad_entropy)
        torch.autograd.backward(outputs, gradients)
        self.tokens -= length

    def _run_model(self, segment: int, context: SegmentContext) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states [n, hidden size], logprobs of the segment's edges, entropies of its rows."""
        tokens = self.plan.token_ids[self.plan.start[segment] : self.plan.start[segment + 1]]
        hidden = self.engine.model(tokens.unsqueeze(0), context)
        edges = self.plan.edges_of(segment)
        logprobs, entropy = self.engine.tree_model.edge_logprobs(
            hidden.index_select(0, edges.rows), edges.edge_row, edges.target, edges.chunks, self.engine.temperature
        )
        return hidden, logprobs, entropy

    def _context(self, segment: int) -> SegmentContext:
        plan = self.plan
        own = slice(plan.start[segment], plan.start[segment + 1])
        path = plan.path_of(segment)
        slot = plan.slot_start[segment]
        return SegmentContext(
            position_ids=plan.positions[own],
            routing=None if self.experts is None else self.experts.routing(segment),
            pool=self.pool,
            slots=slice(slot, slot + own.stop - own.start),
            ancestor_slots=plan.token_slot[path],
            query_index=plan.stream[own],
            key_index=torch.cat([path, plan.stream[own]]),
            key_end=torch.cat([plan.subtree_end[path], plan.subtree_end[own]]),
        )


def _result(run: _Run, batch: TreeBatch, mesh: Mesh) -> StepResult:
    """The step's result, the same on every rank: what the ranks found is added up in their order.

    A rank without sequences knows no metrics by name, so what is exchanged are small objects on the host.
    """
    plan, loss = batch.plan, run.loss.loss
    counts = (
        plan.num_pairs,
        plan.num_sequence_tokens,
        plan.segments.tree.num_tokens,
        plan.segments.num_segments,
        run.recomputed_tokens,
    )
    peak, metric_sums = run.peak_tokens, run.loss.metric_sums
    if mesh.data_size > 1:
        own = (float(loss), {name: float(total) for name, total in metric_sums.items()}, counts, peak)
        losses, sums, all_counts, peaks = zip(*mesh.gather_over_data(own), strict=True)
        names = next((list(of_rank) for of_rank in sums if of_rank), [])
        loss = loss.new_tensor(sum(losses))
        metric_sums = {name: loss.new_tensor(sum(of_rank.get(name, 0.0) for of_rank in sums)) for name in names}
        counts, peak = tuple(map(sum, zip(*all_counts, strict=True))), max(peaks)
    num_pairs, sequence_tokens, computed_tokens, segments, recomputed_tokens = counts
    means = {name: total / max(1, num_pairs) for name, total in metric_sums.items()}
    return StepResult(loss, means, sequence_tokens, computed_tokens, segments, peak, recomputed_tokens)


@contextmanager
def _synchronization_is_an_error() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
