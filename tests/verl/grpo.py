"""Starts verl's trainer for reinforcement learning on CPUs, with arithmetic prompts and the stand-in rollout."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO, Any

import pandas

NUM_PROMPTS, SAMPLES, STEPS = 4, 4, 3
PROMPTS_PER_STEP = 2
TIMEOUT = 600  # seconds
RAY_ATTEMPTS = 6
_RAY = "ray_kwargs.ray_init"
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "RAY_DEDUP_LOGS": "0",
    # Only ray.init makes the token that Ray would ask for.
    "RAY_AUTH_MODE": "disabled",
    "PYTHONUNBUFFERED": "1",
    # Processes start slowly on a busy machine.
    "RAY_raylet_start_wait_time_s": "45",
    "RAY_agent_register_timeout_ms": "300000",
}


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """A reward that an untrained model's samples differ in: the share of letters."""
    return sum(character.isalpha() for character in solution_str) / max(1, len(solution_str))


def write_prompts(path: Path) -> None:
    """Write the prompts in the form of verl's data sets."""
    rows = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"what is {i} + {i + 3}"}],
            "reward_model": {"style": "rule", "ground_truth": str(2 * i + 3)},
            "extra_info": {"index": i},
        }
        for i in range(NUM_PROMPTS)
    ]
    pandas.DataFrame(rows).to_parquet(path)


def settings(model: Path, folder: Path, num_ranks: int) -> dict[str, Any]:
    """The overrides on verl's command line, by name."""
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    return {
        "model_engine": "megatron_dta",
        "algorithm.adv_estimator": "grpo",
        "data.train_files": folder / "prompts.parquet",
        "data.val_files": folder / "prompts.parquet",
        "data.train_batch_size": PROMPTS_PER_STEP,
        "data.max_prompt_length": 64,
        "data.max_response_length": 16,
        "data.dataloader_num_workers": 0,
        "actor_rollout_ref.model.path": model,
        f"{actor}.ppo_mini_batch_size": PROMPTS_PER_STEP,
        f"{actor}.use_kl_loss": True,
        f"{actor}.optim.lr": 1e-3,
        f"{actor}.megatron_dta.dtype": "float32",
        f"{rollout}.name": "transformers",
        f"{rollout}.n": SAMPLES,
        f"{rollout}.temperature": 0.8,
        f"{rollout}.tensor_model_parallel_size": 1,
        f"{rollout}.agent.num_workers": 1,
        f"+{rollout}.custom.record": folder / "received",
        "reward.num_workers": 1,
        "reward.custom_reward_function.path": __file__,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
        "trainer.device": "cpu",
        "trainer.n_gpus_per_node": num_ranks,
        "trainer.logger": "[console,file]",
        "trainer.val_before_train": False,
        "trainer.total_training_steps": STEPS,
        "trainer.default_local_dir": folder / "checkpoints",
    }


def run_trainer(model: Path, folder: Path, num_ranks: int, changes: dict[str, Any]) -> list[dict[str, Any]]:
    """Run ``verl.trainer.main_ppo`` and return the metrics of its steps."""
    (folder / "received").mkdir(parents=True, exist_ok=True)
    write_prompts(folder / "prompts.parquet")
    log = folder / "metrics.jsonl"
    log.unlink(missing_ok=True)
    chosen = settings(model, folder, num_ranks) | changes
    environment = os.environ | _ENVIRONMENT
    environment["VERL_FILE_LOGGER_PATH"] = str(log)
    with (folder / "output.txt").open("w") as output, _ray(num_ranks, environment, output) as address:
        chosen[f"+{_RAY}.address"] = address
        command = [sys.executable, "-m", "verl.trainer.main_ppo", f"hydra.run.dir={folder / 'hydra'}"]
        command += [f"{name}={value}" for name, value in chosen.items()]
        with _process(command, environment, output, folder) as process:
            code = process.wait(TIMEOUT)
    assert code == 0, (folder / "output.txt").read_text()[-12000:]
    return [json.loads(line)["data"] for line in log.read_text().splitlines()]


@contextmanager
def _ray(num_ranks: int, environment: dict[str, str], output: IO[str]) -> Iterator[str]:
    """A Ray cluster of this machine; yields its address.

    Ray gives up if one of its helpers is not ready within 15 seconds, which no setting changes and a busy machine does
    not always reach (https://github.com/ray-project/ray/issues/65983). Therefore it is started here, in several
    attempts, and not by ``ray.init``.
    """
    ray = [sys.executable, "-m", "ray.scripts.scripts"]
    options = ["--node-ip-address=127.0.0.1", "--include-dashboard=false", "--object-store-memory=200000000"]
    options += [f"--num-cpus={4 + 4 * num_ranks}", f"--num-gpus={num_ranks}", "--disable-usage-stats"]
    for _ in range(RAY_ATTEMPTS):
        with closing(socket.socket()) as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        with _process([*ray, "start", "--head", "--block", f"--port={port}", *options], environment, output) as process:
            while process.poll() is None:
                if "Ray runtime started" in Path(output.name).read_text():
                    yield f"127.0.0.1:{port}"
                    return
                time.sleep(0.5)
    raise AssertionError(f"Ray did not start in {RAY_ATTEMPTS} attempts: {Path(output.name).read_text()[-4000:]}")


@contextmanager
def _process(
    command: list[str], environment: dict[str, str], output: IO[str], folder: Path | None = None
) -> Iterator[subprocess.Popen]:
    """A program that ends with the context, with the processes that it started."""
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
