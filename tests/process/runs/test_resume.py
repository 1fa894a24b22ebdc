"""Training killed at any moment and restarted by the same command has the metrics and weights of an unbroken run."""

import json
from pathlib import Path

import numpy as np
import pytest

from conftest import REPOSITORY, assert_equal_tensors, seed_all
from forked import run_python
from megatron_dta.core.rollouts.load import write_rollouts
from megatron_dta.core.rollouts.record import Rollout
from resume_cases import final_tensors, prompts_and_reward, rows_without_timing

MODEL = (
    "--num-layers 1 --hidden-size 24 --num-attention-heads 3 --swiglu --disable-bias-linear "
    "--max-position-embeddings 32 --tree-segment-tokens 16 --lr 3e-3 --lr-decay-style cosine --train-iters 8"
)
# Two steps a collection, and checkpoints after every third: some hold a step that is prepared but not trained.
SAMPLED = (
    "--tokenizer-type CharacterTokenizer --rollout-max-response-len 5 --rollout-batch-size 4 "
    "--n-samples-per-prompt 3 --num-steps-per-rollout 2 --old-logprobs recompute --kl-loss-coef 0.1 "
    "--entropy-coef 0.01 --eval-interval 4 --eval-iters 2 --save-interval 3"
)
# The last one of "sampled" finds the checkpoint of the run that ended by SIGTERM, between two of the others.
KILLS = {
    "sampled": ["row:3", "half:1", "renamed:1", "saved:1", "term:3", "step:1"],
    "stored": ["saved:2", "loading:1", "step:2"],
}
STORED = "--objective sft --global-batch-size 5 --vocab-size 17 --save-interval 2 --eval-interval 4 --bf16"


def stored_rollouts(path: Path, rng: np.random.Generator, count: int) -> str:
    rollouts = []
    for number in range(count):
        length = int(rng.integers(3, 12))
        mask = np.arange(length) >= rng.integers(1, length)
        tokens = rng.integers(0, 3, length).astype(np.int32)
        rollouts.append(Rollout(tokens, mask, trajectory_id=str(number)))
    write_rollouts(path, rollouts)
    return str(path)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[int]]]:
    """All runs, by one worker: for each of two commands an unbroken run and a run with kills; then their statuses."""
    rng = seed_all(20251120)
    folder = tmp_path_factory.mktemp("runs")
    files = stored_rollouts(folder / "train.jsonl", rng, 23), stored_rollouts(folder / "held_out.parquet", rng, 7)
    commands = {
        "sampled": f"{MODEL} {SAMPLED} {prompts_and_reward(folder, rng)}",
        "stored": f"{MODEL} {STORED} --rollouts {files[0]} --eval-rollouts {files[1]}",
    }
    scenarios = {}
    for name, command in commands.items():
        for kind in ("straight", "killed"):
            argv = [*command.split(), "--save", str(folder / f"{name}-{kind}")]
            scenarios[f"{name}-{kind}"] = {"argv": argv, "kills": KILLS[name] if kind == "killed" else []}
    (folder / "scenarios.json").write_text(json.dumps(list(scenarios.values())))
    worker = REPOSITORY / "tests" / "helpers" / "resume_worker.py"
    done = run_python([worker, folder / "scenarios.json"])
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    statuses = json.loads(done.stdout.splitlines()[-1])
    return folder, dict(zip(scenarios, statuses, strict=True))


@pytest.mark.parametrize("name", ["sampled", "stored"])
def test_metrics_and_weights_are_those_of_an_unbroken_run(runs: tuple[Path, dict[str, list[int]]], name: str) -> None:
    folder, statuses = runs
    assert statuses[f"{name}-straight"] == [0]
    assert statuses[f"{name}-killed"] == [0 if kill.startswith("term") else -9 for kill in KILLS[name]] + [0]
    expected, resumed = (rows_without_timing(folder / f"{name}-{kind}") for kind in ("straight", "killed"))
    assert [row["iteration"] for row in expected] == list(range(9))
    assert resumed == expected
    losses = [row["loss"] for row in expected[1:]]
    assert len(set(losses)) > 6, "a run that learns nothing would pass"
    left, right = (final_tensors(folder / f"{name}-{kind}") for kind in ("straight", "killed"))
    assert any(key.startswith("optimizer.state.exp_avg") for key in left)
    assert_equal_tensors(right, left)


def test_nothing_is_left_behind(runs: tuple[Path, dict[str, list[int]]]) -> None:
    folder, _ = runs
    assert not list(folder.rglob("*.tmp"))
