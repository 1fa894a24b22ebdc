"""The training loop: samples rollout batches and divides each into optimizer steps.

    1. collect   rollouts from the source, with the current weights              (rollouts.source)
    2. prepare   divide into steps; old and reference logprobs, values; advantages  (training.data.prepare)
    3. plan      prefix forest, segments, op list, once for all passes of a step (engine.prepare_batch)
    4. train     forward in preorder, losses, backward in postorder              (engine.TreeEngine)
    5. update    reduce, check, clip, apply                                      (training.optimizer)
                 a critic trains on the same plan                                (training.critic)
    6. report    write metrics, print a progress line; evaluate and save a checkpoint when due

Between two steps, the complete state of a run consists of the weights, the optimizer, the schedule, the random states,
the numbers of steps and rollout batches, and the steps that are prepared but not trained yet. A checkpoint holds
exactly this state.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron_dta.common.console import Console
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.engine import StepResult, TreeBatch, TreeEngine
from megatron_dta.core.model.parallel.staged_model import Model
from megatron_dta.core.objectives.fields import Objective
from megatron_dta.core.rollouts.paths import decoded_tokens
from megatron_dta.sampling.sources.batch_source import Evaluation, RolloutError, RolloutSource
from megatron_dta.training.autotune import Autotuner
from megatron_dta.training.checkpoint.best import BestCheckpoint, better_checkpoint
from megatron_dta.training.checkpoint.save_load import CheckpointSaver
from megatron_dta.training.config import TrainConfig
from megatron_dta.training.critic import Critic
from megatron_dta.training.data.prepare import SamplePreparation
from megatron_dta.training.data.saved_rollouts import RolloutFiles
from megatron_dta.training.data.step import StepSamples, pack_steps, unpack_steps
from megatron_dta.training.huggingface.save import save_hf
from megatron_dta.training.monitor.console import RunConsole
from megatron_dta.training.monitor.metrics import TIMING, MetricsLog
from megatron_dta.training.monitor.step_metrics import Stopwatch, step_sizes, step_timing
from megatron_dta.training.monitor.stop_signals import StopSignals
from megatron_dta.training.monitor.timeline_files import beside_plan, write_timelines
from megatron_dta.training.monitor.watchdog import Watchdog
from megatron_dta.training.optimizer.build import TrainingOptimizer
from megatron_dta.training.teachers import Teachers

# A run ends after this many consecutive rollout batches in which rejection sampling or pairing left nothing to train.
_MAX_EMPTY_BATCHES = 20

# Steps between timelines.
TIMELINE_INTERVAL = 100


@dataclass
class Progress:
    """The position of the loop and its memory of earlier steps.

    Attributes:
        iteration: number of completed optimizer steps.
        rollout_batches: number of rollout batches sampled or read.
        waiting: steps that are prepared but not trained yet.
        best: the best checkpoint so far, if the run selects one.
    """

    iteration: int = 0
    rollout_batches: int = 0
    waiting: list[StepSamples] = field(default_factory=list)
    best: BestCheckpoint | None = None

    def state_dict(self) -> dict[str, Any]:
        """Everything except the iteration, which a checkpoint stores separately, as plain values and tensors."""
        best = {} if self.best is None else {"best": asdict(self.best)}
        return {"rollout_batches": self.rollout_batches, "waiting": pack_steps(self.waiting)} | best

    @classmethod
    def from_state_dict(cls, iteration: int, state: dict[str, Any]) -> Progress:
        """Restore the progress from a checkpoint."""
        best = BestCheckpoint(**state["best"]) if "best" in state else None
        return cls(iteration, state["rollout_batches"], unpack_steps(state["waiting"]), best)


@dataclass
class Trainer:
    """The training loop and the components of a run, which ``wiring.setup`` assembles."""

    config: TrainConfig
    model: Model
    engine: TreeEngine
    optimizer: TrainingOptimizer
    objective: Objective
    source: RolloutSource
    tuner: Autotuner
    preparation: SamplePreparation
    evaluations: list[Evaluation]
    metrics: MetricsLog
    progress: Progress
    console: Console
    critic: Critic | None = None
    teachers: Teachers | None = None
    rollout_files: RolloutFiles | None = None
    resumed: bool = False
    end_id: int | None = None  # the token that ends trained responses, if a tokenizer says so
    saved_iteration: int | None = None
    signals: StopSignals = field(default_factory=StopSignals)
    stopped_by: str | None = None
    lock: AbstractContextManager[Any] = field(default_factory=nullcontext)

    def __post_init__(self) -> None:
        self._finite = self._infinite = 0  # steps of this process
        self._ahead: list[StepSamples] | None = None  # the next rollout batch, if it was prepared while this one trains
        self.output = RunConsole(self.console, self.config, self.metrics.path)
        self.checkpoints = CheckpointSaver(self.config, self.model, self.optimizer, self.output.print, self.critic)
        if self.saved_iteration is None:
            # The best checkpoint so far belongs to another run's folder.
            self.progress.best = None
        self.checkpoints.set_best(self.progress.best)
        self.watchdog = Watchdog(self.engine.mesh, self.config.parallel.timeout.total_seconds())

    def run(self) -> None:
        """Train until the last step or until a stop signal (``stop_signals``). The state is saved in both cases."""
        with self.lock, self.signals.watching(), self.watchdog, closing(self.source):
            with self._saving_if_rollouts_end():
                self._run_steps()
            self._save()
            self.checkpoints.finish()
            self._check_that_steps_were_finite()
            self._save_hf()
        self.output.finish(self.progress.iteration, self.stopped_by)

    def _run_steps(self) -> None:
        if not self.resumed:
            self._report_start()
        while self.progress.iteration < self.config.optimization.train_iters and not self._stops():
            self._report(self._step())
            self.checkpoints.poll()
            interval, best = self.config.checkpoint.save_interval, self.progress.best
            is_best = best is not None and best.iteration == self.progress.iteration
            if is_best or (interval and self.progress.iteration % interval == 0):
                self._save()

    def _check_that_steps_were_finite(self) -> None:
        """Refuse to end well after the last step if no step of this process had a finite loss and gradient."""
        if self._infinite and not self._finite and self.stopped_by is None:
            steps = "the only step" if self._infinite == 1 else f"all {self._infinite} steps"
            raise InputError(
                f"{steps} of this run had a loss or a gradient norm that is not finite, so no weight has changed; "
                "check the rewards and logprobs of the rollouts, and --lr"
            )

    @contextmanager
    def _saving_if_rollouts_end(self) -> Iterator[None]:
        """Save the progress if the rollout source fails. It fails only between steps, when the state is complete."""
        try:
            yield
        except RolloutError as error:
            iteration, kept = self.progress.iteration, ""
            if self.config.checkpoint.save is not None and iteration:
                self._save()
                self.checkpoints.finish()
                kept = "; the progress is saved, and the same command continues the run"
            raise InputError(f"after step {iteration}: {error}{kept}") from error

    def _step(self) -> dict[str, Any]:
        """Run one optimizer step and return its record of metrics."""
        watch = self._stopwatch(self.progress.iteration + 1)
        step, sampled = self._next_step(watch)
        # It was done just now if a rollout batch was prepared; it takes milliseconds.
        if "prepare" not in watch.seconds and self.tuner.update():
            self._forget_plans(step)
        trained: dict[str, Any] = {}
        watch.seconds |= {"train": 0.0, "update": 0.0}
        if self.progress.iteration >= self.config.critic.num_critic_only_steps:
            trained = self._train_policy(step, watch)
        batch = self._planned(step, watch)
        self.progress.iteration += 1
        if self.critic is not None:
            with watch.measure("critic"):
                trained |= self.critic.train(batch)
        sizes = step_sizes(self.engine, batch)
        return {
            "iteration": self.progress.iteration,
            **step.statistics,
            "rollout_batch_step": step.age,
            **trained,
            **_probability_ratio(trained),
            **sizes,
            TIMING: step_timing(watch, sizes, sampled, self.engine.mesh) | self.source.timing(),
        }

    def _next_step(self, watch: Stopwatch) -> tuple[StepSamples, int]:
        """Return the next step and the number of tokens that were sampled to obtain it.

        The step comes from the current rollout batch or, if that is used up, from the next one with trainable rollouts.
        """
        sampled = 0
        for _ in range(_MAX_EMPTY_BATCHES):
            if self.progress.waiting:
                break
            rollouts, ahead = [], self._ahead
            if ahead is None:
                with watch.measure("collect"):
                    rollouts = self._collect()
                if not self.config.data.rollouts:
                    counts = self.source.statistics()
                    unused = [counts.get(f"{why}_decoded_tokens", 0.0) for why in ("left_out", "failed")]
                    sampled += decoded_tokens(rollouts) + int(sum(unused))
            with watch.measure("prepare"):
                if self.tuner.update() and ahead:
                    self._forget_plans(ahead[0])
                self.progress.waiting = self.preparation.prepare(rollouts) if ahead is None else ahead
                self._ahead = None
                watch.seconds["logprobs"] = watch.seconds.get("logprobs", 0.0) + self.preparation.pass_seconds
                if self.rollout_files is not None:
                    self.rollout_files.write(self.progress.iteration + 1, self.progress.waiting)
                for step in self.progress.waiting:
                    step.rollouts = None  # no longer needed
            # These statistics describe the rollout batch, so a checkpoint keeps them with its steps.
            statistics = self.source.statistics()
            for step in self.progress.waiting:
                step.add_statistics(statistics)
            self.progress.rollout_batches += 1
        if self.progress.waiting:
            return self.progress.waiting.pop(0), sampled
        why = "the rewards within every group are equal, so there are no preference pairs; check the rewards"
        if self.config.objective.objective != "dpo":
            why = "no reward reaches --rejection-reward-threshold; lower the threshold or check the rewards"
        raise InputError(
            f"step {self.progress.iteration + 1}: {_MAX_EMPTY_BATCHES} consecutive rollout batches had nothing to "
            f"train: {why}"
        )

    def _planned(self, step: StepSamples, watch: Stopwatch) -> TreeBatch:
        """The step's plan, if it was not made while the step was prepared or the one before trained. Its time counts as
        training time in any case."""
        with watch.measure("plan"):
            batch = step.batch(self.config.tree, self.config.objective, self.engine)
        watch.seconds["plan"] = step.plan_seconds
        return batch

    def _forget_plans(self, step: StepSamples) -> None:
        """Let this step and the waiting ones be planned again, within the limits of now."""
        for planned in (step, *self.progress.waiting, *(self._ahead or ())):
            planned.forget_plan()

    def _prepare_ahead(self) -> None:
        """Prepare and plan the next step if it does not depend on this one's weights. Called while the device computes,
        by the thread that gives it work: another one would delay that.
        """
        is_last = self.progress.iteration + 1 >= self.config.optimization.train_iters
        if not self.progress.waiting and self.config.data.rollouts and not (is_last or self.preparation.needs_weights):
            self._ahead = self.preparation.prepare(self._collect())
        for step in (self.progress.waiting or self._ahead or [])[:1]:
            batch = step.batch(self.config.tree, self.config.objective, self.engine)
            if self.teachers is None:  # which add to the batch
                self.engine.prepare_ahead(batch, self.objective)

    def _train_policy(self, step: StepSamples, watch: Stopwatch) -> dict[str, Any]:
        """Run the policy's forward, backward and update, and return their metrics."""
        number = self.progress.iteration + 1
        result = self._forward_backward(step, watch)
        loss = float(result.loss)
        self._check_that_logprobs_agree(step, result)
        with watch.measure("update"):
            outcome = self.optimizer.step(loss)
        is_finite = math.isfinite(loss) and math.isfinite(outcome.grad_norm)
        self._finite, self._infinite = self._finite + is_finite, self._infinite + (not is_finite)
        if self._is_timed(number) and self.engine.mesh.rank == 0:
            path = Path(self.config.logging.timeline_dir, f"step_{number}.json")
            write_timelines(path, beside_plan(result.timeline, result.plan.training.planned_events()))
        if self.tuner.observe(result):
            self._forget_plans(step)
        return {
            "loss": loss,
            "grad_norm": outcome.grad_norm,
            "learning_rate": outcome.learning_rate,
            "skipped": not outcome.applied,
            **{name: float(value) for name, value in result.metrics.items()},
            "peak_in_flight_tokens": result.peak_in_flight_tokens,
            "recomputed_tokens": result.recomputed_tokens,
        }

    def _check_that_logprobs_agree(self, step: StepSamples, result: StepResult) -> None:
        """With ``--batch-invariant-mode``, refuse to continue if the sampler's logprobs are not the trainer's."""
        gap = float(result.metrics.get("sampler_logprob_gap_max", 0.0))
        config = self.config
        if gap != 0 and step.age == 0 and config.model.batch_invariant_mode and not config.data.rollouts:
            raise InputError(
                f"step {self.progress.iteration + 1}: logprobs of sampler and trainer differ by up to {gap:g}, which "
                "--batch-invariant-mode rules out; leave it out to train with this difference"
            )

    def _forward_backward(self, step: StepSamples, watch: Stopwatch) -> StepResult:
        """Run the step's passes. If they run out of memory, the step is planned again with less, once."""
        is_timed = self._is_timed(self.progress.iteration + 1) or self.tuner.measures_next_step
        while True:
            batch = self._planned(step, watch)
            if self.teachers is not None:
                with watch.measure("teachers"):
                    batch = self.teachers.attach(batch, [step.samples[i] for i in step.sample_numbers])
            try:
                with watch.measure("train"):
                    self.optimizer.zero_grad()
                    result = self.engine.forward_backward(batch, self.objective, record_timeline=is_timed)
                    self._prepare_ahead()
                    float(result.loss)  # waits for the device
                    return result
            except torch.OutOfMemoryError as error:
                self.output.warn(self.tuner.retry(batch, error))
            # Outside of the handler, whose traceback holds the tensors of the failed step.
            torch.cuda.empty_cache()
            self._forget_plans(step)

    def _is_timed(self, iteration: int) -> bool:
        """Whether to record this step's timeline. The second step is the first one without one-time preparation."""
        logging = self.config.logging
        return logging.timeline_dir is not None and (iteration == 2 or iteration % TIMELINE_INTERVAL == 0)

    def _stopwatch(self, iteration: int) -> Stopwatch:
        return Stopwatch(lambda name: self.watchdog.enter(f"'{name}' of step {iteration}"))

    def _stops(self) -> bool:
        """Whether any process has received a signal. It may reach the processes in different steps, so they agree."""
        names = self.engine.mesh.gather_from_all(self.signals.name)
        self.stopped_by = next((name for name in names if name is not None), None)
        return self.stopped_by is not None

    def _collect(self) -> list:
        try:
            return self.source.next_batch(self.progress.rollout_batches)
        except FloatingPointError as error:
            raise InputError(f"step {self.progress.iteration + 1}: {error}; lower --lr or --clip-grad") from error

    def _report_start(self) -> None:
        """Evaluate the initial weights and report the result as record 0."""
        if self.config.logging.eval_interval:
            self._report({"iteration": 0, TIMING: {}})

    def _report(self, record: dict[str, Any]) -> None:
        """Evaluate when due, write the record and print the progress line."""
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

    def _save(self) -> None:
        """Save the state, once a step."""
        folder, iteration = self.config.checkpoint.save, self.progress.iteration
        if folder is None or self.saved_iteration == iteration:
            return
        self.watchdog.enter(f"saving step {iteration}")
        source = self.source.state_dict()
        state = self.progress.state_dict() | {"planning": self.tuner.state_dict()}
        state |= {"source": source} if source else {}
        state |= {"end_id": self.end_id} if self.end_id is not None else {}
        self.checkpoints.save(iteration, state, self.progress.best)
        self.saved_iteration = iteration

    def _save_hf(self) -> None:
        if self.config.checkpoint.save_hf is None or self.stopped_by is not None:
            return
        self.watchdog.enter("saving in Hugging Face's form")
        path = save_hf(self.config, self.model, self.progress.iteration, self.end_id)
        self.output.print(f"saved {path}")


def _probability_ratio(trained: dict[str, Any]) -> dict[str, float]:
    gap = trained.get("sampler_logprob_gap")
    return {} if gap is None else {"sampler_probability_ratio": math.exp(min(gap, 700.0))}
