"""Kills training runs again and again, at random moments, and compares what they end with to unbroken runs.

A run saves after every step. A third of the kills (SIGKILL) come while a checkpoint is being written, a third in the
steps, a third while the run starts and loads. With several processes one of them is killed, and the rest as torchrun
would. Between kills the folder must hold a complete checkpoint that is never older than before; the metrics at the end
must be those of the unbroken run, bit for bit. Status 0 if so. A run that ends before its last kill begins again.

Training processes are forked off this one, which has imported everything, so a start takes a fraction of a second.
"""

import argparse
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from forked import rank_variables
from megatron_dta.training.checkpoint.files import find_checkpoint
from resume_cases import rows_without_timing
from resume_worker import train_in_child
from rollout_runs import Runs

SAVES = "--lr 1e-2 --save-interval 1 --keep-checkpoints 2 "
COMMAND = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --max-position-embeddings 32 --tree-segment-tokens 16 "
    "--task arithmetic --arithmetic-max-operand 3 --rollout-batch-size 2 --n-samples-per-prompt 3 "
    "--rollout-max-response-len 4 --num-steps-per-rollout 2 --old-logprobs recompute --eval-interval 10 --eval-iters 2 "
    + SAVES
)
# What a kind of run adds to the command; asynchronous rollouts have a command of their own.
RUNS = {
    "treepo-das": "--rollout-method treepo --treepo-segment-length 2 --advantage-estimator treepo "
    "--rollout-speculation das --entropy-coef 0.05 --async-save",
    "async-rollouts": None,
}
MOMENTS = ("starting", "stepping", "saving")
# A run that shows no sign of life for so long has hung.
PATIENCE_S = 600.0


