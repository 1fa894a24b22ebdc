"""The training loop and its parts, in one process: data order, samples, modes, skipped steps, where a run starts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from conftest import seed_all
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.engine import prepare_batch
from megatron_dta.core.rollouts.load import write_rollouts
from megatron_dta.core.rollouts.record import Rollout
from megatron_dta.training.data.step import rollout_statistics, split_groups
from megatron_dta.training.data.stored import StoredRollouts
from trainer_cases import VOCABULARY, make_rollouts, make_trainer, rows_of, run


@pytest.mark.parametrize("seed", range(5))
def test_stored_rollouts_come_once_an_epoch_in_whole_units(seed: int) -> None:
    rng = seed_all(seed)
    sizes = rng.integers(1, 6, rng.integers(1, 30))
    units = [f"u{unit}" for unit, size in enumerate(sizes) for _ in range(size)]
    rng.shuffle(units)
    rollouts = [Rollout([0, index], [False, True]) for index in range(len(units))]
    batch_size = int(rng.integers(sizes.max(), 12))
    source = StoredRollouts(rollouts, units, batch_size, seed)
    seen: list[int] = []
    orders = []
    step = 0
    while len(orders) < 3:
        batch = [int(rollout.token_ids[1]) for rollout in source.next_batch(step)]
        assert 0 < len(batch) <= batch_size
        for unit in {units[index] for index in batch}:
            assert units.count(unit) == sum(units[index] == unit for index in batch)
        seen += batch
        step += 1
        if len(seen) == len(units):
            assert sorted(seen) == list(range(len(units)))
            orders.append(seen)
            seen = []
    assert len(sizes) < 4 or orders[0] != orders[1] or orders[1] != orders[2]
    again = StoredRollouts(rollouts, units, batch_size, seed)
    for number in rng.permutation(step):
        expected = [int(rollout.token_ids[1]) for rollout in source.next_batch(int(number))]
        assert [int(rollout.token_ids[1]) for rollout in again.next_batch(int(number))] == expected


def test_a_group_larger_than_the_step_is_refused(tmp_path: Path) -> None:
    write_rollouts(tmp_path / "r.jsonl", make_rollouts(seed_all(1), 2, 5))
    with pytest.raises(InputError, match=r"group g0 has 5 rollouts .* --global-batch-size is 4; raise it"):
        make_trainer(f"--rollouts {tmp_path}/r.jsonl --global-batch-size 4")


def test_groups_of_different_files_stay_apart(tmp_path: Path) -> None:
    rng = seed_all(2)
    for name in "ab":
        write_rollouts(tmp_path / f"{name}.jsonl", make_rollouts(rng, 1, 3))
    arguments = f"--rollouts {tmp_path}/a.jsonl {tmp_path}/b.jsonl --global-batch-size 3"
    trainer, _ = make_trainer(arguments)
    for step in range(4):
        assert len({rollout.group_id for rollout in trainer.source.next_batch(step)}) == 1


@pytest.mark.parametrize("seed", range(3))
def test_steps_get_whole_groups(seed: int) -> None:
    rng = seed_all(seed)
    names = [str(name) for name in rng.integers(0, 9, 40)]
    rollouts = [Rollout([0, 1], [False, True], group_id=name) for name in names]
    num_steps = int(rng.integers(1, len(set(names)) + 1))
    steps, told = split_groups(rollouts, num_steps)
    # All rollouts are the same: each step computes its two tokens again.
    assert told == ({"separated_tokens": 2.0 * (num_steps - 1)} if num_steps > 1 else {})
    assert len(steps) == num_steps
    assert sorted(index for step in steps for index in step) == list(range(40))
    for left in range(num_steps):
        for right in range(left):
            assert not {names[i] for i in steps[left]} & {names[i] for i in steps[right]}
    counts = [len({names[i] for i in step}) for step in steps]
    assert max(counts) - min(counts) <= 1
    with pytest.raises(InputError, match="--num-steps-per-rollout 10"):
        split_groups(rollouts, 10)


def test_a_trajectory_counts_its_reward_once() -> None:
    def rollout(reward: float | None, trajectory: str | None) -> Rollout:
        return Rollout([1, 2, 3], [False, True, True], reward=reward, trajectory_id=trajectory)

    turns = [rollout(1.0, "a")] * 3 + [rollout(0.0, "b"), rollout(0.0, None), rollout(None, None)]
    expected = {"rollouts": 6.0, "reward": 1 / 3, "uniform_groups": 0.0, "response_tokens": 2.0, "decoded_tokens": 12.0}
    assert rollout_statistics(turns) == expected
    assert rollout_statistics(turns[:3])["uniform_groups"] == 1
    others = [replace(r, group_id="other", reward=0.5) for r in turns]
    assert rollout_statistics(turns + others)["uniform_groups"] == 0.5
    assert "reward" not in rollout_statistics(turns[-1:])


def test_old_logprobs_are_those_before_the_first_step(tmp_path: Path) -> None:
    rollouts = make_rollouts(seed_all(3), 4, 2, logprobs=False)
    write_rollouts(tmp_path / "r.parquet", rollouts)
    arguments = f"--rollouts {tmp_path}/r.parquet --global-batch-size 4"
    with pytest.raises(InputError, match=r"row 1: field .logprobs.: missing.*--old-logprobs recompute"):
        make_trainer(arguments)
    trainer, _ = make_trainer(f"{arguments} --old-logprobs recompute")
    (step,) = trainer.preparation.prepare(rollouts)
    assert all(sample.old_logprobs is None for sample in step.samples)
    trainer.preparation.num_steps = 2
    samples = [sample for step in trainer.preparation.prepare(rollouts) for sample in step.samples]
    expected = trainer.engine.compute_logprobs(prepare_batch(samples, trainer.config.tree))
    for sample, logprobs in zip(samples, expected, strict=True):
        np.testing.assert_allclose(sample.old_logprobs, logprobs, rtol=1e-5, atol=1e-6)
        assert (logprobs[sample.loss_mask] < 0).all()
        assert (sample.old_logprobs[~sample.loss_mask] == 0).all()


def test_tree_modes_and_order_train_alike(tmp_path: Path) -> None:
    """Three optimizer steps: loss, gradient norm and every metric agree for all forests and segment sizes."""
    rollouts = make_rollouts(seed_all(4), 3, 4)
    write_rollouts(tmp_path / "r.jsonl", rollouts)
    write_rollouts(tmp_path / "reversed.jsonl", rollouts[::-1])
    common = "--global-batch-size 12 --train-iters 3 --kl-loss-coef 0.1 --entropy-coef 0.01 --metrics-file"
    modes = {
        "dense": "--tree-mode dense",
        "packed": "--tree-mode packed --tree-segment-tokens 32",
        "dta": "--tree-mode dta --tree-segment-tokens 5",
        "recompute": "--tree-mode dta --tree-segment-tokens 7 --tree-activation-tokens 0",
    }
    records = {}
    for name, mode in modes.items():
        file = "reversed" if name == "recompute" else "r"
        run(f"--rollouts {tmp_path}/{file}.jsonl {common} {tmp_path}/{name}.jsonl {mode}")
        records[name] = rows_of(tmp_path / f"{name}.jsonl")
        assert len(records[name]) == 3
    for name in ("packed", "dta", "recompute"):
        for row, expected in zip(records[name], records["dense"], strict=True):
            for key in ("loss", "reward", "grad_norm", "entropy", "ratio", "clip_fraction", "approx_kl", "ref_kl"):
                assert row[key] == pytest.approx(expected[key], rel=2e-4, abs=1e-6), (name, key)
    assert records["dense"][0]["token_reuse"] == 1
    assert records["dta"][0]["token_reuse"] > 1.1
    # Leaves whose backward follows their forward are not computed again.
    assert 0 < records["recompute"][0]["recomputed_tokens"] < records["recompute"][0]["unique_tokens"]
    assert records["dta"][0]["recomputed_tokens"] == 0


def test_a_step_that_is_not_finite_is_skipped_and_reported(tmp_path: Path) -> None:
    rng = seed_all(5)
    advantages = {"poison": np.float32(3e38), "fine": np.float32(1)}
    rollouts = [
        Rollout(
            rng.integers(0, VOCABULARY, 6),
            np.arange(6) > 0,
            advantages=np.full(6, advantages[name]),
            group_id=name,
        )
        for name in ("poison", "fine")
        for _ in range(2)
    ]
    write_rollouts(tmp_path / "r.jsonl", rollouts)
    arguments = f"--rollouts {tmp_path}/r.jsonl --global-batch-size 2 --old-logprobs recompute --train-iters 6"
    trainer, _ = make_trainer(f"{arguments} --metrics-file {tmp_path}/m.jsonl")
    model = trainer.model
    for _ in range(6):
        before = {name: values.detach().clone() for name, values in model.named_parameters()}
        record = trainer._step()
        trainer._report(record)
        same = all(torch.equal(values, before[name]) for name, values in model.named_parameters())
        assert same == record["skipped"]
        assert all(torch.isfinite(values).all() for values in model.parameters())
    rows = rows_of(tmp_path / "m.jsonl")
    skipped = [row["skipped"] for row in rows]
    assert sorted(skipped) == [False] * 3 + [True] * 3
    assert all((row["grad_norm"] is None) == row["skipped"] for row in rows)
    assert trainer.console.file.getvalue().count("skipped, the weights are unchanged") == 3


def test_a_run_without_a_finite_step_does_not_end_well(tmp_path: Path) -> None:
    poison = Rollout(np.arange(6), np.arange(6) > 0, advantages=np.full(6, 3e38, np.float32))
    write_rollouts(tmp_path / "r.jsonl", [poison] * 2)
    arguments = f"--rollouts {tmp_path}/r.jsonl --global-batch-size 2 --train-iters 2 --save-hf {tmp_path}/hf"
    trainer, _ = make_trainer(f"{arguments} --old-logprobs recompute")
    with pytest.raises(InputError, match="all 2 steps of this run had a loss or a gradient norm that is not finite"):
        trainer.run()
    assert not (tmp_path / "hf").exists()


def test_supervised_training_learns(tmp_path: Path) -> None:
    rng = seed_all(6)
    # Each token is the one before it plus one.
    rows = [(np.arange(8) + start) % VOCABULARY for start in rng.integers(0, VOCABULARY, 40)]
    rollouts = [Rollout(tokens.astype(np.int32), np.arange(8) > 0) for tokens in rows]
    write_rollouts(tmp_path / "train.jsonl", rollouts[:30])
    write_rollouts(tmp_path / "held_out.jsonl", rollouts[30:])
    run(
        f"--objective sft --rollouts {tmp_path}/train.jsonl --global-batch-size 10 --train-iters 40 --eval-interval 40 "
        f"--eval-rollouts {tmp_path}/held_out.jsonl --metrics-file {tmp_path}/m.jsonl"
    )
    records = rows_of(tmp_path / "m.jsonl")
    assert records[0]["eval_loss"] > 2.5
    assert records[-1]["eval_loss"] < 0.5


def test_reinforcement_learns(tmp_path: Path) -> None:
    """The loop closes with the right sign: the reward for saying 7 goes up."""
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": f"{n}="}) for n in range(8)))
    (tmp_path / "reward.py").write_text("def reward(prompt, response, ids):\n    return float('7' in response)\n")
    run(
        f"--prompt-data {tmp_path}/prompts.jsonl --reward-function {tmp_path}/reward.py:reward "
        "--tokenizer-type CharacterTokenizer --rollout-max-response-len 3 --train-iters 25 "
        f"--eval-prompt-data {tmp_path}/prompts.jsonl --eval-interval 25 --metrics-file {tmp_path}/m.jsonl"
    )
    records = rows_of(tmp_path / "m.jsonl")
    assert records[1]["reward"] < 0.5
    assert np.mean([row["reward"] for row in records[-3:]]) > 0.8
    assert records[0]["eval_reward"] < 0.5
    assert records[-1]["eval_reward"] > 0.8
    for record in records[1:]:
        timing = record["timing"]
        rate = record["decoded_tokens"] / timing["collect_seconds"]
        assert timing["sampled_tokens_per_second"] == pytest.approx(rate)


def test_where_a_run_starts(tmp_path: Path) -> None:
    write_rollouts(tmp_path / "r.jsonl", make_rollouts(seed_all(7), 4, 2))
    common = f"--rollouts {tmp_path}/r.jsonl --global-batch-size 4"
    first, second, empty = tmp_path / "first", tmp_path / "second", tmp_path / "empty"
    with pytest.raises(InputError, match="--exit-on-missing-checkpoint asks for one"):
        make_trainer(f"{common} --save {first} --exit-on-missing-checkpoint")
    with pytest.raises(InputError, match=r"--load .*empty: holds no checkpoint"):
        make_trainer(f"{common} --load {empty} --save {first}")
    with pytest.raises(InputError, match=r"--ref-load .*empty: holds no checkpoint"):
        make_trainer(f"{common} --ref-load {empty} --kl-loss-coef 0.1")
    with pytest.raises(InputError, match=r"--save: the folder .*r.jsonl cannot be created \(File exists\)"):
        make_trainer(f"{common} --save {tmp_path}/r.jsonl")
    # Megatron's way to write one command for start and restart: --load and --save name one folder.
    trained, _ = run(f"{common} --load {first} --save {first} --train-iters 2")
    assert trained.progress.iteration == 2
    again, output = run(f"{common} --load {first} --save {first} --train-iters 3 --lr 0.5")
    assert "continuing" in output
    assert "changed since the checkpoint: --lr: 0.01 before, 0.5 now" in output
    assert "edited" not in output
    assert again.progress.iteration == 3
    assert [row["iteration"] for row in rows_of(first / "metrics.jsonl")] == [1, 2, 3]

    fine, output = make_trainer(f"{common} --load {first} --finetune --save {second} --train-iters 1")
    assert fine.progress.iteration == 0
    for (name, values), expected in zip(fine.model.named_parameters(), again.model.parameters(), strict=True):
        assert torch.equal(values, expected), name
    fine.run()
    # The same command again: its own checkpoint goes before --load.
    fine, output = make_trainer(f"{common} --load {first} --finetune --save {second} --train-iters 1")
    assert fine.progress.iteration == 1
    with pytest.raises(InputError, match="saved no reference weights; give --ref-load"):
        make_trainer(f"{common} --save {second} --kl-loss-coef 0.1")
    reference, _ = make_trainer(f"{common} --save {second} --kl-loss-coef 0.1 --ref-load {first}")
    for values, expected in zip(
        reference.preparation.reference.engine.tree_models[0].parameters(), again.model.parameters(), strict=True
    ):
        assert torch.equal(values, expected)
    write_rollouts(tmp_path / "r.jsonl", make_rollouts(seed_all(8), 4, 2))
    _, output = make_trainer(f"{common} --load {first} --train-iters 4")
    assert f"changed since the checkpoint: --rollouts {tmp_path}/r.jsonl: its content was edited" in output.getvalue()
