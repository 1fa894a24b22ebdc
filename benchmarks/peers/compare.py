"""Compares training steps of other projects with ours: same rollouts, same weights, same loss, one GPU.

    python benchmarks/peers/compare.py [--sets tau1 tau1-turn math tot] [--peers ours trl-tree ours-dense trl-flat verl]
        [--model qwen3-1.7b | FOLDER] [--tokens 60000] [--measure steps gradient largest] [--seconds 270]
        [--output peers.json]

    ours, ours-dense  this project without flags, on trees and on dense rows
    trl-tree          TRL 1.16's tree rows by its own file, packed as in its asynchronous GRPO, on transformers' layers
    trl-flat          rows without padding on the same layers and kernels, nothing shared
    verl              verl's actor update on FSDP2 by ``verl_update.py``: the same sequences, but clipped PPO with a KL
                      term, and its optimizer's step inside the seconds; needs an environment with verl

Rollouts are those in the folder $DTA_ROLLOUTS or --rollouts. The loss is minus advantage times logprob over the
recorded mask; no optimizer step is timed (but verl's). Weights are in bfloat16; TRL's rows accumulate gradients in
bfloat16, ours in float32. The attention kernel of TRL's rows is FlashAttention 4 (package flash-attn-4), or that of
PyTorch where it does not run; the rows say which. A peer runs in a process of its own, is stopped when its share of the
time is used up, and if it fails, its error is in the JSON and the others go on.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from megatron_dta.common.quiet import quieten_libraries

quieten_libraries()  # before Megatron is imported, which warns of missing packages

from common.report import Report
from megatron_dta.common.command_line import CommandLineParser, check_at_least, check_output
from megatron_dta.common.entry_point import run_entry_point
from megatron_dta.core.common.errors import InputError
from peers import attention, workload

MEASURES = ("steps", "gradient", "largest")
PEERS = ("ours", "trl-tree", "ours-dense", "trl-flat", "verl")
# Weights of the division of the time that is left.
SHARES = {"ours": 3.0, "trl-tree": 4.0, "ours-dense": 2.0, "trl-flat": 2.5, "verl": 4.0}


def parse_arguments() -> argparse.Namespace:
    """Parse and check the command line."""
    parser = CommandLineParser(__doc__)
    parser.add_argument("--sets", nargs="+", choices=list(workload.SETS), default=list(workload.SETS))
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS[:4]))
    parser.add_argument("--model", default="qwen3-1.7b", help="a named shape with random weights, or a folder")
    parser.add_argument("--rollouts", type=Path, default=os.environ.get("DTA_ROLLOUTS"))
    parser.add_argument("--tokens", type=int, default=60000, help="of a set, shared ones counted each time")
    parser.add_argument("--steps", type=int, default=2, help="timed steps; the median counts")
    parser.add_argument("--attention", choices=attention.KERNELS, default="auto", help="of TRL's rows")
    parser.add_argument("--measure", nargs="+", choices=MEASURES, default=list(MEASURES))
    parser.add_argument("--trees", type=int, nargs=2, default=[65536, 1 << 20], help="sizes of the search, in tokens")
    parser.add_argument("--seconds", type=float, default=270, help="of all measurements together")
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    arguments = parser.parse_args()
    check_at_least(arguments, 1, "tokens", "steps")
    check_output(arguments.output, "--output")
    if arguments.rollouts is None:
        raise InputError("give --rollouts or set DTA_ROLLOUTS to the folder of the rollout sets")
    if not (Path(arguments.model) / "config.json").exists() and arguments.model not in workload.known_models():
        raise InputError(f"--model {arguments.model}: neither a folder nor one of {', '.join(workload.known_models())}")
    return arguments


def run_within(command: list[str], seconds: float) -> str | None:
    """Run a command; returns why it failed."""
    process = subprocess.Popen(command, start_new_session=True)
    try:
        code = process.wait(max(1.0, seconds))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return f"stopped after {seconds:.0f} s"
    return None if code == 0 else f"ended with exit code {code}"


class Comparison:
    """The run: a folder for what the processes share, the end of the time, and the report."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.arguments, self.folder, self.end = arguments, folder, time.monotonic() + arguments.seconds
        self.model, self.reference = Path(arguments.model), folder / "reference.safetensors"
        settings = {name: str(value) for name, value in vars(arguments).items()}
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.report = Report("training steps of other projects", settings, device, arguments.output)

    def left(self) -> float:
        """Seconds that are left."""
        return self.end - time.monotonic()

    def run(self) -> None:
        """Measure every peer."""
        if not (self.model / "config.json").exists():
            # In a process of its own, so that this one holds no memory of the GPU.
            self.model = self.folder / "model"
            script = (
                f"import sys, torch; from pathlib import Path; sys.path.insert(0, {str(HERE.parent)!r}); "
                "from peers.workload import write_model; device = 'cuda' if torch.cuda.is_available() else 'cpu'; "
                f"write_model({self.arguments.model!r}, Path({str(self.model)!r}), torch.device(device))"
            )
            error = run_within([sys.executable, "-c", script], self.left())
            if error is not None:
                raise InputError(f"the random weights could not be written: {error}")
        if "gradient" in self.arguments.measure:
            self.worker("reference", self.left() / 4)
        for number, peer in enumerate(self.arguments.peers):
            weights = [SHARES[name] for name in self.arguments.peers[number:]]
            seconds = self.left() * weights[0] / sum(weights)
            if peer == "verl":
                self.verl(seconds)
            else:
                self.worker(peer, seconds)

    def worker(self, peer: str, seconds: float) -> None:
        """Run a peer's process and take over its rows."""
        rows, given = self.folder / f"{peer}.jsonl", self.arguments
        command = [sys.executable, str(HERE / "worker.py"), peer, "--model", str(self.model)]
        command += ["--rollouts", str(given.rollouts), "--sets", *given.sets, "--tokens", str(given.tokens)]
        command += ["--steps", str(given.steps), "--attention", given.attention, "--reference", str(self.reference)]
        command += ["--seconds", str(seconds - 10), "--rows", str(rows)]
        command += ["--measure", *given.measure, "--trees", *map(str, given.trees)]
        print(f"== {peer}: at most {seconds:.0f} s", flush=True)
        start = time.monotonic()
        error = run_within(command, seconds)
        for line in rows.read_text(encoding="utf-8").splitlines() if rows.exists() else []:
            self.report.results["rows"].append(json.loads(line))
        row: dict[str, Any] = {"peer": peer, "what": "process", "seconds": time.monotonic() - start}
        self.report.add(row if error is None else row | {"error": error})

    def verl(self, seconds: float) -> None:
        """Run ``verl_update.py`` on every set, and take over its rows."""
        if find_spec("verl") is None:
            self.report.add({"peer": "verl", "what": "process", "error": "verl is not installed"})
            return
        end, config = time.monotonic() + seconds, workload.model_config(self.model, torch.bfloat16)
        for name in self.arguments.sets:
            file, granularity = workload.SETS[name]
            sequences = workload.load_set(name, self.arguments.rollouts, self.arguments.tokens, config.vocab_size)
            output = self.folder / f"verl-{name}.json"
            command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1"]
            command += [str(HERE / "verl_update.py"), "--engine", "fsdp2", "--output", str(output)]
            command += ["--attn-implementation", "packed_fa4", "--fused-kernels-backend", "triton"]
            command += ["--rollouts", str(Path(self.arguments.rollouts) / file), "--sample-granularity", granularity]
            command += ["--max-sequences", str(len(sequences)), "--steps", str(self.arguments.steps)]
            command += ["--model-folder", str(self.model)]
            error = run_within(command, end - time.monotonic())
            row = json.loads(output.read_text(encoding="utf-8"))["rows"][0] if error is None else {"error": error}
            self.report.add({"peer": "verl", "what": "step", "set": name, **row})


def table(rows: list[dict[str, Any]]) -> str:
    """The fastest step of every peer on every set."""
    lines = ["set        peer         seconds    GiB  of the bound  computed tokens"]
    best: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        if row.get("what") == "step" and "seconds" in row:
            key = (row["set"], row["peer"])
            best[key] = min(best.get(key, row), row, key=lambda step: step["seconds"])
    for (name, peer), row in sorted(best.items()):
        memory = row["peak_gib"] or 0.0
        shown = f"{row['seconds']:8.3f} {memory:6.1f} {row['share_of_bound']:13.3f} {row['computed_tokens']:16,}"
        lines.append(f"{name:10} {peer:11} {shown}")
    return "\n".join(lines)


def main() -> int:
    """Run the comparison."""
    arguments = parse_arguments()
    memory = Path("/dev/shm")
    fits = memory.is_dir() and shutil.disk_usage(memory).free > 16 << 30
    with tempfile.TemporaryDirectory(dir=memory if fits else None) as folder:
        comparison = Comparison(arguments, Path(folder))
        comparison.run()
    print(table(comparison.report.results["rows"]))
    return 0


if __name__ == "__main__":
    raise SystemExit(run_entry_point(main))