class Run:
    """The processes of one start of the command, forked off this one."""

    def __init__(self, argv: list[str], processes: int, log: Path) -> None:
        variables = rank_variables(processes) if processes > 1 else [{}]
        self.children = [_fork(argv, added, log) for added in variables]
        self.statuses: dict[int, int] = {}

    def ended(self) -> bool:
        """Whether any process has ended."""
        for child in self.children:
            if child not in self.statuses:
                pid, status = os.waitpid(child, os.WNOHANG)
                if pid:
                    self.statuses[child] = os.waitstatus_to_exitcode(status)
        return bool(self.statuses)

    def wait(self) -> list[int]:
        """Exit statuses of all processes."""
        for child in self.children:
            if child not in self.statuses:
                self.statuses[child] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return [self.statuses[child] for child in self.children]

    def kill(self, first: int) -> list[int]:
        """Kill one process and, a moment later, the others."""
        for child in [self.children[first], *self.children]:
            if child not in self.statuses:
                os.kill(child, signal.SIGKILL)
            if child == self.children[first] and len(self.children) > 1:
                time.sleep(random.choice((0.0, 0.3)))
            self.ended()
        return self.wait()

    def until(self, condition: Callable[[], bool]) -> bool:
        """Wait for a condition; False if a process ends before it holds."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            if self.ended():
                return False
            if time.monotonic() > deadline:
                self.kill(0)
                raise SystemExit(f"the run has hung: nothing happened for {PATIENCE_S:.0f} s")
            time.sleep(0.01)
        return True


def _fork(argv: list[str], mesh: dict[str, str], log: Path) -> int:
    def prepare() -> None:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.update(mesh)

    return train_in_child(argv, prepare)


def server_command(folder: Path) -> str:
    """The command that samples ahead on a server of a process of its own, which ends with this one."""
    reader, writer = os.pipe()
    parent = os.getpid()
    if os.fork() == 0:
        try:
            with ExitStack() as stack:
                runs = Runs(stack, folder, np.random.default_rng(0))
                (server,) = runs.add_servers("vllm", 1)
                os.write(writer, server.url.encode())
                os.close(writer)
                while os.getppid() == parent:
                    time.sleep(0.5)
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as told:
        url = told.read()
    if not url:
        raise SystemExit("the rollout server does not start")
    # Nothing but what the command is made of: the rest is the server's, in its process.
    folder_and_server = SimpleNamespace(folder=folder, servers=[SimpleNamespace(url=url, kind="vllm")])
    return Runs.command(
        folder_and_server, f"{SAVES} --eval-interval 10 --eval-iters 3 --eval-prompt-data {folder / 'prompts.jsonl'}"
    )


def kill_at(run: Run, folder: Path, moment: str, start_s: float, step_s: float, save_s: float) -> None:
    """Wait for a random one of such moments."""
    delays = {"starting": start_s, "stepping": 2 * step_s, "saving": save_s}
    if moment == "stepping":
        before = saved_iteration(folder)
        run.until(lambda: saved_iteration(folder) > before)
    elif moment == "saving":
        run.until(lambda: any(folder.glob("iter_*.tmp")))
    deadline = time.monotonic() + random.uniform(0, delays[moment])
    run.until(lambda: time.monotonic() > deadline)


def rows_written(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def saved_iteration(folder: Path) -> int:
    """The step of the checkpoint that counts, 0 if there is none yet; an error if the folder holds half of one."""
    for path in folder.glob("iter_*"):
        # One that is being deleted has lost its name by the time that its metadata are looked for.
        if path.suffix != ".tmp" and not (path / "metadata.json").is_file() and path.is_dir():
            raise SystemExit(f"{path} is no complete checkpoint")
    checkpoint = find_checkpoint(folder)
    return int(checkpoint.name.removeprefix("iter_")) if checkpoint is not None else 0


def unbroken_run(argv: list[str], processes: int, folder: Path, log: Path) -> tuple[float, float, float]:
    """Run to the end; seconds until the first step, for a step with its save, and for a save."""
    began = time.monotonic()
    run = Run([*argv, "--save", str(folder)], processes, log)
    run.until(lambda: rows_written(folder) > 1)
    started = time.monotonic()
    if any(run.wait()):
        raise SystemExit(f"the unbroken run failed; see {log}")
    step_s = (time.monotonic() - started) / (rows_written(folder) - 1)
    return started - began, step_s, step_s


def kill_repeatedly(argv: list[str], train_iters: int, processes: int, kills: int, folder: Path) -> bool:
    """The whole experiment with one command; prints and returns its outcome."""
    argv = [*argv, "--train-iters", str(train_iters)]
    straight, killed, log = folder / "unbroken", folder / "killed", folder / "output.txt"
    times = unbroken_run(argv, processes, straight, log)
    print(f"    start {times[0]:.2f} s, step and save {times[1]:.3f} s", flush=True)
    killed.mkdir()
    counts, latest, ended, began = dict.fromkeys(MOMENTS, 0), 0, 0, time.monotonic()
    while sum(counts.values()) < kills:
        moment = random.choice(MOMENTS)
        run = Run([*argv, "--save", str(killed)], processes, log)
        kill_at(run, killed, moment, *times)
        statuses = run.kill(random.randrange(processes))
        was_killed = -signal.SIGKILL in statuses
        if not was_killed and any(statuses):
            raise SystemExit(f"a start after {counts} failed with {statuses}; see {log}")
        if not was_killed or saved_iteration(killed) == train_iters:
            # It had come to its end. Behind the last checkpoint only a picture is drawn, which no later start draws.
            ended += 1
            if ended > 100:
                break
            shutil.rmtree(killed)
            killed.mkdir()
            latest = 0
            continue
        counts[moment] += 1
        iteration = saved_iteration(killed)
        if iteration < latest:
            raise SystemExit(f"the checkpoint of step {latest} is lost: that of {iteration} counts")
        latest = iteration
    if any(Run([*argv, "--save", str(killed)], processes, log).wait()):
        raise SystemExit(f"the last start failed; see {log}")
    same = rows_without_timing(killed) == rows_without_timing(straight)
    left = {path.relative_to(killed) for path in killed.rglob("*")} ^ {
        path.relative_to(straight) for path in straight.rglob("*")
    }
    number = sum(counts.values())
    print(
        f"    {number} kills {counts} in {time.monotonic() - began:.0f} s, the last at checkpoint {latest}", flush=True
    )
    print("    metrics " + ("bit for bit the same" if same else "DIFFERENT"), flush=True)
    if left:
        print(f"    files DIFFERENT: {sorted(map(str, left))[:10]}", flush=True)
    if number < kills:
        print(f"    the run ended before {kills} kills again and again; give more --train-iters", flush=True)
    return same and not left and number == kills


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", nargs="+", choices=RUNS)
    parser.add_argument("--kills", type=int)
    parser.add_argument("--processes", type=int, nargs="+")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--train-iters", type=int)
    parser.add_argument("--folder", type=Path)
    options, flags = parser.parse_known_args()
    random.seed(options.seed)
    good = 0
    for name in options.runs:
        for processes in options.processes:
            print(f"{name}, {processes} process{'es' if processes > 1 else ''}", flush=True)
            folder = options.folder / f"{name}-{processes}"
            folder.mkdir(parents=True)
            more = RUNS[name]
            command = server_command(folder) if more is None else f"{COMMAND} {more}"
            good += kill_repeatedly([*command.split(), *flags], options.train_iters, processes, options.kills, folder)
    begun = len(options.runs) * len(options.processes)
    print(f"{begun * options.kills} kills of {begun} runs, {good} of which ended as if unbroken", flush=True)
    return 0 if good == begun else 1


if __name__ == "__main__":
    sys.exit(main())
