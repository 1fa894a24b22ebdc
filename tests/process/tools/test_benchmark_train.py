"""The benchmark of a training step: its counts of operations, and that it runs, also on two processes."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from conftest import REPOSITORY, seed_all
from forked import run_python, run_ranks
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.planning.pipeline.timeline import read_timelines, timeline_utilisation
from megatron_dta.core.planning.plan_step import plan_step
from megatron_dta.core.planning.step.flops import StepCounts
from megatron_dta.core.planning.step.passes import StepBudget
from megatron_dta.core.planning.step.sample import TrainingSample
from megatron_dta.core.rollouts.load import write_rollouts
from megatron_dta.core.shapes.decoder import DecoderShape
from trainer_cases import make_rollouts

ROOT = REPOSITORY
TOOL = str(ROOT / "benchmarks" / "train.py")


def run(*arguments: str, processes: int = 1) -> dict:
    done = (
        run_ranks([TOOL, *arguments, "--json"], processes)
        if processes > 1
        else [run_python([TOOL, *arguments, "--json"])]
    )
    assert not any(rank.returncode for rank in done), done
    return json.loads(done[0].stdout.splitlines()[-1])


def test_operations_are_those_of_every_product_written_out():
    generator = seed_all(4)
    trunk = generator.integers(0, 50, 9)
    tails = [generator.integers(0, 50, n) for n in (5, 11, 1)]
    masks = [np.arange(9 + len(tail)) >= 7 for tail in tails]
    samples = [
        TrainingSample(np.append(trunk, tail).astype(np.int32), mask) for tail, mask in zip(tails, masks, strict=True)
    ]
    counts = StepCounts.of(plan_step(samples, "dta", StepBudget(6)))
    tokens = {tuple(sample.token_ids[: i + 1].tolist()) for sample in samples for i in range(len(sample.token_ids))}
    assert counts.tokens == len(tokens)
    assert counts.pairs == sum(len(prefix) for prefix in tokens)
    rows = {tuple(each.token_ids[:i].tolist()) for each in samples for i in np.flatnonzero(each.loss_mask)}
    assert counts.rows == len(rows)
    hidden, ffn, heads, groups, size, vocabulary = 8, 20, 4, 2, 3, 50
    shape, forward = DecoderShape(5, hidden, ffn, heads, groups, size, vocabulary), 0.0
    for prefix in tokens:
        products = [(hidden, heads * size), (hidden, groups * size), (hidden, groups * size), (heads * size, hidden)]
        products += [(hidden, ffn), (hidden, ffn), (ffn, hidden)]
        forward += 5 * (sum(2 * a * b for a, b in products) + 2 * 2 * heads * size * len(prefix))
    forward += counts.rows * 2 * hidden * vocabulary
    assert counts.flops(shape) == pytest.approx(3 * forward)
    routers = 5 * len(tokens) * 2 * hidden * 7
    experts = replace(shape, num_experts=7, moe_layers=(), moe_router_topk=2, moe_ffn_hidden_size=ffn // 2)
    assert counts.flops(experts) == pytest.approx(3 * (forward + routers))


def test_too_little_memory_is_refused_with_what_suffices(tmp_path: Path) -> None:
    write_rollouts(tmp_path / "rollouts.jsonl", make_rollouts(seed_all(3), 6, 4))
    step = [TOOL, str(tmp_path / "rollouts.jsonl"), "--model", "tiny", "--steps", "1", "--tree-mode", "dta"]
    done = run_python([*step, "--tree-memory-gib", "0.001"])
    line = done.stderr.splitlines()[-1]
    assert done.returncode == 2
    assert line.startswith("error: ")
    assert "--tree-memory-gib 0.001 is " in line
    enough = re.search(r"set it to ([0-9.]+) or more", line)[1]
    assert run_python([*step, "--tree-memory-gib", enough]).returncode == 0


@pytest.mark.parametrize("processes", [1, 2])
def test_trees_beside_dense(tmp_path, processes):
    write_rollouts(tmp_path / "rollouts.jsonl", make_rollouts(seed_all(3), 6, 4))
    folder = tmp_path / "timelines"
    mesh = ("--pipeline-model-parallel-size", "2", "--timeline-dir", str(folder)) if processes == 2 else ()
    found = run(str(tmp_path / "rollouts.jsonl"), "--model", "tiny", "--steps", "1", *mesh, processes=processes)
    dense, tree = found["rows"]
    assert (dense["mode"], tree["mode"]) == ("dense", "dta")
    assert dense["unique_tokens"] == dense["tokens"] == tree["tokens"] > tree["unique_tokens"]
    assert tree["bound"] == pytest.approx(dense["tflop"] / tree["tflop"])
    assert tree["share_of_bound"] == pytest.approx(dense["seconds"] / tree["seconds"] / tree["bound"])
    assert found["settings"]["processes"] == processes
    assert min(row["predicted_peak_gib"] for row in found["rows"]) > 0
    if processes == 1:
        return
    for row in found["rows"]:
        events = read_timelines(folder / f"rollouts_{row['mode']}.json")["measured"]
        assert row["measured_utilisation"] == pytest.approx(timeline_utilisation(events, 2))
        # Without what messages and the host take the stages cannot be less busy.
        assert row["measured_utilisation"] <= row["replayed_utilisation"] + 1e-9 <= 1 + 1e-9
        work = sum(row["busy_seconds"]) / row["measured_utilisation"]
        assert work == pytest.approx(2 * row["pipeline_seconds"])
        assert len(row["planned_busy_seconds"]) == len(row["waiting_seconds"]) == 2


def test_experts_on_a_pipeline_in_all_modes(tmp_path):
    """Ranks that share experts run in step: what is planned and replayed is that, empty segments included."""
    write_rollouts(tmp_path / "rollouts.jsonl", make_rollouts(seed_all(3), 6, 4))
    folder = tmp_path / "timelines"
    mesh = ("--pipeline-model-parallel-size", "2", "--expert-model-parallel-size", "2", "--timeline-dir", str(folder))
    arguments = (str(tmp_path / "rollouts.jsonl"), "--model", "tiny-moe", "--moe-grouped-gemm", "--steps", "1", *mesh)
    cuts = ("--tree-segment-tokens", "16", "--pack-tokens", "16", "--tree-mode", "packed", "dta", "dense")
    rows = run(*arguments, *cuts, processes=4)["rows"]
    assert [row["mode"] for row in rows] == ["packed", "dta", "dense"]
    packed, tree, dense = rows
    assert tree["unique_tokens"] < packed["unique_tokens"] < dense["unique_tokens"] == tree["tokens"]
    assert packed["segment_tokens"] == 16
    for row in (packed, tree):
        assert row["speed_up"] == pytest.approx(dense["seconds"] / row["seconds"])
        assert row["bound"] == pytest.approx(dense["tflop"] / row["tflop"])
        assert row["bound"] > 1
    for row in rows:
        planned = read_timelines(folder / f"rollouts_{row['mode']}.json")["planned"]
        assert row["planned_utilisation"] == pytest.approx(timeline_utilisation(planned, 2))
        assert row["measured_utilisation"] <= row["replayed_utilisation"] + 1e-9 <= 1 + 1e-9


def test_several_files_on_one_model(tmp_path):
    paths = [tmp_path / name for name in ("few.jsonl", "more.jsonl")]
    for path, seed, count in zip(paths, (3, 4), (3, 6), strict=True):
        write_rollouts(path, make_rollouts(seed_all(seed), count, 4))
    arguments = (str(paths[0]), str(paths[1]), "--model", "tiny", "--num-layers", "1", "--steps", "1")
    found = run(*arguments, "--max-tokens", "150")["rows"]
    assert [(row["file"], row["mode"]) for row in found] == [
        (path.name, mode) for path in paths for mode in ("dense", "dta")
    ]
    assert all(row["tokens"] <= 150 for row in found)
    for dense, tree in (found[:2], found[2:]):
        assert dense["tokens"] == tree["tokens"]
        assert tree["bound"] == pytest.approx(dense["tflop"] / tree["tflop"])
    for wrong, message in (
        ([*arguments, "--max-tokens", "1"], "--max-tokens 1: the first sequence of"),
        ([str(paths[0]), *arguments], "same name"),
    ):
        done = run_python([TOOL, *wrong])
        assert done.returncode == 2
        assert message in done.stderr.splitlines()[-1]


def test_a_vocabulary_that_is_too_small_is_refused(tmp_path):
    rollouts = make_rollouts(seed_all(3), 2, 2)
    rollouts[0].token_ids[-1] = 200_000
    write_rollouts(tmp_path / "rollouts.jsonl", rollouts)
    command = [TOOL, str(tmp_path / "rollouts.jsonl"), "--num-layers", "1"]
    done = run_python(command)
    assert done.returncode == 2
    assert "has token id 200000, but qwen3-1.7b has 151936" in done.stderr


def test_renumbered_tokens_make_the_same_forest(tmp_path):
    rollouts = make_rollouts(seed_all(5), 4, 4)
    for rollout in rollouts:
        rollout.token_ids[:] = rollout.token_ids * 7 + 190_000
    write_rollouts(tmp_path / "rollouts.jsonl", rollouts)
    arguments = (str(tmp_path / "rollouts.jsonl"), "--model", "tiny", "--num-layers", "1", "--steps", "1")
    plain, renumbered = (run(*arguments, *more)["rows"] for more in ((), ("--renumber-tokens",)))
    for name in ("tokens", "unique_tokens", "segments"):
        assert [row[name] for row in plain] == [row[name] for row in renumbered]
    assert renumbered[0]["tflop"] < plain[0]["tflop"]  # a smaller vocabulary


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num-layers", "0"], "--num-layers must be at least 1"),
        (["--num-layers", "29"], "--num-layers 29: qwen3-1.7b has only 28"),
        (["--tree-segment-tokens", "0"], "--tree-segment-tokens must be at least 1"),
        (["--tree-activation-tokens", "-4"], "--tree-activation-tokens must be at least 0"),
        (["--tensor-model-parallel-size", "0"], "--tensor-model-parallel-size must be at least 1"),
        (["--num-virtual-stages-per-pipeline-rank", "2"], "needs --pipeline-model-parallel-size above 1"),
        (["--tree-memory-gib", "nan"], "--tree-memory-gib must be above 0, not nan"),
        (["--output", "no/such/folder.json"], "--output no/such/folder.json: there is no folder"),
        (["--step", "2"], "--step: unknown flag; did you mean --steps"),
    ],
)
def test_flags_that_cannot_be_followed_are_refused(monkeypatch, flags: list[str], message: str):
    monkeypatch.syspath_prepend(str(Path(TOOL).parent))
    monkeypatch.setattr(sys, "argv", [TOOL, "rollouts.jsonl", *flags])
    import train as benchmark_train

    with pytest.raises(InputError, match=re.escape(message)):
        benchmark_train.parse_arguments()
