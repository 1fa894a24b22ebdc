"""Distillation on several ranks against one process: divided vocabularies, stages, replicas; killed and continued."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from conftest import seed_all
from forked import run_python, run_ranks
from megatron_dta.rollouts import Rollout, write_rollouts

MODEL = "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --vocab-size 13 --max-position-embeddings 64 --swiglu"
STYLE = "--disable-bias-linear --qk-layernorm --rotary-base 100 --seed 3"


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rollouts with two teachers' names, and the teachers: models of other sizes after a step of training."""
    folder, rng = tmp_path_factory.mktemp("distillation"), seed_all(4)
    rollouts = []
    for group in range(4):
        prompt = rng.integers(13, size=5)
        for number in range(4):
            tokens = np.concatenate([prompt, rng.integers(3, size=rng.integers(2, 12))])
            mask = np.arange(len(tokens)) >= 5
            reward, teacher = float(number % 2), "ab"[group % 2]
            rollouts.append(Rollout(tokens, mask, reward, group_id=f"g{group}", teacher=teacher))
    write_rollouts(folder / "r.jsonl", rollouts)
    for name, layers, width, seed in (("a", 4, 24, 11), ("b", 2, 24, 12), ("student", 2, 16, 13)):
        shape = (
            f"--num-layers {layers} --hidden-size {width} --num-attention-heads 2 --seed {seed} --init-method-std 0.2"
        )
        command = f"-m megatron_dta.train {MODEL} {STYLE} {shape} --objective sft --rollouts {folder}/r.jsonl"
        done = run_python(f"{command} --global-batch-size 8 --train-iters 1 --save-hf {folder}/{name}".split())
        assert done.returncode == 0, done.stderr
    return folder


def command(task: Path, kind: str, save: Path, *more: str) -> list[str]:
    teachers = f"--teacher-load-hf a={task}/a b={task}/b --teacher-kl {kind} --teacher-coef 0.5"
    data = f"--rollouts {task}/r.jsonl --global-batch-size 8 --train-iters 4 --lr 1e-3 --old-logprobs recompute"
    model = f"{MODEL} {STYLE}" if "--vocab-size" in more else f"--load-hf {task}/student --seed 3"
    return f"-m megatron_dta.train {model} {data} {teachers} --save {save}".split() + list(more)


def rows(save: Path) -> list[dict]:
    return [json.loads(line) for line in (save / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("kind", ["full-vocabulary", "sampled-tokens"])
def test_meshes_agree(kind: str, task: Path, tmp_path: Path) -> None:
    done = run_python(command(task, kind, tmp_path / "one"))
    assert done.returncode == 0, done.stderr
    expected = rows(tmp_path / "one")
    assert len(expected) == 4
    assert all(np.isfinite(row["teacher_kl"]) and row["teacher_kl"] != 0 for row in expected)
    meshes = {"data": []}
    if kind == "full-vocabulary":
        meshes |= {
            "tensor": ["--tensor-model-parallel-size", "2", "--sequence-parallel"],
            "pipeline": ["--pipeline-model-parallel-size", "2", "--offload-teacher"],
            "context": ["--context-parallel-size", "2"],
        }
    for name, flags in meshes.items():
        for rank in run_ranks(command(task, kind, tmp_path / name, *flags), 2):
            assert rank.returncode == 0, rank.stderr
        for row, wanted in zip(rows(tmp_path / name), expected, strict=True):
            for metric in ("loss", "grad_norm", "teacher_kl"):
                assert row[metric] == pytest.approx(wanted[metric], rel=1e-4, abs=1e-6), (name, metric)


def test_a_teacher_alone_and_refusals(task: Path, tmp_path: Path) -> None:
    """Without rewards the divergence falls; unknown names and other vocabularies are refused in a line."""
    done = run_python(command(task, "full-vocabulary", tmp_path / "alone", "--teacher-only", "--lr", "3e-3"))
    assert done.returncode == 0, done.stderr
    found = [row["teacher_kl"] for row in rows(tmp_path / "alone")]
    assert found[-1] < found[0]
    for changes, says in (
        (["--teacher-load-hf", f"c={task}/a", "--train-iters", "1"], "is not one of --teacher-load-hf: c"),
        (["--teacher-load-hf", f"a={task}/b"], "give NAME=FOLDER, each name once"),
        (["--vocab-size", "14"], "has a vocabulary of 13 and the policy of 14"),
        (["--objective", "sft"], "--teacher-load-hf needs a policy gradient"),
    ):
        arguments = command(task, "full-vocabulary", tmp_path / "refused", *changes)
        if "c=" in changes[1]:
            start = arguments.index("--teacher-load-hf")
            del arguments[start : start + 3]
        refused = run_python(arguments)
        assert refused.returncode == 2, refused.stderr
        assert says in refused.stderr


def test_a_dry_run_tells_the_teachers(task: Path, tmp_path: Path) -> None:
    done = run_python(command(task, "full-vocabulary", tmp_path / "dry", "--dry-run"))
    assert done.returncode == 0, done.stderr
    assert "teacher      a: " in done.stdout
    assert "teacher      b: " in done.stdout
