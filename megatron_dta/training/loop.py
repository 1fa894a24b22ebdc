"""The training loop: one collection of rollouts after another, each divided into optimizer steps.

    1. collect   rollouts from the source, with the current weights              (rollouts.source)
    2. prepare   cut into steps; old, reference logprobs, values; advantages     (training.preparation)
    3. plan      prefix forest, segments, op list, once for all passes of a step (engine.prepare_batch)
    4. train     forward in preorder, losses, backward in postorder              (engine.TreeEngine)
    5. update    reduce, check, clip, apply                                      (training.optimizer)
                 a critic trains on the same plan                                (training.critic)
    6. report    metrics and a line on the console; evaluation and checkpoint when due

Between any two steps the whole state is: weights, optimizer, schedule, random states, the number of steps and
collections, and the steps prepared but not trained yet. A checkpoint holds exactly that.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from megatron_dta.common.errors import InputError
from megatron_dta.config import TrainConfig
from megatron_dta.engine import TreeBatch, TreeEngine
from megatron_dta.model import Model
from megatron_dta.objectives import Objective
from megatron_dta.rollouts.collection_order import Evaluation, RolloutError, RolloutSource
from megatron_dta.rollouts.paths import decoded_tokens
from megatron_dta.training.checkpoint.best import BestCheckpoint, better_checkpoint
from megatron_dta.training.checkpoint.save_load import CheckpointSaver
from megatron_dta.training.critic import Critic
from megatron_dta.training.data.prepare import SamplePreparation
from megatron_dta.training.data.saved_rollouts import RolloutFiles
from megatron_dta.training.data.step import StepSamples, pack_steps, unpack_steps
from megatron_dta.training.monitor.console import RunConsole
from megatron_dta.training.monitor.guard import Guard, GuardState
from megatron_dta.training.monitor.metrics import TIMING, MetricsLog
from megatron_dta.training.monitor.rollout_samples import RolloutSamples
from megatron_dta.training.monitor.step_metrics import Stopwatch, step_sizes, step_timing
from megatron_dta.training.monitor.stop_signals import StopSignals
from megatron_dta.training.monitor.timelines import write_step_timeline
from megatron_dta.training.monitor.watchdog import Watchdog
from megatron_dta.training.optimizer import TrainingOptimizer
from megatron_dta.training.weights.huggingface import save_hf

# Collections in a row without anything to train (of rejection sampling, or pairs) after which a run gives up.
EMPTY_COLLECTIONS = 20


@dataclass
class Progress:
    """Where the loop stands: optimizer steps done, collections taken, steps prepared but not trained, and what is
    remembered of the steps before: what the guard has seen, and the best checkpoint.
    """

    iteration: int = 0
    collections: int = 0
    waiting: list[StepSamples] = field(default_factory=list)
    guard: GuardState = field(default_factory=GuardState)
    best: BestCheckpoint | None = None

    def state_dict(self) -> dict[str, Any]:
        """All but the iteration, which a checkpoint has anyway, as numbers, strings, lists and tensors."""
        best = {} if self.best is None else {"best": self.best.state_dict()}
        state = {"collections": self.collections, "waiting": pack_steps(self.waiting)}
        return state | {"guard": self.guard.state_dict()} | best

    @classmethod
    def from_state_dict(cls, iteration: int, state: dict[str, Any]) -> Progress:
        """Where a checkpoint left off."""
        # Checkpoints of before have neither guard nor best.
        guard = GuardState.from_state_dict(state.get("guard", {}))
        best = BestCheckpoint(**state["best"]) if "best" in state else None
        return cls(iteration, state["collections"], unpack_steps(state["waiting"]), guard, best)


@dataclass
class Trainer:
    """The parts of a run, put together by ``training.setup``, and the loop over them."""

    config: TrainConfig
    model: Model
    engine: TreeEngine
    optimizer: TrainingOptimizer
    objective: Objective
    source: RolloutSource
    preparation: SamplePreparation
    evaluations: list[Evaluation]
    metrics: MetricsLog
    progress: Progress
    console: Console
    critic: Critic | None = None
    rollout_files: RolloutFiles | None = None
    rollout_samples: RolloutSamples | None = None
    resumed: bool = False
    saved_iteration: int | None = None
    signals: StopSignals = field(default_factory=StopSignals)
    stopped_by: str | None = None
    lock: AbstractContextManager[Any] = field(default_factory=nullcontext)

    def __post_init__(self) -> None:
        self.output = RunConsole(self.console, self.config, self.metrics.path)
        self.checkpoints = CheckpointSaver(self.config, self.model, self.optimizer, self.output.print, self.critic)
        if self.saved_iteration is None:
            # The best checkpoint so far is not in this run's folder.
            self.progress.best = None
        self.checkpoints.set_best(self.progress.best)
        self.guard = Guard(self.config, self.progress.guard, self.output.warn)
        self.watchdog = Watchdog(self.engine.mesh, self.config.parallel.timeout.total_seconds())

    def run(self) -> None:
        """Train to the last step, or until a signal (``stop_signals``); either way the state is saved."""
        with self.lock, self.signals.watching(), self.watchdog, closing(self.source):
            with self._saving_if_rollouts_end():
                self._run_steps()
            self._save()
            self.checkpoints.finish()
            self._save_hf()
        self.output.finish(self.progress.iteration, self.stopped_by)

    def _run_steps(self) -> None:
        if not self.resumed:
            self._report_start()
        while self.progress.iteration < self.config.optimization.train_iters and not self._stops():
            self._report(self._step())
            if self.guard.must_stop:
                self.checkpoints.finish()
                raise InputError(f"after step {self.progress.iteration}: {self.guard.must_stop}")
            self.checkpoints.poll()
            interval, best = self.config.checkpoint.save_interval, self.progress.best
            is_best = best is not None and best.iteration == self.progress.iteration
            if is_best or (interval and self.progress.iteration % interval == 0):
                self._save()

    @contextmanager
    def _saving_if_rollouts_end(self) -> Iterator[None]:
        """Where there are no more rollouts a step has not begun, or it is done: what there is can be kept."""
        try:
            yield
        except RolloutError as error:
            iteration, kept = self.progress.iteration, ""
            if self.config.checkpoint.save is not None and iteration:
                self._save(wait=False)
                self.checkpoints.finish()
                kept = "; what was trained is saved, and the same command continues"
            raise InputError(f"after step {iteration}: {error}{kept}") from error

    def _step(self) -> dict[str, Any]:
        """One optimizer step; returns its record of metrics."""
        watch = self._stopwatch(self.progress.iteration + 1)
        step, sampled = self._next_step(watch)
        with watch.measure("plan"):
            batch = step.batch(self.config.tree, self.config.objective, self.engine)
        # Mostly made while the step was prepared: its time belongs to training whoever asked for it first.
        watch.seconds["plan"] = step.plan_seconds
        trained: dict[str, Any] = {}
        watch.seconds |= {"train": 0.0, "update": 0.0}
        if self.progress.iteration >= self.config.critic.num_critic_only_steps:
            trained = self._train_policy(batch, watch)
        self.progress.iteration += 1
        if self.critic is not None:
            with watch.measure("critic"):
                trained |= self.critic.train(batch)
        sizes = step_sizes(self.engine, batch)
        return {
            "iteration": self.progress.iteration,
            **step.statistics,
            "collection_step": step.age,
            **trained,
            **self._judge(trained, step),
            **sizes,
            TIMING: step_timing(watch, sizes, sampled, self.engine.mesh) | self.source.timing(),
        }

    def _next_step(self, watch: Stopwatch) -> tuple[StepSamples, int]:
        """The next step of the present collection, or of the next one that has something to train, and the tokens
        that were sampled for it now.
        """
        sampled = 0
        for _ in range(EMPTY_COLLECTIONS):
            if self.progress.waiting:
                break
            with watch.measure("collect"):
                rollouts = self._collect()
            sampled += 0 if self.config.data.rollouts else decoded_tokens(rollouts)
            if self.rollout_samples is not None:
                self.rollout_samples.show(self.progress.iteration + 1, rollouts)
            with watch.measure("prepare"):
                self.progress.waiting = self.preparation.prepare(rollouts)
                watch.seconds["logprobs"] = watch.seconds.get("logprobs", 0.0) + self.preparation.pass_seconds
                if self.rollout_files is not None:
                    self.rollout_files.write(self.progress.iteration + 1, self.progress.waiting)
                for step in self.progress.waiting:
                    step.rollouts = None  # no longer needed
            # Of the collection, so part of what a checkpoint keeps of its steps.
            found = self.source.statistics()
            for step in self.progress.waiting:
                step.add_statistics(found)
            self.progress.collections += 1
        if self.progress.waiting:
            return self.progress.waiting.pop(0), sampled
        why = "no group has rewards that differ, so there are no pairs; look at the rewards"
        if self.config.objective.objective != "dpo":
            why = "no reward reaches --rejection-reward-threshold; lower that, or look at the rewards"
        raise InputError(
            f"step {self.progress.iteration + 1}: {EMPTY_COLLECTIONS} collections of rollouts in a row had nothing to "
            f"train: {why}"
        )

    def _train_policy(self, batch: TreeBatch, watch: Stopwatch) -> dict[str, Any]:
        """Backward and update of the policy; its metrics."""
        number = self.progress.iteration + 1
        with watch.measure("train"):
            self.optimizer.zero_grad()
            result = self.engine.forward_backward(batch, self.objective, record_timeline=self._is_timed(number))
            loss = float(result.loss)
        with watch.measure("update"):
            outcome = self.optimizer.step(loss, self.guard.skip_above)
        if result.timeline and self.engine.mesh.rank == 0:
            planned = result.plan.training.planned_events()
            write_step_timeline(self.config.logging.timeline_dir, number, result.timeline, planned)
        return {
            "loss": loss,
            "grad_norm": outcome.grad_norm,
            "learning_rate": outcome.learning_rate,
            "skipped": not outcome.applied,
            **{name: float(value) for name, value in result.metrics.items()},
            "peak_in_flight_tokens": result.peak_in_flight_tokens,
            "recomputed_tokens": result.recomputed_tokens,
        }

    def _judge(self, trained: dict[str, Any], step: StepSamples) -> dict[str, Any]:
        """What the guard says of the step."""
        record: dict[str, Any] = {}
        if "grad_norm" in trained:
            record |= self.guard.check_norm(self.progress.iteration, trained["grad_norm"])
        if "sampler_logprob_gap" in trained:
            fresh = step.age == 0
            record |= self.guard.check_sampler(self.progress.iteration, trained["sampler_logprob_gap"], fresh)
        return record

    def _is_timed(self, iteration: int) -> bool:
        """The second step is the first that is not slower for what is only prepared once."""
        logging = self.config.logging
        return logging.timeline_dir is not None and (iteration == 2 or iteration % logging.timeline_interval == 0)

    def _stopwatch(self, iteration: int) -> Stopwatch:
        return Stopwatch(lambda name: self.watchdog.enter(f"'{name}' of step {iteration}"))

    def _stops(self) -> bool:
        """Whether any process got a signal: it may reach them between different steps."""
        names = self.engine.mesh.gather_from_all(self.signals.name)
        self.stopped_by = next((name for name in names if name is not None), None)
        return self.stopped_by is not None

    def _collect(self) -> list:
        try:
            return self.source.next_batch(self.progress.collections)
        except FloatingPointError as error:
            raise InputError(f"step {self.progress.iteration + 1}: {error}; lower --lr or --clip-grad") from error

    def _report_start(self) -> None:
        """Judge the weights that training starts from, as record 0."""
        if self.config.logging.eval_interval:
            self._report({"iteration": 0, TIMING: {}})

    def _report(self, record: dict[str, Any]) -> None:
        """Evaluate when due, write the record, print the progress line."""
        iteration, logging = record["iteration"], self.config.logging
        last = iteration == self.config.optimization.train_iters
        if logging.eval_interval and (iteration % logging.eval_interval == 0 or last):
            watch = self._stopwatch(iteration)
            with watch.measure("evaluate"):
                for evaluation in self.evaluations:
                    values = evaluation.evaluate(iteration)
                    record |= {f"eval_{name}": value for name, value in values.items()}
            record[TIMING]["evaluate_seconds"] = watch.seconds["evaluate"]
            self.progress.best = better_checkpoint(self.config.checkpoint, self.progress.best, record)
        self.metrics.write(record)
        self.output.report(record)

    def _save(self, wait: bool = True) -> None:
        """Save the state; ``wait`` for what is being sampled ahead of training."""
        folder, iteration = self.config.checkpoint.save, self.progress.iteration
        if folder is None or self.saved_iteration == iteration:
            return
        self.watchdog.enter(f"saving step {iteration}")
        source = self.source.state_dict(wait and self.stopped_by is None)
        state = self.progress.state_dict() | ({"source": source} if source else {})
        self.checkpoints.save(iteration, state, self.progress.best)
        self.saved_iteration = iteration

    def _save_hf(self) -> None:
        if self.config.checkpoint.save_hf is None or self.stopped_by is not None:
            return
        self.watchdog.enter("saving in Hugging Face's form")
        path = save_hf(self.config, self.model, self.progress.iteration)
        self.output.print(f"saved {path}")
