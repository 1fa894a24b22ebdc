"""Distillation on several ranks against one process: divided vocabularies, stages, replicas; killed and continued."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("starlette")

from conftest import seed_all
from forked import run_python, run_ranks, start_ranks
from megatron_dta.core.rollouts.load import write_rollouts
from megatron_dta.core.rollouts.record import Rollout

MODEL = "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --vocab-size 13 --max-position-embeddings 64 --swiglu"
KINDS = ("full-vocabulary", "sampled-tokens")
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
    data = f"--rollouts {task}/r.jsonl --global-batch-size 8 --train-iters 2 --lr 1e-3 --old-logprobs recompute"
    model = f"{MODEL} {STYLE}" if "--vocab-size" in more else f"--load-hf {task}/student --seed 3"
    return f"-m megatron_dta.train {model} {data} {teachers} --save {save}".split() + list(more)


def rows(save: Path) -> list[dict]:
    return [json.loads(line) for line in (save / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def alone(task: Path) -> dict[str, list[dict]]:
    """The metrics of one process, by the kind of divergence."""
    for kind in KINDS:
        done = run_python(command(task, kind, task / kind))
        assert done.returncode == 0, done.stderr
    return {kind: rows(task / kind) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_meshes_agree(kind: str, task: Path, alone: dict[str, list[dict]], tmp_path: Path) -> None:
    expected = alone[kind]
    assert len(expected) == 2
    assert all(np.isfinite(row["teacher_kl"]) and row["teacher_kl"] != 0 for row in expected)
    meshes = {"data": []}
    if kind == "full-vocabulary":
        meshes = {
            "tensor": ["--tensor-model-parallel-size", "2", "--sequence-parallel"],
            "pipeline": ["--pipeline-model-parallel-size", "2", "--offload-reference"],
            "context": ["--context-parallel-size", "2"],
        }
    for name, flags in meshes.items():
        for rank in run_ranks(command(task, kind, tmp_path / name, *flags), 2):
            assert rank.returncode == 0, rank.stderr
        for row, wanted in zip(rows(tmp_path / name), expected, strict=True):
            for metric in ("loss", "grad_norm", "teacher_kl"):
                assert row[metric] == pytest.approx(wanted[metric], rel=1e-4, abs=1e-6), (name, metric)


def test_a_teacher_alone(task: Path, tmp_path: Path) -> None:
    """Without rewards the divergence falls; an unknown name is refused in a line."""
    done = run_python(
        command(task, "full-vocabulary", tmp_path / "alone", "--teacher-only", "--lr", "3e-3", "--train-iters", "4")
    )
    assert done.returncode == 0, done.stderr
    divergences = [row["teacher_kl"] for row in rows(tmp_path / "alone")]
    assert divergences[-1] < divergences[0]
    arguments = command(task, "full-vocabulary", tmp_path / "refused", "--train-iters", "1")
    start = arguments.index("--teacher-load-hf")
    refused = run_python([*arguments[:start], "--teacher-load-hf", f"c={task}/a", *arguments[start + 3 :]])
    assert refused.returncode == 2, refused.stderr
    assert "is not one of --teacher-load-hf: c" in refused.stderr


def test_a_teacher_with_a_mesh_of_its_own(
    task: Path, alone: dict[str, list[dict]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Served by two ranks, tensor-parallel or in stages, to a run of one process: as if it were in the run."""
    monkeypatch.setenv("MEGATRON_DTA_TEACHER_KEY", "a key of enough characters")
    for mesh in (["--tensor-model-parallel-size", "2", "--sequence-parallel"], ["--pipeline-model-parallel-size", "2"]):
        with served_teacher([f"--load-hf={task}/a", *mesh]) as url:
            arguments = command(task, "full-vocabulary", tmp_path / mesh[0])
            arguments[arguments.index(f"a={task}/a")] = f"a={url}"
            done = run_python(arguments)
            assert done.returncode == 0, done.stderr
            for row, wanted in zip(rows(tmp_path / mesh[0]), alone["full-vocabulary"], strict=True):
                for metric in ("loss", "grad_norm", "teacher_kl"):
                    assert row[metric] == pytest.approx(wanted[metric], rel=1e-5, abs=1e-6), metric


@contextmanager
def served_teacher(flags: list[str]) -> Iterator[str]:
    """Two ranks of ``megatron-dta teacher``; yields its address."""
    ranks = start_ranks(["-m", "megatron_dta", "teacher", *flags, "--port", "0"], 2)
    ranks[0].wait_until(lambda: "teacher: http" in ranks[0].stdout())
    try:
        yield ranks[0].stdout().split("teacher: ")[1].split(",")[0]
    finally:
        for rank in ranks:
            os.kill(rank.pid, signal.SIGTERM)
        assert [rank.wait(60).returncode for rank in ranks] == [0, 0]
