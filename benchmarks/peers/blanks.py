"""Measures what ``results/peers_h100.json`` lacks: independent runs of ``compare.py``, each on one GPU of the host.

    python benchmarks/peers/blanks.py --real-model FOLDER [--model qwen3-1.7b] [--runs largest-trl ...] [--seconds 280]
        [--output blanks.json]

    largest-ours, largest-trl   the largest tree that fits on a GPU, and the distance of the gradient from float32
    dense                       steps on math and tot without sharing, ours and TRL's padding-free rows, and distances
    real                        all four peers on all sets with the weights of --real-model, and distances

With four GPUs the runs are concurrent; with fewer they follow one another, and each takes up to --seconds. Rollouts are
those in $DTA_ROLLOUTS. A run's rows have its name and model; they are in --output as soon as the run ends.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from common.report import Report
from megatron_dta.common.command_line import CommandLineParser, check_at_least, check_output
from megatron_dta.common.entry_point import run_entry_point
from megatron_dta.core.common.errors import InputError

# TRL fitted 262,144 tokens into 67.5 of 80 GiB, ours the same in 36.0 GiB.
RUNS = {
    "largest-trl": "--peers trl-tree --measure gradient largest --trees 262144 524288",
    "largest-ours": "--peers ours --measure gradient largest --trees 262144 1048576",
    "dense": "--peers ours-dense trl-flat --sets math tot --measure steps gradient",
    "real": "--peers ours trl-tree ours-dense trl-flat --measure steps gradient",
}


def parse_arguments() -> argparse.Namespace:
    """Parse and check the command line."""
    parser = CommandLineParser(__doc__)
    parser.add_argument("--model", default="qwen3-1.7b", help="a named shape with random weights, or a folder")
    parser.add_argument("--real-model", help="a folder with config.json and safetensors, for the run real")
    parser.add_argument("--runs", nargs="+", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--trees", nargs=2, help="first and last size of the largest tree, for both runs")
    parser.add_argument("--tokens", type=int, default=60000, help="of a set, shared ones counted each time")
    parser.add_argument("--seconds", type=float, default=280, help="of each run")
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    arguments = parser.parse_args()
    check_at_least(arguments, 1, "tokens", "seconds")
    check_output(arguments.output, "--output")
    if "real" in arguments.runs and arguments.real_model is None:
        raise InputError("give --real-model FOLDER, or leave real out of --runs")
    return arguments


def run_compare(name: str, gpu: str | None, arguments: argparse.Namespace, folder: Path) -> list[dict]:
    """A run's rows; without a result, one row with the error."""
    model, output = arguments.real_model if name == "real" else arguments.model, folder / f"{name}.json"
    command = [sys.executable, str(HERE / "compare.py"), *RUNS[name].split(), "--model", str(model)]
    command += ["--tokens", str(arguments.tokens), "--seconds", str(arguments.seconds), "--output", str(output)]
    if arguments.trees is not None and "largest" in name:
        command += ["--trees", *arguments.trees]
    environment = os.environ if gpu is None else os.environ | {"CUDA_VISIBLE_DEVICES": gpu}
    code = subprocess.run(command, env=environment, check=False).returncode
    rows = json.loads(output.read_text(encoding="utf-8"))["rows"] if output.exists() else []
    if code:
        rows.append({"what": "run", "error": f"compare.py ended with exit code {code}"})
    return [{"run": name, "model": Path(model).name, **row} for row in rows]


def main() -> int:
    """Run everything."""
    arguments = parse_arguments()
    count, visible = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    device = torch.device("cuda" if count else "cpu")
    settings = {name: str(value) for name, value in vars(arguments).items()}
    report = Report("blanks of the comparison with other projects", settings, device, arguments.output)
    free: SimpleQueue[str | None] = SimpleQueue()
    for gpu in (visible.split(",") if visible else map(str, range(count))) if count else [None]:
        free.put(gpu)

    def run(name: str) -> list[dict]:
        gpu = free.get()
        try:
            return run_compare(name, gpu, arguments, Path(folder))
        finally:
            free.put(gpu)

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(max(1, count)) as pool:
        for rows in pool.map(run, arguments.runs):
            report.results["rows"] += rows
            report.write()
    for row in report.results["rows"]:
        if row.get("what") in ("gradient", "largest tree"):
            print(" ".join(f"{name} {value}" for name, value in row.items() if name != "what"))
    return int(any(row.get("what") == "run" for row in report.results["rows"]))


if __name__ == "__main__":
    raise SystemExit(run_entry_point(main))
