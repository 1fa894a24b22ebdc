"""Measures one peer: seconds and memory of its steps, the distance of its gradient, its largest tree.

    python benchmarks/peers/worker.py PEER --model FOLDER --sets tau1 ... --rows OUT.jsonl

``compare.py`` starts it, a process for each peer. Every result is a line of OUT.jsonl as soon as it is measured; a
measurement that fails is a line with its error. PEER "reference" writes the float32 gradients instead.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from megatron_dta.common.quiet import quieten_libraries

quieten_libraries()  # before Megatron is imported, which warns of missing packages

from common.profile import gemm_peak, now
from megatron_dta.core.common.errors import InputError
from megatron_dta.training.config.derived.device_queues import set_device_queues
from peers import attention, workload
from peers.engine import EngineStep
from peers.trl_rows import TrlStep

PEERS = {"ours": "dta", "ours-dense": "dense", "trl-tree": "tree", "trl-flat": "flat"}
# Token budget of a row, and whether layers are recomputed. Measured one after the other; the fastest counts.
ROWS = ((8192, False), (32768, True))
# Tokens between the largest tree that fits and the smallest that does not, at which the search ends.
WIDTH = 16384


class Steps:
    """The steps of a peer with one interface."""

    def __init__(self, arguments: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> None:
        self.mode, self.device = PEERS[arguments.peer], device
        self.notes: dict[str, Any] = {}
        self.ours = EngineStep(arguments.model, dtype) if self.mode in ("dta", "dense") else None
        if self.ours is None:
            shape = workload.model_config(arguments.model, dtype)
            heads = (shape.num_attention_heads, shape.num_query_groups, shape.kv_channels)
            self.notes["kernel"], varlen = attention.choose(arguments.attention, heads)
            self.trl = TrlStep(arguments.model, self.mode == "tree", varlen, dtype, device)

    def settings(self, sequences: list[workload.Sequence]) -> list[tuple[int, bool]]:
        """What is tried: token budgets of rows and recomputation; ours decides by itself."""
        longest = max(len(row.token_ids) for row in sequences)
        if self.ours is not None:
            return [(0, False)]
        return [(max(budget, longest), recomputes) for budget, recomputes in ROWS]

    def prepare(self, sequences: list[workload.Sequence], setting: tuple[int, bool]) -> Callable[[], float]:
        """A function that runs the step."""
        if self.ours is not None:
            self.ours.first_steps(sequences, self.mode)
            batch = self.ours.plan(sequences, self.mode)
            self.notes |= {"computed_tokens": batch.plan.segments.tree.num_tokens}
            return lambda: self.ours.step(batch)
        budget, recomputes = setting
        self.trl.checkpoint_layers(recomputes)
        rows = self.trl.rows(sequences, budget)
        self.notes |= {"rows": len(rows), "computed_tokens": sum(len(row["input_ids"]) for row in rows)}

        def step() -> float:
            self.trl.model.zero_grad(set_to_none=True)
            return self.trl.step(rows, sequences)

        return step

    def gradients(self) -> dict[str, torch.Tensor]:
        """Gradients of the last step under Hugging Face's names."""
        if self.ours is not None:
            return self.ours.gradients()
        return {name: parameter.grad for name, parameter in self.trl.model.named_parameters()}

    def free(self) -> None:
        """Release what a step has left."""
        if self.ours is None:
            self.trl.model.zero_grad(set_to_none=True)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


