"""Runs the experiments of TreePO (arXiv 2508.17445): tree sampling against GRPO at equal tokens and at equal time.

    PYTHONPATH=benchmarks python benchmarks/papers/treepo.py [--small] [--parts PART ...] [--methods METHOD ...]
        [--seeds N] [--jobs N] [--output-dir FOLDER]

curves      held-out reward of GRPO, of GRPO on trees and of TreePO, over decoded tokens, seconds of sampling and all
            seconds; --seeds runs of each, on a task that a model learns from scratch
ablations   TreePO with other trees, allocations, fallbacks and advantages, at equal decoded tokens
efficiency  trees against independent rollouts: trajectories/s, leaf tokens/s and effective leaves/s
votes       maj@k over the seconds of sampling, of the warmed-up weights and of those that TreePO has trained

Tables (JSON, Markdown) and plots appear in --output-dir, the JSON file after every run. Finished runs are in its folder
runs; the same command continues after an interruption and repeats none of them, not even with newer code. The tables
hold the parts of the last call; a call without --parts collects all from finished runs.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from megatron_dta.common.quiet import quieten_libraries

quieten_libraries()  # before Megatron is imported, which warns of missing packages
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from megatron_dta.common.command_line import check_at_least
from megatron_dta.common.entry_point import run_entry_point
from megatron_dta.core.common.errors import InputError
from papers.processes import Job, Processes
from papers.tables import PaperReport, paper_parser
from papers.training import METRICS, TASK, make_data, train, training_progress
from papers.treepo_parts.curves import AXES, Curve, comparison, read_curve, summary
from papers.treepo_parts.plan import GRPO, MOST_STEPS, TREEPO, TREES, Ablation, Scale, ablations, method_flags, scale
from papers.treepo_parts.plots import plot_curves, plot_sampling, sampling_panels
from papers.treepo_parts.sampling import efficiency, votes
from papers.treepo_parts.text import add_tables

PARTS = ("curves", "ablations", "efficiency", "votes")
PRELOAD = ("papers.training", "papers.treepo_parts.sampling", "papers.tables")


class Experiment:
    """The parts of the experiment; each adds its rows to the report.

    Args:
        folder: of all results.
        chosen: the sizes.
        methods: whose curves are compared.
        seeds: of the curves; everything else uses the first.
        jobs: maximum number of concurrent runs.
    """

    def __init__(self, folder: Path, chosen: Scale, methods: Sequence[str], seeds: Sequence[int], jobs: int) -> None:
        settings = {"sizes": vars(chosen), "methods": list(methods), "seeds": list(seeds), "jobs": jobs}
        self.report = PaperReport("treepo", folder, settings)
        self.curves: dict[str, dict[int, Curve]] = {method: {} for method in methods}
        self.failed = False
        self._scale, self._seeds, self._jobs = chosen, seeds, jobs
        self._runs = folder / "runs"
        self._processes = Processes(self._runs, PRELOAD, jobs)
        self._flags = method_flags(chosen)
        add_tables(self.report)

    def run_curves(self) -> None:
        """All methods with all seeds."""
        for seeds in self._groups(self._seeds):
            starts = sorted({self._start(seed) for seed in seeds})
            self._begin([partial(self._data_job, start) for start in starts])
            self._begin([partial(self._warmup_job, start) for start in starts])
            for method in self.curves:
                print(f"== {method}, seeds {', '.join(map(str, seeds))} of {len(self._seeds)}", flush=True)
                self._begin([partial(self._curve_job, method, seed) for seed in seeds])
                for seed in seeds:
                    self._attempt("runs", {"method": method, "seed": seed}, partial(self._curve, method, seed))

    def run_ablations(self) -> None:
        """TreePO, and one run of each of its variants."""
        numbered = list(enumerate([Ablation("TreePO", self._shape(), ""), *ablations(self._scale)], start=1))
        for group in self._groups(numbered):
            self._begin([partial(self._ablation_job, number, ablation) for number, ablation in group])
            for number, ablation in group:
                names = {"group": ablation.group, "name": ablation.name, "flags": ablation.flags}
                print(f"== ablation {number} of {len(numbered)}: {ablation.group}, {ablation.name}", flush=True)
                self._attempt("ablations", names, partial(self._ablation, number, ablation))

    def run_efficiency(self) -> None:
        """Rates of trees and of independent rollouts."""
        print("== sampling efficiency", flush=True)
        arguments = {"flags": self._scale.efficiency.split(), "segments": list(self._scale.efficiency_segments)}
        for row in self._processes.run(Job("efficiency", efficiency, arguments))[1]:
            self.report.add("efficiency", row)

    def run_votes(self) -> None:
        """maj@k of the weights before and after training on trees."""
        chosen, seed = self._scale, self._seeds[0]
        trained, _ = self._processes.run(self._curve_job(TREEPO, seed))
        for model, folder in (("warm-up", self._warmup(self._start(seed))), (TREEPO, trained / "checkpoint")):
            print(f"== maj@k, {model}", flush=True)
            arguments = {
                "flags": [*self._training_flags(seed), "--load", str(folder), "--finetune"],
                "segment": chosen.segment,
                "widths": list(chosen.widths),
                "factors": list(chosen.branching_factors),
                "repeats": chosen.repeats,
            }
            for row in self._processes.run(Job(f"votes-{model}", votes, arguments))[1]:
                self.report.add("votes", {"model": model, **row})

    def write(self) -> None:
        """Compare the methods and write Markdown and plots, of what there is; end what is still running."""
        self._read_interrupted(self._processes.close())
        by_method = {method: of_method for method, of_method in self.curves.items() if of_method}
        complete = [seed for seed in self._seeds if all(seed in of_method for of_method in by_method.values())]
        if by_method and complete:
            curves = {method: {seed: by_method[method][seed] for seed in complete} for method in by_method}
            for row in comparison(curves, next(iter(curves)), self._scale.tokens):
                self.report.add("curves", row)
            print(f"plot: {self.report.plot(partial(plot_curves, curves=curves), len(AXES))}")
        print(f"tables: {self.report.write_markdown()}")
        rates, voted = self.report.rows("efficiency"), self.report.rows("votes")
        if panels := sampling_panels(rates, voted):
            print(f"plot: {self.report.plot(partial(plot_sampling, rates=rates, votes=voted), panels, 'sampling')}")

    def _read_interrupted(self, names: Sequence[str]) -> None:
        """The curves of runs that were ended early, as far as they came."""
        for method, of_method in self.curves.items():
            for seed in self._seeds:
                name = _run_name(method, seed)
                if name in names:
                    with suppress(InputError):  # it has not been evaluated yet
                        of_method[seed] = read_curve(self._runs / name / METRICS)

    def attempt(self, part: str) -> None:
        """Run a part; what fails leaves the others as they are."""
        try:
            getattr(self, f"run_{part}")()
        except InputError as error:
            self.failed = True
            print(f"error: {part}: {error}", file=sys.stderr, flush=True)

    def _attempt(self, table: str, names: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> None:
        """Add the row of one run, or its error."""
        try:
            row = measure()
        except InputError as error:
            self.failed = True
            row = {"error": str(error)}
        self.report.add(table, names | row)

    def _groups(self, items: Sequence[Any]) -> Iterator[Sequence[Any]]:
        """Groups of jobs that run concurrently."""
        return (items[begin : begin + self._jobs] for begin in range(0, len(items), self._jobs))

    def _begin(self, jobs: Sequence[Callable[[], Job]]) -> None:
        for make in jobs:
            with suppress(InputError):  # a job needs the ones before it; who waits for it meets the error
                self._processes.begin(make())

    def _curve(self, method: str, seed: int) -> dict[str, Any]:
        chosen, (folder, _) = self._scale, self._processes.run(self._curve_job(method, seed))
        curve = self.curves[method][seed] = read_curve(folder / METRICS)
        return summary(folder / METRICS, chosen.batch, chosen.tokens) | {"points": curve.points()}

    def _ablation(self, number: int, ablation: Ablation) -> dict[str, Any]:
        folder, _ = self._processes.run(self._ablation_job(number, ablation))
        return summary(folder / METRICS, self._scale.batch, self._scale.ablation_tokens)

    def _shape(self) -> str:
        return f"{self._scale.response // self._scale.segment} x {self._scale.segment}"

    def _curve_job(self, method: str, seed: int) -> Job:
        return self._train_job(_run_name(method, seed), self._flags[method], seed, self._scale.tokens)

    def _ablation_job(self, number: int, ablation: Ablation) -> Job:
        seed = self._seeds[0]
        if not ablation.flags:  # The curve of TreePO goes on after the budget of an ablation.
            return self._curve_job(TREEPO, seed)
        flags = f"{self._flags[TREEPO]} {ablation.flags}"
        return self._train_job(f"ablation-{number}", flags, seed, self._scale.ablation_tokens)

    def _train_job(self, name: str, flags: str, seed: int, budget: int) -> Job:
        """A run of reinforcement learning from the warmed-up weights, which are waited for."""
        every = [
            *self._training_flags(seed),
            *flags.split(),
            "--load",
            str(self._warmup(self._start(seed))),
            "--finetune",
        ]
        keeps_weights = name == f"{TREEPO}-{self._seeds[0]}"
        arguments = {"flags": every, "budget": budget, "keep_weights": keeps_weights}
        return Job(name, train, arguments, partial(training_progress, budget=budget))

    def _training_flags(self, seed: int) -> list[str]:
        chosen, data = self._scale, self._data(self._start(seed))
        return [
            *self._model_flags(seed),
            *chosen.training.split(),
            *f"--rollout-max-response-len {chosen.response} --rollout-batch-size {chosen.batch}".split(),
            *f"--n-samples-per-prompt {chosen.width} --eval-interval {chosen.eval_interval}".split(),
            *f"--train-iters {MOST_STEPS} --lr-decay-style constant --lr-warmup-iters 4".split(),
            *("--tokenizer-type", "CharacterTokenizer", "--reward-function", f"{TASK}:reward"),
            *("--prompt-data", str(data / "prompts.jsonl"), "--eval-prompt-data", str(data / "held_out.jsonl")),
        ]

    def _start(self, seed: int) -> int:
        """The seed of the data and of the warmed-up weights."""
        return self._seeds[0] if self._scale.shared_start else seed

    def _warmup(self, seed: int) -> Path:
        """The checkpoint of a seed's supervised warm-up."""
        return self._processes.run(self._warmup_job(seed))[0] / "checkpoint"

    def _warmup_job(self, seed: int) -> Job:
        flags = [*self._model_flags(seed), *self._scale.warmup.split(), "--objective", "sft"]
        flags += ["--rollouts", str(self._data(seed) / "warmup.jsonl")]
        return Job(f"warmup-{seed}", train, {"flags": flags}, training_progress)

    def _data(self, seed: int) -> Path:
        """The folder of a seed's prompts and solved problems."""
        return self._processes.run(self._data_job(seed))[0]

    def _data_job(self, seed: int) -> Job:
        return Job(f"data-{seed}", make_data, {"flags": [*self._scale.data.split(), "--seed", str(seed)]})

    def _model_flags(self, seed: int) -> list[str]:
        common = "--vocab-size 16 --swiglu --disable-bias-linear --qk-layernorm --weight-decay 0 --adam-beta2 0.95"
        return [*self._scale.model.split(), *common.split(), "--seed", str(seed)]


def _run_name(method: str, seed: int) -> str:
    return f"{method}-{seed}".replace(" ", "-")


def main() -> int:
    """Run the parts, write tables and plots; status 1 if a run has failed."""
    parser = paper_parser(__doc__, "treepo")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to run (default: everything)")
    parser.add_argument("--methods", nargs="+", choices=(GRPO, TREEPO, TREES), help="curves (default: all)")
    parser.add_argument("--jobs", type=int, default=1, help="maximum number of concurrent runs")
    arguments = parser.parse_args()
    check_at_least(arguments, 1, "seeds", "jobs")
    chosen = scale("smallest" if arguments.smallest else "small" if arguments.small else "full")
    # A scheduler's signal ends the run under way, too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    seeds = range(1, min(arguments.seeds, chosen.seeds) + 1)
    methods = arguments.methods or chosen.methods
    experiment = Experiment(arguments.output_dir, chosen, methods, seeds, arguments.jobs)
    try:
        for part in arguments.parts:
            experiment.attempt(part)
    finally:
        experiment.write()
    return int(experiment.failed)


if __name__ == "__main__":
    run_entry_point(main)
