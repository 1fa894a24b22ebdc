"""Starts verl's trainer for reinforcement learning on CPUs, with arithmetic prompts and the stand-in rollout."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas

NUM_PROMPTS, SAMPLES, STEPS = 4, 4, 3
PROMPTS_PER_STEP = 2
TIMEOUT = 600  # seconds
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    # On a busy machine Ray starts slowly; workers that wait for work make it slower.
    "RAY_raylet_start_wait_time_s": "300",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_DEDUP_LOGS": "0",
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
    actor, rollout, ray = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "ray_kwargs.ray_init"
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
        f"{ray}.num_cpus": 4 + 4 * num_ranks,
        f"+{ray}.num_gpus": num_ranks,
        f"+{ray}.include_dashboard": False,
        f"+{ray}.object_store_memory": 200_000_000,
    }


def run_trainer(model: Path, folder: Path, num_ranks: int, changes: dict[str, Any]) -> list[dict[str, Any]]:
    """Run ``verl.trainer.main_ppo`` and return the metrics of its steps."""
    (folder / "received").mkdir(parents=True, exist_ok=True)
    write_prompts(folder / "prompts.parquet")
    log = folder / "metrics.jsonl"
    log.unlink(missing_ok=True)
    chosen = settings(model, folder, num_ranks) | changes
    command = [sys.executable, "-m", "verl.trainer.main_ppo", f"hydra.run.dir={folder / 'hydra'}"]
    environment = os.environ | _ENVIRONMENT | {"VERL_FILE_LOGGER_PATH": str(log)}
    environment.pop("RAY_ADDRESS", None)
    with (folder / "output.txt").open("w") as output:
        process = subprocess.Popen(
            [*command, *(f"{name}={value}" for name, value in chosen.items())],
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(TIMEOUT)
        finally:
            # Ray's processes end with the one that started them.
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    assert code == 0, (folder / "output.txt").read_text()[-12000:]
    return [json.loads(line)["data"] for line in log.read_text().splitlines()]
