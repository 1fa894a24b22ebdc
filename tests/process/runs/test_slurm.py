"""The job scripts on a real Slurm of two nodes: a job that is ended in any way restarts and continues bit for bit.

The jobs of all tests run at the same time, so that their waiting overlaps. Where Slurm is not installed (Debian:
slurm-wlm and munge) only what needs none is tested.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_dta.training.monitor.metrics import TIMING, read_metrics
from slurm_cases import ROOT, needs_slurm, submit
from slurm_cluster import NODES, SlurmCluster, missing_programs

STEPS = 14
MODEL = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --max-position-embeddings 32 "
    "--tokenizer-type HuggingFaceTokenizer --rollout-batch-size 2 --n-samples-per-prompt 3 "
    f"--rollout-max-response-len 4 --train-iters {STEPS} --save-interval 2 --lr 1e-3 "
    "--distributed-timeout-minutes 0.5"
)
# A step lasts long enough to be interrupted.
REWARD = """import os
import time

# The first start of this job lasts longer than its time limit.
SLOW = os.environ.get("SLURM_JOB_NAME") == "limited" and not int(os.environ.get("SLURM_RESTART_COUNT") or 0)


def reward(prompt, response, token_ids):
    time.sleep(2 if SLOW else 0.4)
    return float(len(set(token_ids)))
"""

pytestmark = pytest.mark.filterwarnings("ignore")


class Jobs:
    """Jobs on a cluster, each with its own folder."""

    def __init__(self, cluster: SlurmCluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        (folder / "reward.py").write_text(REWARD)
        (folder / "site.sh").write_text(f"DTA_PYTHON={sys.executable}\nDTA_PROCESSES_PER_NODE=1\nDTA_MAX_RESTARTS=2\n")
        prompts = [{"prompt": f"{i} + {i} =", "answer": str(2 * i)} for i in range(6)]
        (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
        self.tokenizer = _write_tokenizer(folder / "tokenizer.json")

    def train(self, name: str, *options: str, flags: str = "") -> str:
        """Submit a training job; returns its number."""
        arguments = f"{MODEL} --tokenizer-model {self.tokenizer} --prompt-data {self.folder}/prompts.jsonl {flags}"
        arguments += f" --reward-function {self.folder}/reward.py:reward --save {self.folder}/{name}"
        done = submit(
            "--env",
            str(self.folder / "site.sh"),
            "train",
            "--nodes=2",
            f"--job-name={name}",
            *options,
            "--",
            *arguments.split(),
            environment={**self.cluster.environment, "DTA_LOG_DIR": str(self.folder / "logs")},
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.split()[-1]

    def rows(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / name / "metrics.jsonl"
        if not path.exists():
            return []
        return [{key: value for key, value in row.items() if key != TIMING} for row in read_metrics(path)]

    def log(self, name: str, job: str) -> str:
        return (self.folder / "logs" / f"{name}-{job}.log").read_text()

    def wait_for_rows(self, name: str, count: int, seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while len(self.rows(name)) < count:
            assert time.monotonic() < deadline, f"{name} has only {len(self.rows(name))} steps"
            time.sleep(0.2)


def _write_tokenizer(path: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers

    characters = "0123456789+= "
    vocabulary = {character: index for index, character in enumerate(characters)} | {"</s>": len(characters)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(path))
    return path


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> tuple[Jobs, dict[str, str]]:
    """Jobs that were interrupted in every way, all at their ends; and their numbers."""
    if missing_programs():
        pytest.skip("Slurm is not installed")
    folder = tmp_path_factory.mktemp("slurm")
    cluster = SlurmCluster(folder / "cluster")
    try:
        cluster.start()
        jobs = Jobs(cluster, folder)
        numbers = {
            "unbroken": jobs.train("unbroken"),
            # Saved by the signal alone.
            "cancelled": jobs.train("cancelled", flags="--save-interval 100"),
            # Slurm may send the signal up to a minute earlier.
            "limited": jobs.train("limited", "--time=2", "--signal=B:TERM@15"),
            "wrong": jobs.train("wrong", flags="--adam-beta2 1"),
        }
        jobs.wait_for_rows("cancelled", 4)
        cluster.run("scancel", "--batch", "--signal=TERM", numbers["cancelled"])
        for name in ("cancelled", "unbroken", "wrong", "limited"):
            cluster.wait_for_job(numbers[name], 240)
        numbers["broken"] = jobs.train("broken")
        jobs.wait_for_rows("broken", 4)
        cluster.kill_node(NODES[1])
        time.sleep(3)
        cluster.start_node(NODES[1])
        cluster.wait_for_job(numbers["broken"], 240)
        yield jobs, numbers
    finally:
        cluster.stop()


@needs_slurm
@pytest.mark.parametrize("name", ["cancelled", "limited", "broken"])
def test_an_interrupted_job_ends_as_an_unbroken_one(ended, name):
    jobs, numbers = ended
    assert len(jobs.rows("unbroken")) == STEPS
    state, restarts = jobs.cluster.state_of(numbers[name])
    assert (state, restarts >= 1) == ("COMPLETED", True), jobs.log(name, numbers[name])
    assert jobs.rows(name) == jobs.rows("unbroken")


@needs_slurm
def test_the_log_says_why_a_job_was_put_into_the_queue_again(ended):
    jobs, numbers = ended
    for name in ("cancelled", "limited"):
        text = jobs.log(name, numbers[name])
        assert "got SIGTERM: the processes save and end" in text
        assert "was warned before its time limit or preemption; put into the queue again" in text
        assert "stopped by SIGTERM after step" in text
        assert f"continuing {jobs.folder}/{name}/iter_" in text
    assert jobs.cluster.state_of(numbers["unbroken"]) == ("COMPLETED", 0)
    assert "finished" in jobs.log("unbroken", numbers["unbroken"])
    for rank in range(2):
        assert (jobs.folder / "logs" / f"unbroken-{numbers['unbroken']}" / f"rank-{rank}.log").exists()


@needs_slurm
def test_wrong_settings_are_not_started_again(ended):
    jobs, numbers = ended
    assert jobs.cluster.state_of(numbers["wrong"]) == ("FAILED", 0)
    text = jobs.log("wrong", numbers["wrong"])
    assert "--adam-beta2 1.0: must be below 1" in text
    assert "ended with wrong input or settings" in text


def test_a_dry_run_shows_the_command_and_does_nothing(tmp_path):
    environment = {**os.environ, "DTA_LOG_DIR": str(tmp_path / "logs"), "PATH": "/usr/bin:/bin"}
    done = submit("--dry-run", "train", "--nodes", "4", "--", "--save", "a folder", environment=environment)
    assert done.returncode == 0
    assert "sbatch --export=ALL" in done.stdout
    assert f"--nodes 4 {ROOT}/slurm/train.sbatch --save a\\ folder" in done.stdout
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tran"], "there is no job 'tran'; the jobs are"),
        (["--nodes", "2", "train"], "--nodes: options for sbatch come after the name of the job"),
        (["--env", "/nowhere/site.sh", "train"], "--env /nowhere/site.sh: there is no such file"),
    ],
)
def test_a_wrong_command_is_refused(arguments, message):
    done = submit("--dry-run", *arguments)
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_finds_nothing():
    folders = [ROOT / name for name in ("slurm", "examples", "tests")]
    files = sorted(str(path) for folder in folders for path in folder.iterdir() if path.suffix in (".sh", ".sbatch"))
    done = subprocess.run(["shellcheck", "-x", "-P", str(ROOT / "slurm"), *files], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
