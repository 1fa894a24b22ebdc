"""Times rollout batches of a real chat model with the code of two trees in turns, on one GPU.

    python benchmarks/real_rollouts.py --model DIR --trees before=DIR after=DIR [--batches 6] [--output FILE.json]

``--model`` is the folder that ``examples/real_model/smollm2.py`` writes, or of a trained model. A process for each
tree loads it; every batch is sampled in every case by one process after the other, and so all meet the same GPU. A
case is a way to sample (plain, das, treepo, treepo-64: segments of 64) and --inference-max-requests (0: without a
value). Tasks: sums (64 prompts x 16 short answers), lists (32 x 16 answers of about a hundred tokens), edits (2 x 16,
lists of 40 lines; for a model that has learned lists), functions (2 x 16 at temperature 0.3, over 24 prompts, so in
epochs of 12 batches), stories (192 x 16 answers of at most 768 tokens) and stories-512 (of at most 512); --prompts
changes how many prompts a batch has. The weights stay those of the model. Seconds are those of a batch from its
prompts to its rewards: the median without the first --skip batches, in which graphs are captured, and the mean of all
others. With --random-weights only the tokenizer of DIR is read; no answer ends by itself, and no draft is right.
bound_seconds (plain) is the time to read the weights once in each pass and K/V once for each token, at the rate of a
large copy.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from common.bandwidth import measured_bandwidth

HERE = Path(__file__).resolve()
TASKS = {
    "sums": ["--rollout-batch-size", "64", "--n-samples-per-prompt", "16", "--rollout-max-response-len", "32"],
    "lists": ["--rollout-batch-size", "32", "--n-samples-per-prompt", "16", "--rollout-max-response-len", "160"],
    "edits": ["--rollout-batch-size", "2", "--n-samples-per-prompt", "16", "--rollout-max-response-len", "400"],
    "functions": ["--rollout-batch-size", "2", "--n-samples-per-prompt", "16", "--rollout-max-response-len", "400"],
    "stories": ["--rollout-batch-size", "192", "--n-samples-per-prompt", "16", "--rollout-max-response-len", "768"],
}
TASKS["stories-512"] = [*TASKS["stories"][:-1], "512"]
TASKS["functions"] += ["--rollout-temperature", "0.3"]
SCRIPTS = {
    "sums": "examples/real_model/sums.py",
    "lists": "examples/real_model/lists.py",
    "edits": "examples/real_model/lists.py --lines 40",
    "functions": "benchmarks/rollout_parts/texts.py functions --prompts 24",
    "stories": "benchmarks/rollout_parts/texts.py stories",
}
SCRIPTS["stories-512"] = SCRIPTS["stories"]
SEGMENTS = {"sums": "16"}
# That of SmolLM2-135M.
SHAPE = ["--num-layers", "30", "--hidden-size", "576", "--ffn-hidden-size", "1536", "--num-attention-heads", "9"]
SHAPE += ["--num-query-groups", "3", "--swiglu", "--init-method-std", "0.05"]
COUNTS = ("decoded_tokens", "forwards", "static_forwards", "drafted_tokens", "accepted_drafts", "prefilled_tokens")


def method(task: str, way: str) -> list[str]:
    """The flags of a way to sample."""
    if way.startswith("treepo"):
        segment = way.partition("-")[2] or SEGMENTS.get(task, "32")
        return ["--rollout-method", "treepo", "--treepo-segment-length", segment]
    return ["--rollout-speculation", "das"] if way == "das" else []


class Worker:
    """Samples with the package that this process imports."""

    def __init__(self, model: Path, data: Path, prompts: int | None = None, random_weights: bool = False) -> None:
        from megatron_dta.core.model.build import build_model
        from megatron_dta.core.model.parallel.mesh import initialize_parallel
        from megatron_dta.training.huggingface.save import load_hf
        from megatron_dta.wiring.attach import attach_extras

        attach_extras()
        self.folder, self.data, self.random_weights = model, data, random_weights
        self.prompts, self.sources = prompts, {}
        config = self.config(next(task for task in TASKS if (data / task).is_dir()), "plain", 256)[0]
        device = initialize_parallel(1, config.parallel)
        self.model = build_model(config.model, device, config.parallel)
        self.bandwidth = measured_bandwidth(device)
        if not random_weights:
            load_hf(config, self.model)
        if "gc.freeze()" in Path("megatron_dta/train.py").read_text(encoding="utf-8"):
            gc.freeze()

    def config(self, task: str, way: str, requests: int) -> tuple[Any, Any]:
        """The settings of a case and its task."""
        from megatron_dta.core.objectives.registry import make_objective
        from megatron_dta.training.arguments import parse_arguments
        from megatron_dta.wiring.setup import read_data, with_known_sizes

        flags = ["--bf16", "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(self.folder)]
        flags += ["--apply-chat-template", "--max-position-embeddings", "2048"]
        flags += SHAPE if self.random_weights else ["--load-hf", str(self.folder)]
        flags += ["--prompt-data", str(self.data / task / "prompts.jsonl"), *TASKS[task], *method(task, way)]
        flags += ["--rollout-batch-size", str(self.prompts)] if self.prompts else []
        flags += ["--reward-function", f"{SCRIPTS[task].split()[0]}:reward", "--lr", "1e-5", "--train-iters", "1"]
        flags += ["--inference-max-requests", str(requests)] if requests else []
        config = parse_arguments(flags)
        sampling_task = read_data(config, make_objective(config.objective))[2]
        return with_known_sizes(config, sampling_task), sampling_task

    def sample(self, case: tuple[str, str, int], batch: int) -> dict[str, float]:
        """Seconds and counts of a batch."""
        import torch

        from megatron_dta.training.loop import Progress
        from megatron_dta.wiring.sources import build_sampled_data

        if case not in self.sources:
            config, task = self.config(*case)
            self.sources[case] = build_sampled_data(config, self.model, task, Progress(), print)[0]
        source = self.sources[case]
        engine = next(part._engine for part in _layers(source) if hasattr(part, "_engine"))
        before = engine.statistics()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        began = time.perf_counter()
        rollouts = source.next_batch(batch)
        seconds = time.perf_counter() - began
        timing = source.timing()
        between = time.perf_counter() - began - seconds
        after = engine.statistics()
        counts = {name: after[name] - before.get(name, 0.0) for name in COUNTS}
        counts["engine_seconds"] = after["seconds"] - before["seconds"]
        saved = timing.get("speculation_saved_seconds")
        return counts | {
            "seconds": seconds, "between_seconds": between, "rollouts": len(rollouts), "saved_seconds": saved or 0.0,
            "captures": after["captures"],
            "bound_seconds": self.bound_seconds(rollouts, counts["forwards"]) if case[1] == "plain" else 0.0,
        }  # fmt: skip

    def bound_seconds(self, rollouts: list[Any], passes: float) -> float:
        """See the module's docstring."""
        config, size = self.model.config, next(self.model.parameters()).element_size()
        weight_bytes = size * sum(parameter.numel() for parameter in self.model.parameters())
        token_bytes = size * config.num_layers * 2 * config.num_query_groups * config.kv_channels
        lengths = [(len(rollout), len(rollout) - rollout.num_trained) for rollout in rollouts]
        read_tokens = sum((before + total - 1) * (total - before) // 2 for total, before in lengths)
        return (weight_bytes * passes + token_bytes * read_tokens) / self.bandwidth


def _layers(source: Any) -> Any:
    while source is not None:
        yield source
        source = getattr(source, "_inner", None)


def serve(model: Path, data: Path, prompts: int | None, random_weights: bool) -> None:
    """Answer each line of the standard input, a case and a batch, with a line of figures."""
    out = os.dup(1)
    os.dup2(2, 1)  # what libraries print is no answer
    with os.fdopen(out, "w", encoding="utf-8") as answers:
        worker = Worker(model, data, prompts, random_weights)
        answers.write("{}\n")
        answers.flush()
        for line in sys.stdin:
            *case, batch = json.loads(line)
            answers.write(json.dumps(worker.sample(tuple(case), batch)) + "\n")
            answers.flush()


def start(tree: Path, arguments: argparse.Namespace) -> subprocess.Popen:
    """A process of ``serve`` with the package in ``tree``."""
    path = f"{tree}:{tree / 'kernels'}:{os.environ.get('PYTHONPATH', '')}"
    command = [sys.executable, str(HERE), "--worker", "--model", str(arguments.model.resolve())]
    command += ["--data", str(arguments.data), *(["--random-weights"] if arguments.random_weights else [])]
    command += ["--prompts", str(arguments.prompts)] if arguments.prompts else []
    environment = os.environ | {"PYTHONPATH": path}
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8", cwd=tree, env=environment
    )


