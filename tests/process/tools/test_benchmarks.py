"""Each benchmark runs once at its smallest size and writes its rows, or says what it needs."""

import json
import os
from pathlib import Path

import pytest

from conftest import REPOSITORY
from forked import run_python, run_ranks

SMALL_PIPELINE = "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ettt|tL"
RUNS = {
    "rollout": "decode --batch 3 --requests 5 --samples-per-prompt 2 --prompt-tokens 21 --response-tokens 6 "
    "--max-tokens 16 --runs 1 --memory-bandwidth-gbs 10",
    "rollout das-noise": "das-noise --batch 3 --response-tokens 5 --prompt-tokens 9 --memory-bandwidth-gbs 10",
    "rollout tree-tokens": "tree-tokens --queries 9 --max-length 300 --mean-length 50 --segment-length 64",
    "train": "examples/rollouts.example.jsonl --model tiny --steps 1 --tree-mode dta dense --timeline-dir FOLDER",
    "gateway_sessions": "--sessions 4 --calls 4 --at-once 2",
    "server_requests": "--servers 2 --requests-per-server 3 --response-tokens 40 --seconds 0.01 --responses 6",
    "weight_transfer": "--ways folder --folder FOLDER --repeats 1",
}
ON_TWO_RANKS = {"rollout": SMALL_PIPELINE, "train": "--pipeline-model-parallel-size 2"}
PAPERS = {
    "areal_dta": (),
    "das": ("--tasks", "long tail"),
    "tree_training": ("--seeds", "1"),
    "treepo": ("--jobs", "2", "--parts", "curves", "efficiency", "votes"),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_benchmark_writes_its_rows(name: str, tmp_path: Path) -> None:
    output, flags = tmp_path / "results.json", RUNS[name].replace("FOLDER", str(tmp_path / "folder"))
    command = [f"benchmarks/{name.split()[0]}.py", *flags.split(), "--output", str(output)]
    division = ON_TWO_RANKS.get(name, "").split()
    done = run_ranks([*command, *division], 2) if division else [run_python(command)]
    assert not any(rank.returncode for rank in done), [rank.stderr for rank in done]
    assert json.loads(output.read_text())["rows"]


@pytest.mark.parametrize("name", PAPERS)
def test_the_experiment_of_a_paper_writes_rows_and_tables(name: str, tmp_path: Path) -> None:
    command = [f"benchmarks/papers/{name}.py", "--smallest", "--output-dir", str(tmp_path / "results"), *PAPERS[name]]
    folders = os.pathsep.join(str(REPOSITORY / folder) for folder in ("", "kernels", "benchmarks"))
    done = run_python(command, env=os.environ | {"PYTHONPATH": folders, "DTA_ROLLOUTS": ""})
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "results" / f"{name}.json").read_text())["rows"]
    assert "### " in (tmp_path / "results" / f"{name}.md").read_text()
    assert list((tmp_path / "results").glob("*.png"))


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("layers/attention.py any.npz", "measures a CUDA GPU, and there is none here"),
        ("rollout.py decode --batch 0", "--batch must be at least 1"),
        ("papers/das.py --smallest --output-dir /dev/null/x", "/dev/null/x"),
    ],
)
def test_what_cannot_be_measured_is_refused(command: str, message: str) -> None:
    done = run_python(f"benchmarks/{command}".split())
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
