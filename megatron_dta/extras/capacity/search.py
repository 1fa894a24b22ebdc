"""Predicts memory and time of each mesh on a cluster and searches for the fastest one that fits.

Every mesh is first estimated from counts alone, with the ideal utilisation of N segments on P stages. The best ones are
then planned as in training: the segments of the slowest replica are simulated on the pipeline, and memory and time are
those of that plan.

If the activations of all in-flight tokens do not fit, those of as many tokens as possible are kept
(``--tree-activation-tokens``). The alternative, Megatron's recomputation of whole layers, needs even less memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from megatron_dta.core.planning.costs.element_bytes import DTYPE_BYTES
from megatron_dta.core.planning.costs.memory_budget import GIB, MemoryBudget, StageBytes, peak_bytes
from megatron_dta.core.planning.costs.model import CostModel
from megatron_dta.core.planning.costs.segment_bytes import SegmentBytes
from megatron_dta.core.planning.costs.state_bytes import StateBytes
from megatron_dta.core.planning.pipeline.costs import PipelineCosts
from megatron_dta.core.planning.pipeline.planner import DEFAULT_FACTOR, plan_pipeline
from megatron_dta.core.planning.pipeline.schedule import PipelineOp, PipelineSchedule, next_op_is_backward
from megatron_dta.core.planning.pipeline.segments import ideal_utilisation
from megatron_dta.core.planning.pipeline.simulation import simulate
from megatron_dta.core.planning.segments.plan import SegmentTree, depth_first_schedule
from megatron_dta.core.planning.segments.recompute import choose_kept_segments, kept_on_stages
from megatron_dta.core.planning.segments.runs import ForkCounts, SegmentRuns
from megatron_dta.core.planning.step.passes import PassPlan, PipelineShape, StepBudget, stage_chunks
from megatron_dta.core.shapes.decoder import DecoderShape
from megatron_dta.core.shapes.run_mesh import RunMesh
from megatron_dta.extras.capacity.cluster import Cluster
from megatron_dta.extras.capacity.memory import InFlight, RankMemory, StateSettings, counted_bytes, stage_memory
from megatron_dta.extras.capacity.meshes import Choice
from megatron_dta.extras.capacity.step_time import (
    StepTime,
    mesh_costs,
    optimizer_seconds,
    reduction_seconds,
    send_seconds,
    stage_time,
)
from megatron_dta.extras.capacity.work import ReplicaWork, StepWork

# Limit on the in-flight tokens of a pipeline stage, over those of a single stage.
PIPELINE_FACTOR = DEFAULT_FACTOR
# Share of a GPU's memory that is planned for; fragmentation and uncounted memory take the rest.
USABLE = 0.94
# Number of estimates per requested mesh that may turn out not to fit when planned, before the search ends.
TRIED = 3
# Attempts with fewer kept activations if a plan needs more memory than estimated.
CORRECTIONS = 3
GRANULE = 256  # Numbers of kept tokens are multiples of this.


@dataclass(frozen=True)
class Prediction:
    """Predicted memory and time of a choice.

    Attributes:
        memory: memory of the stage that needs most, ``stage``.
        time: time of the slowest replica's busiest stage.
        utilisation: utilisation of the pipeline; 1 for one stage.
        imbalance: cost of the slowest replica over the mean.
        work: work of the slowest replica.
        recomputed: share of tokens whose forward runs twice.
    """

    choice: Choice
    memory: RankMemory
    stage: int
    time: StepTime
    utilisation: float
    imbalance: float
    work: ReplicaWork
    recomputed: float

    def misses(self, memory_gib: float) -> float:
        """GiB needed beyond the usable share of ``memory_gib``; negative if the choice fits."""
        return self.memory.total / GIB - USABLE * memory_gib


@dataclass
class Planner:
    """Predicts and searches the choices for a model, a cluster and a step.

    Attributes:
        shape, cluster, step: the model, the machines and the sequences of a step.
        states: data types and placement of states; recomputation is set by each choice.
    """

    shape: DecoderShape
    cluster: Cluster
    step: StepWork
    states: StateSettings = field(default_factory=StateSettings)

    def estimate(self, choice: Choice) -> Prediction:
        """Predict from counts, without planning segments."""
        mesh = choice.mesh
        work = self.step.estimate(*self._cut(choice))
        factor = PIPELINE_FACTOR if mesh.pipeline > 1 else 1.0
        tokens = min(float(work.tokens), factor * work.in_flight_tokens)
        recomputed = 0.0
        if choice.full_recompute:
            recomputed = 1.0
        elif choice.activation_tokens is not None and tokens:
            recomputed = max(0.0, 1 - choice.activation_tokens / tokens)
        utilisation = ideal_utilisation(work.segments * mesh.chunks, mesh.pipeline)
        times = {s: stage_time(self.shape, mesh, self.cluster, work, s, recomputed) for s in _telling_stages(mesh)}
        busiest = max(times, key=lambda s: times[s].computing)
        bubble = times[busiest].computing * (1 / utilisation - 1)
        kept = None if choice.full_recompute else choice.activation_tokens
        flight = InFlight(tokens, work.segment_tokens, work.in_flight_tokens, kept)
        flights = dict.fromkeys(_telling_stages(mesh), flight)
        return self._prediction(choice, work, flights, busiest, bubble, utilisation, recomputed)

    def simulate(self, choice: Choice) -> Prediction:
        """Predict from the segments and the schedule that training would plan."""
        mesh = choice.mesh
        work = self.step.plan(*self._cut(choice), mesh.synchronized_replicas)
        segments, counts = work.planned
        parents, busiest, wait, utilisation = segments.segment_parent, 0, 1.0, 1.0
        # With full recomputation each layer is recomputed, so the segments keep nothing.
        by_tokens = np.zeros(segments.num_segments, dtype=bool)
        if not choice.full_recompute:
            by_tokens = choose_kept_segments(segments, choice.activation_tokens, mesh.pipeline)
        kept = np.broadcast_to(by_tokens, (len(mesh.layers), segments.num_segments))
        if mesh.pipeline == 1:
            ops = [PipelineOp(kind, segment) for kind, segment in depth_first_schedule(segments)]
            schedule = PipelineSchedule(1, 1, [ops])
        else:
            model = mesh_costs(self.shape, mesh, self.cluster, work.segment_tokens)
            send = send_seconds(self.shape, mesh, self.cluster, work.segment_tokens)
            # Training plans the schedule with its own cost model; the costs of this cluster give the time.
            known = CostModel.from_shape(self.shape, choice.segment_tokens)
            if not choice.full_recompute:
                kept = kept_on_stages(by_tokens, parents, len(mesh.layers))
            known_costs = PipelineCosts.of_segments(known, *counts, mesh.layers, ~kept)
            schedule = plan_pipeline(parents, segments.lengths, known_costs, mesh.pipeline, mesh.chunks)
            if not choice.full_recompute:
                kept = by_tokens | next_op_is_backward(schedule, segments.num_segments)
            costs = PipelineCosts.of_segments(model, *counts, mesh.layers, ~kept)
            timeline = simulate(schedule, parents, costs, send)
            busiest, utilisation = int(np.argmax(timeline.busy)), timeline.utilisation
            wait = timeline.makespan / timeline.busy[busiest] if timeline.busy[busiest] else 1.0
        of_busiest = kept[busiest :: mesh.pipeline].mean(axis=0)
        recomputed = float(((1 - of_busiest) * segments.lengths).sum() / max(1, segments.lengths.sum()))
        computing = stage_time(self.shape, mesh, self.cluster, work, busiest, recomputed).computing
        kept = np.broadcast_to(kept | choice.full_recompute, (len(mesh.layers), segments.num_segments))
        memory = MemoryBudget(0.0, (), tuple(self._stage_bytes(choice, v) for v in range(len(mesh.layers))))
        shape = PipelineShape(mesh.pipeline, mesh.chunks, mesh.layers, memory=memory)
        forks, plan = _forks(work) if memory.has_states else None, PassPlan(schedule, [], kept=kept)
        flights = {stage: _in_flight(segments, plan, shape, stage, forks) for stage in range(mesh.pipeline)}
        bubble = computing * (wait - 1)
        return self._prediction(choice, work, flights, busiest, bubble, utilisation, recomputed)

    def _stage_bytes(self, choice: Choice, virtual_stage: int) -> StageBytes:
        mesh = choice.mesh
        first = sum(mesh.layers[:virtual_stage])
        layers = range(first, first + mesh.layers[virtual_stage])
        ranks = mesh.tensor * mesh.context
        states = StateBytes.of_shape(self.shape, DTYPE_BYTES[self.states.weights], ranks, layers)
        segment_bytes = self._bytes(choice, layers)
        # The last stage alone keeps bytes once for all layers.
        is_last = (len(mesh.layers) - 1 - virtual_stage) % mesh.pipeline == 0
        return StageBytes(segment_bytes if is_last else replace(segment_bytes, kept_per_token=0.0), states)

    def _cut(self, choice: Choice) -> tuple[int, StepBudget, PipelineShape]:
        """Arguments of ``StepWork.plan`` for a choice."""
        budget = StepBudget(choice.segment_tokens, choice.memory_tokens)
        costs = CostModel.from_shape(self.shape, choice.segment_tokens)
        return choice.mesh.data, budget, PipelineShape(choice.mesh.pipeline, cost_model=costs)

    def _state_bytes(self, choice: Choice) -> float:
        """Bytes of weights, gradients and optimizer on the rank with most of them."""
        nothing = InFlight(0.0, 0.0, 0.0)
        return max(
            stage_memory(self.shape, choice.mesh, self.states, stage, nothing, self._bytes_of(choice, stage)).total
            for stage in _telling_stages(choice.mesh)
        )

    def _states(self, choice: Choice) -> StateSettings:
        return replace(self.states, full_recompute=choice.full_recompute)

    def _bytes(self, choice: Choice, layers: Sequence[int] | None = None) -> SegmentBytes:
        """Bytes of a token in ``layers``, None for all."""
        return counted_bytes(self.shape, choice.mesh, self._states(choice), layers)

    def _bytes_of(self, choice: Choice, stage: int) -> SegmentBytes:
        return self._bytes(choice, tuple(choice.mesh.stage_layers(stage)))

    def _prediction(
        self,
        choice: Choice,
        work: ReplicaWork,
        flights: dict[int, InFlight],
        busiest: int,
        bubble: float,
        utilisation: float,
        recomputed: float,
    ) -> Prediction:
        mesh, states = choice.mesh, self._states(choice)
        of_stages = {
            stage: stage_memory(self.shape, mesh, states, stage, flight, self._bytes_of(choice, stage))
            for stage, flight in flights.items()
        }
        fullest = max(of_stages, key=lambda s: of_stages[s].total)
        alone = stage_time(self.shape, mesh, self.cluster, work.alone or work, busiest, recomputed)
        together = stage_time(self.shape, mesh, self.cluster, work, busiest, recomputed)
        time = replace(
            alone,
            bubble=bubble,
            # Another replica's segments may be shorter and more, which launches cost.
            experts=max(0.0, together.computing - alone.computing),
            data=reduction_seconds(self.shape, mesh, self.cluster, states, busiest),
            optimizer=optimizer_seconds(self.shape, mesh, self.cluster, states, busiest),
        )
        return Prediction(choice, of_stages[fullest], fullest, time, utilisation, work.imbalance, work, recomputed)

    def fitted(self, choice: Choice) -> Prediction:
        """Estimate ``choice`` with the activations of as many tokens kept as fit into memory."""
        memory = self.cluster.gpu_memory_gib
        prediction = self.estimate(choice)
        if prediction.misses(memory) <= 0 or choice.full_recompute or choice.activation_tokens is not None:
            return prediction
        least, most = 0, int(prediction.work.in_flight_tokens * PIPELINE_FACTOR) // GRANULE
        if self.estimate(replace(choice, activation_tokens=0)).misses(memory) > 0:
            return self.estimate(replace(choice, activation_tokens=0))
        while most - least > 1:
            middle = (least + most) // 2
            fits = self.estimate(replace(choice, activation_tokens=middle * GRANULE)).misses(memory) <= 0
            least, most = (middle, most) if fits else (least, middle)
        return self.estimate(replace(choice, activation_tokens=least * GRANULE))

    def _planned_to_fit(self, choice: Choice) -> Prediction:
        """Plan ``choice``; if it needs more memory than estimated, keep the activations of fewer tokens."""
        memory = self.cluster.gpu_memory_gib
        planned = self.simulate(choice)
        for _ in range(CORRECTIONS):
            missing = planned.misses(memory) * GIB
            kept = planned.choice.activation_tokens
            if missing <= 0 or choice.full_recompute or kept == 0:
                break
            stage = planned.stage
            of_token = self._bytes_of(choice, stage).kept(len(choice.mesh.stage_layers(stage)))
            if kept is None:
                kept = int(planned.work.in_flight_tokens * (PIPELINE_FACTOR if choice.mesh.pipeline > 1 else 1.0))
            kept = max(0, int(kept - missing / of_token) // GRANULE * GRANULE)
            planned = self.simulate(replace(choice, activation_tokens=kept))
        return planned

    def search(self, choices: Iterable[Choice], top: int = 5) -> tuple[list[Prediction], list[Prediction]]:
        """Return the best choices, planned and simulated, fastest first, and those that do not fit, nearest first."""
        fits: list[Prediction] = []
        misses: list[Prediction] = []
        hopeless: list[tuple[float, Choice]] = []
        memory = self.cluster.gpu_memory_gib
        for choice in choices:
            # If the states alone do not fit, skip the estimate of the step.
            missing = self._state_bytes(choice) / GIB - USABLE * memory
            if missing > 0:
                hopeless.append((missing, choice))
                continue
            prediction = self.fitted(choice)
            (fits if prediction.misses(memory) <= 0 else misses).append(prediction)
        if not fits and not misses:
            misses = [self.fitted(choice) for _, choice in sorted(hopeless, key=lambda entry: entry[0])[:top]]
        best: list[Prediction] = []
        already = len(misses)
        seen: set[tuple[int, ...]] = set()
        for estimate in sorted(fits, key=_rank):
            mesh = estimate.choice.mesh
            sizes = mesh.tensor, mesh.context, mesh.pipeline, mesh.experts, mesh.expert_tensor
            if len(best) == top or len(misses) > TRIED * top + already:
                break
            if sizes in seen:
                continue  # Each mesh is represented by its best estimate.
            planned = self._planned_to_fit(estimate.choice)
            if planned.misses(memory) > 0:
                misses.append(planned)
                continue
            best.append(planned)
            seen.add(sizes)
        return sorted(best, key=_rank), sorted(misses, key=lambda p: p.misses(memory))


def _telling_stages(mesh: RunMesh) -> list[int]:
    """The first stage, the last, and one with most layers: no other stage needs more memory or time."""
    most = max(range(mesh.pipeline), key=lambda s: sum(mesh.layers[s :: mesh.pipeline]))
    return sorted({0, mesh.pipeline - 1, most})


def _rank(prediction: Prediction) -> tuple[float, float]:
    return prediction.time.total, prediction.memory.total


def _forks(work: ReplicaWork) -> list[ForkCounts]:
    """Numbers of states of each replica that runs the planned segments."""
    segments = work.planned[0]
    if not work.merged:
        return [SegmentRuns.of(segments).counts]
    plans = zip(work.merged, segments.segment_of, strict=True)
    return [SegmentRuns.of(plan).counts.at(nodes) for plan, nodes in plans]


def _in_flight(
    segments: SegmentTree, plan: PassPlan, shape: PipelineShape, stage: int, forks: Sequence[ForkCounts] | None
) -> InFlight:
    """Peak of a stage under a plan, with the bytes of ``shape``."""
    chunks = stage_chunks(segments, plan, shape, stage, forks)
    lengths, paths = segments.lengths.tolist(), segments.in_flight_tokens.tolist()
    peak = peak_bytes(plan.schedule.ops[stage], lengths, paths, chunks)
    slots = sum(chunk.num_slots * chunk.layers for chunk in chunks)
    layers = sum(chunk.layers for chunk in chunks)
    return InFlight(slots / max(1, layers), max(lengths, default=0), segments.peak_in_flight_tokens, peak_bytes=peak)