def ask(process: subprocess.Popen, case: tuple[str, str, int], batch: int) -> dict[str, float]:
    """The figures of a batch."""
    process.stdin.write(json.dumps([*case, batch]) + "\n")
    process.stdin.flush()
    return answer(process)


def answer(process: subprocess.Popen) -> dict[str, float]:
    """The next line of a process."""
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"error: a process has ended with {process.wait()}")
    return json.loads(line)


def summary(rows: list[dict[str, float]], skip: int) -> dict[str, Any]:
    """Medians and mean seconds without the first batches; the seconds of all of them, too."""
    counted = rows[skip:] or rows
    medians = {name: round(median(row[name] for row in counted), 5) for name in rows[0]}
    medians["mean_seconds"] = round(sum(row["seconds"] for row in counted) / len(counted), 5)
    return medians | {
        "seconds_of_batches": [round(row["seconds"], 4) for row in rows],
        "saved_of_batches": [round(row["saved_seconds"], 4) for row in rows],
    }


def main() -> None:
    """Run the benchmark, or a worker of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--trees", nargs="+", default=[], metavar="NAME=DIR")
    parser.add_argument("--data", type=Path, default=Path("/tmp/real_rollouts"), help="folder for the tasks")
    parser.add_argument("--cases", nargs="+", default=["plain:256", "plain:0", "das:0", "treepo:0"])
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--batches", type=int, default=6)
    parser.add_argument("--skip", type=int, default=2, help="first batches that are left out")
    parser.add_argument("--prompts", type=int, help="prompts of a batch")
    parser.add_argument("--random-weights", action="store_true")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        serve(arguments.model, arguments.data, arguments.prompts, arguments.random_weights)
        return
    trees = {name: Path(folder).resolve() for name, _, folder in (tree.partition("=") for tree in arguments.trees)}
    for task in arguments.tasks:
        tree = next(iter(trees.values()))
        command = [sys.executable, *SCRIPTS[task].split(), "--output", str(arguments.data / task)]
        environment = os.environ | {"PYTHONPATH": f"{tree}:{os.environ.get('PYTHONPATH', '')}"}
        subprocess.run(command, check=True, cwd=tree, env=environment)
    processes = {name: start(tree, arguments) for name, tree in trees.items()}
    for process in processes.values():
        answer(process)
    results: dict[str, Any] = {}
    for task in arguments.tasks:
        cases = [tuple(case.split(":")) for case in arguments.cases]
        rows: dict[tuple, dict[str, list]] = {case: {name: [] for name in trees} for case in cases}
        for batch in range(arguments.batches):
            for case in cases:
                for name, process in processes.items():
                    rows[case][name].append(ask(process, (task, case[0], int(case[1])), batch))
        for case in cases:
            figures = {name: summary(of_tree, arguments.skip) for name, of_tree in rows[case].items()}
            results[" ".join((task, *case))] = figures
            print(task, *case, *(f"\n  {name} {row}" for name, row in figures.items()), flush=True)
        if arguments.output:
            arguments.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    for process in processes.values():
        process.stdin.close()
        process.wait()


if __name__ == "__main__":
    main()
