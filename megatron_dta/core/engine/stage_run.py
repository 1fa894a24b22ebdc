"""Executes the ops of a pass on one rank: its stage's share of every segment's forward and backward.

    F(segment)  Input: hidden states of the previous stage (first stage: token ids). Output: hidden states for the next
                stage (last stage: logprobs and entropies of the segment's edges). K and V stay in the stage's pool for
                the descendants.
    B(segment)  Input: the gradient of the next stage (last stage: that of the loss at the segment's edges), and the
                gradients that the descendants left at K and V. Output: weight gradients, dK and dV of the ancestors,
                and the gradient for the previous stage. Then the segment's activations and slots are free.

A single process is a pipeline of one stage. A rank may hold several model chunks (virtual stages). Each model chunk has
its own K and V, and an op names its model chunk.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron_dta.core.engine.batch import TreeBatch
from megatron_dta.core.engine.device_plan import DevicePlan
from megatron_dta.core.engine.loss_pass import LossPass, Objective
from megatron_dta.core.engine.rank_model import RankModel
from megatron_dta.core.model.attention.kv_pool import KVPool, SlotRuns
from megatron_dta.core.model.attention.segment_attention import SegmentAttentionPlans
from megatron_dta.core.model.attention.segment_context import SegmentContext
from megatron_dta.core.model.kernel_types import accumulation_dtype
from megatron_dta.core.planning.pipeline.schedule import PipelineOp
from megatron_dta.core.planning.segments.plan import OpKind
from megatron_dta.core.planning.step.passes import stage_program, state_slots

if TYPE_CHECKING:
    from megatron_dta.core.engine.expert_pass import ExpertPass
    from megatron_dta.core.engine.op_clock import OpClock
    from megatron_dta.core.engine.stage_transport import StageTransport
    from megatron_dta.core.model.hybrid.segment_states import StepStates


# Where ranks share experts, a forward waits for the device in each layer, and the host is ahead after a backward only:
# there it makes the tables of this many ops.
_OPS_AHEAD = 8


@dataclass
class _InFlight:
    """A segment in one model chunk between its forward and its backward.

    Attributes:
        stage_input: received hidden states, a leaf; None on the first virtual stage.
        graph: outputs of the forward; None if it is recomputed. An output that was sent to the next stage is kept as a
            gradient edge only, so that its memory is free as soon as it is sent.
    """

    context: SegmentContext
    stage_input: Tensor | None
    graph: list[Tensor | GradientEdge] | None


class StageRun:
    """State of one pass over the ops; ``objective`` None is a pass for logprobs only."""

    clock: OpClock | None = None

    def __init__(self, model: RankModel, batch: TreeBatch, objective: Objective | None) -> None:
        self.model, self.batch, self.training = model, batch, objective is not None
        self.identity, self.made_ahead = object(), []
        step, mesh = batch.plan, model.mesh
        self.pass_plan = step.training if self.training else step.forward_only
        self.program = stage_program(step.segments, self.pass_plan, mesh.pipeline_rank)
        own_tokens = [model.own_tokens(length) for length in step.segments.lengths.tolist()]
        self.plan = DevicePlan(
            step, model.device, self.program, not self.training, model.logprob_chunk_tokens, own_tokens
        )
        dtype = accumulation_dtype(model.dtype)
        self._make_loss = partial(LossPass, batch, self.plan, objective, dtype, model.device, model.context_group)
        self.teachers = None
        if self.training and batch.teachers is not None:
            self.teachers = batch.teachers(self.plan, dtype, model.device, model.context_group)
        # Hidden states of all rows, on the host: the only result of a pass that keeps them.
        self.row_states: Tensor | None = None
        self.experts = self._expert_passes(batch)
        self.waits_in_forward = bool(self.experts) and self.program.most_tokens is not None
        self.layer_rows = [part.attention_rows for part in model.tree_models]
        self.attention_plans = None
        if model.uses_kernels:
            of_keys = model.attention_shape, model.device
            self.attention_plans = SegmentAttentionPlans(step.segments, step.paths, *of_keys)
        self.paths = step.paths
        self.lengths = step.segments.lengths.tolist()
        self.last_backward = {op.chunk: op.segment for op in self.program.ops if op.kind is OpKind.BACKWARD}
        self.in_flight: dict[tuple[int, int], _InFlight] = {}
        self.tokens = self.peak_tokens = self.recomputed_tokens = 0

    @cached_property
    def loss(self) -> LossPass:
        """Made when it is first needed, while the device runs the first forward."""
        return self._make_loss()

    @cached_property
    def transport(self) -> StageTransport | None:
        """Made when the pass begins: it posts receives, and other passes may run after ``prepare``."""
        if self.model.mesh.pipeline_size == 1:
            return None
        from megatron_dta.core.engine.stage_transport import StageTransport
        from megatron_dta.core.model.parallel.stage_channels import stage_channels

        model, mesh = self.model, self.model.mesh
        shape = partial(model.tree_models[0].stage_shape, context_size=mesh.context_size)
        messages = self.program.messages, self.lengths
        return StageTransport(shape, stage_channels(), mesh.pipeline_rank, *messages, model.dtype, model.device)

    def _expert_passes(self, batch: TreeBatch) -> list[ExpertPass]:
        """One ``ExpertPass`` for each model chunk of a model with experts."""
        if self.model.config.num_moe_experts is None:
            return []
        from megatron_dta.core.engine.expert_pass import ExpertPass

        replays = self.model.replays_routing
        return [ExpertPass(part, batch, self.plan, self.training, replays) for part in self.model.tree_models]

    def prepare(self) -> None:
        """Make the loss and the tables of the first ops, but allocate no pool."""
        self.made_ahead = [self.loss, *self._tables(0, _OPS_AHEAD if self.waits_in_forward else 2)]

    def _tables(self, begin: int, count: int) -> list[object]:
        """Attention tables of ``count`` ops from number ``begin`` on."""
        made = []
        for op in self.program.ops[begin : begin + count]:
            made.append(self.attention_plans and self.attention_plans.of_segment(op.segment))
            if op.kind is OpKind.BACKWARD and made[-1] is not None:
                made[-1].backward()
        return made

    @cached_property
    def pools(self) -> list[KVPool]:
        """K and V of each model chunk, allocated when the pass begins."""
        return [self._pool(chunk) for chunk in range(len(self.model.chunks))]

    def _pool(self, chunk: int) -> KVPool:
        num_layers, on_host = len(self.model.tree_models[chunk].attention_rows), self.model.kv_on_host
        create = KVPool if on_host is None else partial(on_host.pool, chunk)
        sizes = dict(num_layers=num_layers, num_slots=self.program.num_slots[chunk], slot=self.model.slot)
        return create(**sizes, dtype=self.model.dtype, device=self.model.device, with_gradients=self.training)

    @cached_property
    def states(self) -> list[StepStates]:
        """The states at forks of each model chunk; none for a model without a recurrence."""
        ranks = self.model.mesh.context_size
        layers = [
            {number: shape.divided(ranks) for number, shape in part.recurrent_layers.items()}
            for part in self.model.tree_models
        ]
        if not any(layers):
            return []
        from megatron_dta.core.model.hybrid.segment_states import StepStates
        from megatron_dta.core.model.hybrid.state_pool import StatePool

        step = self.batch.plan
        slots = state_slots(step.runs, self.pass_plan, self.model.mesh.pipeline_rank)
        states = []
        for of_chunk, (slot_start, num_slots) in zip(layers, slots, strict=True):
            pool = StatePool(of_chunk, num_slots, self.model.dtype, self.model.device, self.training)
            states.append(StepStates(step.runs, slot_start, pool, self.model.tree_models[0].has_fused_layers))
        return states

    def walk(self) -> None:
        """Run all ops; an overlapped reduction of gradients happens in the last backward of each model chunk."""
        transport = self.transport
        for number in range(len(self.program.ops)):
            self._run(number)
        for pool in self.pools:
            pool.close()
        if transport is not None:
            transport.finish()

    def _run(self, number: int) -> None:
        op, rows_per_rank = self.program.ops[number], None
        if self.program.most_tokens is not None:
            part, contexts = self.model.tree_models[op.chunk], self.model.mesh.context_size
            rows_per_rank = part.stage_shape(self.program.most_tokens[number], contexts)[0]
        try:
            if op.kind is OpKind.FORWARD:
                context = self._context(op)
                context.rows_per_rank = rows_per_rank
                self._forward(op, context, self._keeps(op))
            else:
                context = self.in_flight[op.segment, op.chunk].context
                context.rows_per_rank = rows_per_rank
                is_last = self.last_backward[op.chunk] == op.segment
                with self.model.gradient_sync(op.chunk, allowed=is_last):
                    self._backward(op, is_last)
                following = self.program.ops[number + 1 : number + 2]
                if self.waits_in_forward and any(op.kind is OpKind.FORWARD for op in following):
                    self.made_ahead = self._tables(number + 1, _OPS_AHEAD)
        except Exception as error:
            # In a job of many processes, the op that failed first locates the cause.
            error.add_note(f"in {self._describe(op)}")
            raise

    def _describe(self, op: PipelineOp) -> str:
        mesh = self.model.mesh
        part = f", model chunk {op.chunk}" if len(self.pools) > 1 else ""
        return f"{op.kind.value}({op.segment}) of pipeline stage {mesh.pipeline_rank}{part}, rank {mesh.rank}"

    def _timed(self, op: PipelineOp) -> AbstractContextManager:
        return nullcontext() if self.clock is None else self.clock.measure(op)

    def _receive(self, op: PipelineOp, stage: int) -> Tensor:
        with nullcontext() if self.clock is None else self.clock.waiting(op):
            return self.transport.receive(op.kind, op.segment, stage)

    def _virtual_stage(self, chunk: int) -> int:
        return chunk * self.model.mesh.pipeline_size + self.model.mesh.pipeline_rank

    def _keeps(self, op: PipelineOp) -> bool:
        """Whether the activations of a forward are kept for its backward."""
        return self.training and bool(self.pass_plan.kept[self._virtual_stage(op.chunk), op.segment])

    def _is_last(self, chunk: int) -> bool:
        return self._virtual_stage(chunk) == len(self.pools) * self.model.mesh.pipeline_size - 1

    def _forward(self, op: PipelineOp, context: SegmentContext, keep: bool) -> None:
        """F: run the segment; with ``keep``, its graph is kept for the backward."""
        segment, chunk = op.segment, op.chunk
        stage, stage_input = self._virtual_stage(chunk), None
        if stage > 0:
            stage_input = self._receive(op, stage).requires_grad_(self.training)
        with self._timed(op):
            self.pools[chunk].open(context.slots)
            self.pools[chunk].begin(context.slot_runs, descending=False)
            if self.states:
                self.states[chunk].open(segment)
            with torch.set_grad_enabled(keep):
                graph = self._run_model(op, context, stage_input)
            if self.experts:
                self.experts[chunk].after_forward(segment, context.routing)
            if self._is_last(chunk):
                if self.row_states is None:
                    self.loss.store(segment, *graph[1:3])
                if self.training:
                    self.loss.complete(segment)
                    if self.teachers is not None:
                        self.teachers.add(segment, graph[3:], self.loss)
        if not self._is_last(chunk):
            self.transport.send(OpKind.FORWARD, segment, stage, graph[0])
            if keep:
                graph = [get_gradient_edge(graph[0])]
        if self.training:
            self.in_flight[segment, chunk] = _InFlight(context, stage_input, graph if keep else None)
            self.tokens += self.lengths[segment]
            self.peak_tokens = max(self.peak_tokens, self.tokens)

    def _backward(self, op: PipelineOp, is_last: bool) -> None:
        """B: add the segment's share of the gradient and free its activations, K and V."""
        segment, chunk = op.segment, op.chunk
        stage, live = self._virtual_stage(chunk), self.in_flight.pop((op.segment, op.chunk))
        graph, arrived = live.graph, None
        if not self._is_last(chunk):
            arrived = self._receive(op, stage)
        pool = self.pools[chunk]
        with self._timed(op):
            if graph is None:
                pool.begin(live.context.slot_runs, descending=False)
                self.recomputed_tokens += self.lengths[segment]
                with torch.enable_grad():
                    graph = self._run_model(op, live.context, live.stage_input)
            pool.begin(live.context.slot_runs, descending=True)
            if arrived is None:
                outputs, gradients = self._at_the_loss(segment, graph, is_last)
            else:
                outputs, gradients = graph, [arrived]
            torch.autograd.backward(outputs, gradients)
        if stage > 0:
            self.transport.send(OpKind.BACKWARD, segment, stage, live.stage_input.grad)
        self.tokens -= self.lengths[segment]

    def _at_the_loss(self, segment: int, graph: list[Tensor], is_last: bool) -> tuple[list[Tensor], list[Tensor]]:
        """Outputs of the last stage's forward, and the gradient of the loss with respect to each output.

        The step's last backward reaches every parameter, including the output weight, because it may start the
        reduction of their gradients.
        """
        hidden, logprobs, entropy, *divergences = graph
        if not logprobs.shape[0] and not is_last:
            # A segment without edges of its own still passes on the gradients that its descendants left at its K and V.
            return [hidden], [torch.zeros_like(hidden)]
        grad_logprobs, grad_entropy = self.loss.gradients(segment)
        outputs, gradients = [logprobs], [grad_logprobs]
        if grad_entropy is not None:
            outputs.append(entropy)
            gradients.append(grad_entropy)
        if self.teachers is not None:
            outputs, gradients = [*outputs, *divergences], [*gradients, *self.teachers.gradients(segment)]
        return outputs, gradients

    def _run_model(self, op: PipelineOp, context: SegmentContext, stage_input: Tensor | None) -> list[Tensor]:
        """Hidden states of the model chunk; on the last stage also logprobs of the edges, entropies of the rows, and
        the divergences from teachers.
        """
        tokens = self.plan.token_ids[self.plan.start[op.segment] : self.plan.start[op.segment + 1]]
        part = self.model.tree_models[op.chunk]
        if stage_input is not None:
            part.set_input_tensor(stage_input)
        hidden = self.model.chunks[op.chunk](tokens.unsqueeze(0), context)
        if not self._is_last(op.chunk):
            return [hidden]
        edges = self.plan.edges_of(op.segment)
        rows = hidden.index_select(0, edges.rows)
        if self.row_states is not None:
            self._keep(op.segment, rows)
            return [hidden]
        temperature = self.model.temperature
        outputs = part.edge_logprobs(rows, edges.edge_row, edges.target, edges.logit_chunks, temperature)
        if self.teachers is None:
            return [hidden, *outputs]
        chunk_tokens = self.model.logprob_chunk_tokens
        return [hidden, *outputs, *self.teachers.divergences(part, op.segment, rows, chunk_tokens, temperature)]

    def _keep(self, segment: int, rows: Tensor) -> None:
        """Keep the hidden states of a segment's rows, given those of the rank's tokens."""
        begin, end = self.plan.segment_rows[segment : segment + 2]
        group = self.model.context_group
        if group is not None and begin < end:
            (rows,) = group.joined([rows], [self.plan.own_rows[segment].start - begin], [end - begin])
        self.row_states[begin:end] = rows

    def keep_row_states(self) -> None:
        """Make this pass, one without an objective, return the hidden states of its rows and no logprobs."""
        shape = self.plan.segment_rows[-1], self.model.config.hidden_size
        self.row_states = torch.empty(shape, dtype=self.model.dtype, pin_memory=self.model.device.type == "cuda")

    def _context(self, op: PipelineOp) -> SegmentContext:
        plan, segment, chunk = self.plan, op.segment, op.chunk
        tokens = slice(plan.start[segment], plan.start[segment + 1])
        path, queries, indices = plan.path_of(segment), plan.stream[tokens], {}
        if self.attention_plans is None:
            ends = torch.cat([plan.subtree_end[path], plan.subtree_end[tokens]])
            indices = dict(query_index=queries, key_index=torch.cat([path, queries]), key_end=ends)
        slot = plan.slot_start[chunk][segment]
        slots = slice(slot, slot + tokens.stop - tokens.start)
        runs = None
        if self.model.kv_on_host is not None:
            runs = SlotRuns.of(plan.host_slots[chunk][self.paths.stream_indices(segment)], slots)
        return SegmentContext(
            position_ids=plan.positions[tokens],
            step=self.identity,
            routing=self.experts[chunk].routing(segment) if self.experts else None,
            context_group=self.model.context_group,
            pool=self.pools[chunk],
            layer_rows=self.layer_rows[chunk],
            path_states=self.states[chunk].of_segment(segment) if self.states else None,
            slots=slots,
            slot_runs=runs,
            ancestor_slots=plan.token_slot[chunk][path],
            **indices,
            attention_plan=self.attention_plans.of_segment(segment) if self.attention_plans is not None else None,
            runs_hooks=self.model.syncs_in_backward and self.last_backward.get(chunk) == segment,
        )