class Worker:
    """Measures until the time is used up and writes the rows."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.end = arguments, time.monotonic() + arguments.seconds
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.config = workload.model_config(arguments.model, self.dtype)

    def load(self, name: str) -> list[workload.Sequence]:
        """The sequences of a set."""
        return workload.load_set(name, self.arguments.rollouts, self.arguments.tokens, self.config.vocab_size)

    def write(self, row: dict[str, Any]) -> None:
        """Append a row and print it."""
        text = json.dumps({"peer": self.arguments.peer, **row})
        with self.arguments.rows.open("a", encoding="utf-8") as file:
            file.write(text + "\n")
        print(f"[{time.monotonic() - self.end + self.arguments.seconds:5.1f} s] {text[:400]}", flush=True)

    def attempt(self, names: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        """Write what ``measure`` returns, or why it failed; None if it did not run to its end."""
        if time.monotonic() > self.end:
            self.write({**names, "error": "no time was left"})
            return None
        try:
            row = {**names, **measure()}
            self.write(row)
            return row
        except Exception as raised:  # kernels and allocators raise many types
            error = f"{type(raised).__name__}: {raised}".splitlines()[0][:300]
        self.write({**names, "error": error})
        return None

    def reference(self) -> dict[str, Any]:
        """Write the float32 gradients over the piece."""
        sequences = workload.piece(self.load(workload.PIECE_SET))
        gradients = workload.reference_gradients(self.arguments.model, sequences, self.device)
        save_file({name: values.contiguous().cpu() for name, values in gradients.items()}, self.arguments.reference)
        return {"what": "reference", "tokens": sum(len(row.token_ids) for row in sequences)}

    def run(self) -> None:
        """Everything, in the order of its importance."""
        arguments = self.arguments
        if arguments.peer == "reference":
            self.attempt({}, self.reference)
            return
        steps, peak = self._start()
        for name in arguments.sets if "steps" in arguments.measure else []:
            sequences = self.load(name)
            for setting in steps.settings(sequences):
                names = {"what": "step", "set": name, "row_budget": setting[0], "recomputes": setting[1]}
                steps.free()
                self.attempt(names, lambda: self._timed(steps, sequences, setting, peak))  # noqa: B023
        if steps.ours is not None and "steps" not in arguments.measure:
            steps.ours.first_steps(workload.piece(self.load(workload.PIECE_SET)), steps.mode)
        if "gradient" in arguments.measure:
            steps.free()
            self.attempt({"what": "gradient"}, lambda: self._distance(steps))
        if "largest" in arguments.measure and steps.mode in ("dta", "tree"):
            self._largest(steps)

    def _start(self) -> tuple[Steps, float]:
        """The peer with its weights, and the rate of large products."""
        try:
            steps, peak = Steps(self.arguments, self.device, self.dtype), gemm_peak(self.device, self.dtype)
        except Exception as raised:
            self.write({"what": "start", "error": f"{type(raised).__name__}: {raised}"[:300]})
            raise
        self.write({"what": "start", "gemm_tflops": peak / 1e12, **steps.notes})
        return steps, peak

    def _timed(
        self, steps: Steps, sequences: list[workload.Sequence], setting: tuple[int, bool], peak: float
    ) -> dict[str, Any]:
        counted = workload.counts(sequences, self.config)
        step, seconds = steps.prepare(sequences, setting), []
        for _ in range(1 + self.arguments.steps):
            start = now(self.device)
            loss = step()
            seconds.append(now(self.device) - start)
            if len(seconds) > 1 and time.monotonic() > self.end:
                break
        taken = median(seconds[1:])
        least = counted["tree_tflop" if steps.mode in ("dta", "tree") else "dense_tflop"]
        memory = torch.cuda.max_memory_allocated() / 2**30 if self.device.type == "cuda" else None
        measured = {"seconds": taken, "timed_steps": len(seconds) - 1, "loss": loss, "peak_gib": memory}
        return {**measured, "share_of_bound": least * 1e12 / peak / taken, **steps.notes, **counted}

    def _distance(self, steps: Steps) -> dict[str, Any]:
        sequences = workload.piece(self.load(workload.PIECE_SET))
        setting = steps.settings(sequences)[-1]
        if steps.ours is not None:
            loss = steps.ours.step(steps.ours.plan(sequences, steps.mode))
        else:
            loss = steps.prepare(sequences, setting)()
        reference = load_file(self.arguments.reference)
        return {"distance": workload.distance(steps.gradients().items(), reference), "loss": loss}

    def _largest(self, steps: Steps) -> None:
        """Bisect the number of unique tokens of a tree that the peer trains, each token once, while there is time."""
        size, most = self.arguments.trees
        fits, fails, expected = 0, None, 0.0
        while (fails is None and fits < most) or (fails is not None and fails - fits > WIDTH):
            if time.monotonic() + expected > self.end:
                break
            if fails is not None:
                size = (fits + fails) // 2
            tree = workload.branching_tree(size, self.config.vocab_size)
            steps.free()
            names = {"what": "tree", "tree_tokens": size}
            row = self.attempt(names, lambda: self._train_once(steps, tree, size))  # noqa: B023
            expected = expected if row is None else 2.2 * row["seconds"]
            fits, fails = (fits, size) if row is None else (size, fails)
            size = min(2 * size, most)
        self.write({"what": "largest tree", "tree_tokens": fits, "fails_at": fails, "tried_up_to": most})

    def _train_once(self, steps: Steps, tree: list[workload.Sequence], size: int) -> dict[str, Any]:
        start = now(self.device)
        if steps.ours is not None:
            steps.ours.step(steps.ours.plan(tree, steps.mode))
        else:
            steps.prepare(tree, (2 * size, True))()
        memory = torch.cuda.max_memory_allocated() / 2**30 if self.device.type == "cuda" else None
        return {"seconds": now(self.device) - start, "peak_gib": memory}


def parse_arguments() -> argparse.Namespace:
    """The command line that ``compare.py`` writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=[*PEERS, "reference"])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rollouts", type=Path, required=True)
    parser.add_argument("--sets", nargs="+", choices=list(workload.SETS), required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--attention", choices=attention.KERNELS, default="auto")
    parser.add_argument("--measure", nargs="+", required=True)
    parser.add_argument("--trees", type=int, nargs=2, required=True)
    parser.add_argument("--reference", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--rows", type=Path, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    set_device_queues(os.environ, 1, 1)
    try:
        Worker(parse_arguments()).run()
    except InputError as refused:
        raise SystemExit(f"error: {refused}") from None
