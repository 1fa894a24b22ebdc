"""The trainer with every objective: epochs, penalties in the reward, critic, pairs, filters, alarms; and it learns."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from conftest import seed_all
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.engine import prepare_batch
from megatron_dta.core.objectives.gae import generalized_advantages, token_rewards, whiten
from megatron_dta.core.rollouts.load import write_rollouts
from megatron_dta.core.rollouts.record import Rollout
from resume_cases import rows_without_timing
from trainer_cases import make_rollouts, make_trainer, rows_of, run

SEVEN = "def reward(prompt, response, ids):\n    return float('7' in response)\n"


@pytest.fixture
def sampling(tmp_path: Path) -> str:
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": f"{n}="}) for n in range(8)))
    (tmp_path / "reward.py").write_text(SEVEN)
    return (
        f"--prompt-data {tmp_path}/prompts.jsonl --reward-function {tmp_path}/reward.py:reward "
        f"--tokenizer-type CharacterTokenizer --rollout-max-response-len 3 --rollout-batch-size 8 --save {tmp_path}/run"
    )


@pytest.fixture
def stored(tmp_path: Path) -> tuple[str, list[Rollout]]:
    rollouts = make_rollouts(seed_all(31), 4, 3)
    write_rollouts(tmp_path / "r.jsonl", rollouts)
    return f"--rollouts {tmp_path}/r.jsonl --global-batch-size 12", rollouts


# ------------------------------------------------------------------------------------------------------------ learning


@pytest.mark.parametrize(
    "objective",
    [
        "--objective ppo --critic-lr 2e-2 --ppo-epochs 2 --num-critic-only-steps 2 --train-iters 14",
        "--dynamic-sampling --eps-clip-high 0.28 --kl-coef 0.001 --train-iters 10",
    ],
    ids=lambda flags: flags.split(" --train")[0],
)
def test_the_reward_goes_up(objective: str, sampling: str, tmp_path: Path) -> None:
    run(f"{sampling} {objective} --lr 3e-2")
    records = rows_of(tmp_path / "run" / "metrics.jsonl")
    assert records[0]["reward"] < 0.5
    assert np.mean([row["reward"] for row in records[-3:]]) > 0.8
    assert not any(row.get("skipped") for row in records)


def test_preferences_are_learned(tmp_path: Path) -> None:
    """Chosen responses become more likely than rejected ones, against the reference."""
    rng = seed_all(6)
    rollouts = []
    for group in range(8):
        prompt = rng.integers(0, 17, 3)
        for token, reward in ((3, 1.0), (5, 0.0), (4, 0.5)):
            tokens = np.append(prompt, [token, token]).astype(np.int32)
            rollouts.append(Rollout(tokens, np.arange(5) >= 3, reward=reward, group_id=f"g{group}"))
    write_rollouts(tmp_path / "pairs.jsonl", rollouts)
    flags = f"--objective dpo --rollouts {tmp_path}/pairs.jsonl --global-batch-size 24 --train-iters 12"
    run(f"{flags} --save {tmp_path}/run")
    records = rows_of(tmp_path / "run" / "metrics.jsonl")
    assert records[0]["rollouts"] == 16  # best and worst of each group
    assert records[0]["collected_rollouts"] == 24
    assert records[0]["loss"] == pytest.approx(np.log(2), rel=1e-5)
    assert records[-1]["loss"] < 0.4
    assert records[-1]["dpo_accuracy"] == 1
    trainer, _ = make_trainer(f"{flags} --dpo-pairs all")
    (step,) = trainer.preparation.prepare(trainer.source.next_batch(0))
    assert len(step.samples) == 24
    assert len(step.preference_pairs) == 24
    parts = [replace(rollout, trajectory_id=rollout.group_id) for rollout in rollouts]
    with pytest.raises(InputError, match="compares whole trajectories"):
        trainer.preparation.prepare(parts)


# ------------------------------------------------------------------------------------------------- epochs and passes


def test_epochs_train_the_same_numbers_again(stored) -> None:
    arguments, rollouts = stored
    trainer, _ = make_trainer(f"{arguments} --old-logprobs recompute --ppo-epochs 3")
    steps = trainer.preparation.prepare(rollouts)
    assert [step.age for step in steps] == [0, 1, 2]
    assert all(step.planned is steps[0].planned for step in steps)
    expected = trainer.engine.compute_logprobs(steps[0].planned)
    for sample, logprobs in zip(steps[2].samples, expected, strict=True):
        np.testing.assert_array_equal(sample.old_logprobs, logprobs)
    records = [trainer._step() for _ in range(4)]
    assert [record["rollout_batch_step"] for record in records] == [0, 1, 2, 0]
    assert records[0]["ratio"] == pytest.approx(1, abs=1e-6)
    assert abs(records[1]["ratio"] - 1) > 1e-4
    assert records[1]["ratio_max"] > records[1]["ratio"]
    assert records[3]["ratio"] == pytest.approx(1, abs=1e-6)


def test_penalties_come_off_the_reward(stored) -> None:
    """KL in the reward: group estimators take it from the response's reward, a critic's advantages token by token."""
    arguments, rollouts = stored
    common = f"{arguments} --kl-coef 0.3 --ref-load"
    trainer, _ = make_trainer(common.removesuffix("--ref-load") + "--disable-grpo-std-normalization")
    reference = trainer.preparation.reference
    for parameter in reference.engine.tree_models[0].parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    (step,) = trainer.preparation.prepare(rollouts)
    assert all(sample.ref_logprobs is None for sample in step.samples)
    with reference.on_device() as engine:
        ref = engine.compute_logprobs(step.planned)
    kl = [np.where(r.loss_mask, r.logprobs - q, 0) for r, q in zip(rollouts, ref, strict=True)]
    shaped = np.array([r.reward - 0.3 * k.sum() for r, k in zip(rollouts, kl, strict=True)])
    for group in range(4):
        group_rows = slice(3 * group, 3 * group + 3)
        for i in range(group_rows.start, group_rows.stop):
            expected = shaped[i] - shaped[group_rows].mean()
            np.testing.assert_allclose(step.samples[i].advantages, expected, rtol=1e-4, atol=1e-5)


def test_ppo_samples_by_the_definition(stored) -> None:
    arguments, rollouts = stored
    flags = f"{arguments} --objective ppo --gae-gamma 0.9 --gae-lambda 0.8 --kl-coef 0.2"
    trainer, _ = make_trainer(flags)
    for parameter in trainer.preparation.reference.engine.tree_models[0].parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    (step,) = trainer.preparation.prepare(rollouts)
    values = trainer.critic.engine.compute_logprobs(step.planned)
    ref = trainer.preparation.reference.engine.compute_logprobs(step.planned)
    masks = [rollout.loss_mask for rollout in rollouts]
    rewards = [
        token_rewards(r) - 0.2 * np.where(r.loss_mask, r.logprobs - q, 0) for r, q in zip(rollouts, ref, strict=True)
    ]
    advantages, returns = generalized_advantages(rewards, values, masks, 0.9, 0.8)
    for sample, a, r, v in zip(step.samples, whiten(advantages, masks), returns, values, strict=True):
        np.testing.assert_allclose(sample.advantages, a, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(sample.returns, r, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(sample.old_values, v)


def test_a_resumed_ppo_run_is_the_unbroken_one(stored, tmp_path: Path) -> None:
    """Critic, its optimizer and waiting epochs are in the checkpoint; --critic-load takes a critic from it."""
    arguments, _ = stored
    flags = f"{arguments} --objective ppo --ppo-epochs 2 --kl-loss-coef 0.1 --save"
    whole, _ = run(f"{flags} {tmp_path}/whole --train-iters 5")
    run(f"{flags} {tmp_path}/part --train-iters 3")
    part, output = run(f"{flags} {tmp_path}/part --train-iters 5")
    assert "continuing" in output
    for model in ("model", "critic"):
        pair = [getattr(trainer, model) for trainer in (whole, part)]
        first, second = (
            getattr(loaded_part, "model", loaded_part) if model == "critic" else loaded_part for loaded_part in pair
        )
        for (name, values), again in zip(first.named_parameters(), second.parameters(), strict=True):
            assert torch.equal(values, again), name
    rows = rows_without_timing(tmp_path / "whole")
    assert rows == rows_without_timing(tmp_path / "part")
    assert {"value_loss", "explained_variance", "critic_grad_norm"} <= rows[0].keys()

    loaded, _ = make_trainer(f"{arguments} --objective ppo --critic-load {tmp_path}/whole")
    for (name, values), again in zip(
        loaded.critic.model.named_parameters(), whole.critic.model.parameters(), strict=True
    ):
        assert torch.equal(values, again), name
    run(f"{arguments} --save {tmp_path}/policy --train-iters 1")
    trunk, _ = make_trainer(f"{arguments} --objective ppo --critic-load {tmp_path}/policy")
    policy, _ = make_trainer(f"{arguments} --load {tmp_path}/policy --finetune")
    weights = dict(policy.model.named_parameters())
    for name, values in trunk.critic.model.named_parameters():
        assert name == "output_layer.weight" or torch.equal(values, weights[name]), name
    with pytest.raises(InputError, match="has no critic to continue with"):
        make_trainer(f"{arguments} --objective ppo --load {tmp_path}/policy")
    with pytest.raises(InputError, match=r"--critic-load .*nowhere: holds no checkpoint"):
        make_trainer(f"{arguments} --objective ppo --critic-load {tmp_path}/nowhere")


def test_an_offloaded_reference_says_the_same(stored) -> None:
    arguments, rollouts = stored
    references = []
    for flag in ("", "--offload-reference"):
        trainer, _ = make_trainer(f"{arguments} --kl-loss-coef 0.1 {flag}")
        (step,) = trainer.preparation.prepare(rollouts)
        references.append([sample.ref_logprobs for sample in step.samples])
        parameters = trainer.preparation.reference.engine.tree_models[0].parameters()
        sizes = [parameter.untyped_storage().nbytes() for parameter in parameters]
        assert (sum(sizes) == 0) == bool(flag)
    for left, right in zip(*references, strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("gap", [0.0, 0.3])
def test_the_alarm_tells_sampler_from_trainer(stored, tmp_path: Path, gap: float) -> None:
    arguments, rollouts = stored
    trainer, _ = make_trainer(arguments)
    samples = trainer.preparation._samples(rollouts)
    exact = trainer.engine.compute_logprobs(prepare_batch(samples, trainer.config.tree))
    recorded = [
        replace(r, logprobs=np.where(r.loss_mask, np.minimum(logprobs - gap, 0), 0).astype(np.float32))
        for r, logprobs in zip(rollouts, exact, strict=True)
    ]
    write_rollouts(tmp_path / "near.jsonl", recorded)
    again, _ = make_trainer(f"--rollouts {tmp_path}/near.jsonl --global-batch-size 12 --ppo-epochs 2")
    first = again._step()
    assert first["sampler_probability_ratio"] == pytest.approx(np.exp(gap), rel=1e-4)


def test_a_run_without_anything_to_train_ends(stored) -> None:
    arguments, _ = stored
    trainer, _ = make_trainer(
        f"{arguments} --objective sft --rejection-sampling threshold --rejection-reward-threshold 99"
    )
    with pytest.raises(InputError, match="20 consecutive rollout batches had nothing to train"):
        trainer._step()


def test_advantages_of_their_own_do_not_pass_unused(stored, tmp_path: Path) -> None:
    _, rollouts = stored
    with_advantages = [replace(rollout, advantages=np.ones(len(rollout), np.float32)) for rollout in rollouts]
    write_rollouts(tmp_path / "own.jsonl", with_advantages)
    for flags in ("--objective ppo", "--kl-coef 0.1"):
        trainer, _ = make_trainer(f"--rollouts {tmp_path}/own.jsonl --global-batch-size 12 {flags}")
        with pytest.raises(InputError, match="has advantages, which"):
            trainer._step()


def test_turns_of_a_trajectory_count_as_one(stored, tmp_path: Path) -> None:
    """With trajectory-mean every trajectory's trained tokens weigh 1 / trajectories together, however many turns."""
    _, rollouts = stored
    names = ["turns" if i % 3 else None for i in range(len(rollouts))]
    reward_of = {(r.group_id, name): r.reward for r, name in zip(rollouts, names, strict=True)}
    turns = [
        replace(r, trajectory_id=name, reward=r.reward if name is None else reward_of[r.group_id, name])
        for r, name in zip(rollouts, names, strict=True)
    ]
    write_rollouts(tmp_path / "turns.jsonl", turns)
    flags = f"--rollouts {tmp_path}/turns.jsonl --global-batch-size 12"
    trainer, _ = make_trainer(f"{flags} --loss-aggregation trajectory-mean")
    (step,) = trainer.preparation.prepare(turns)
    batch = step.batch(trainer.config.tree, trainer.config.objective, trainer.engine)
    totals: dict[tuple, float] = {}
    ends = batch.plan.sequence_pairs
    for i, turn in enumerate(turns):
        pairs = slice(ends[i], ends[i + 1])
        key = turn.group_id, turn.trajectory_id or i
        totals[key] = totals.get(key, 0.0) + float(batch.loss_weights[pairs].sum())
    counted = [total for total in totals.values() if total]
    assert len(counted) == 8 < len(turns)
    np.testing.assert_allclose(counted, 1 / len(counted), rtol=1e-12)
    assert np.isfinite(trainer._step()["loss"])
