"""The training loop and its parts, in one process: data order, samples, modes, skipped steps, where a run starts."""

from pathlib import Path

import numpy as np
import pytest
import torch

from conftest import seed_all
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.rollouts.load import write_rollouts
from megatron_dta.core.rollouts.record import Rollout
from megatron_dta.training.data.stored import StoredRollouts
from trainer_cases import VOCABULARY, make_rollouts, make_trainer, rows_of, run


@pytest.mark.parametrize("seed", range(3))
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


@pytest.mark.parametrize("flags", ["--objective sft", "--num-steps-per-rollout 2 --old-logprobs rollout"])
def test_stored_steps_are_prepared_while_the_one_before_trains(tmp_path: Path, flags: str) -> None:
    write_rollouts(tmp_path / "r.jsonl", make_rollouts(seed_all(1), 6, 2))
    flags = f"--rollouts {tmp_path}/r.jsonl --global-batch-size 4 --train-iters 5 --lr 1e-2 {flags} --save {tmp_path}"
    run(f"{flags}/ahead")
    trainer, _ = make_trainer(f"{flags}/plain")
    ahead, trainer._prepare_ahead = trainer._prepare_ahead, lambda: None
    trainer.run()
    rows = [rows_of(tmp_path / name / "metrics.jsonl") for name in ("ahead", "plain")]
    assert [row.pop("timing") for row in rows[0] + rows[1]]
    assert rows[0] == rows[1]
    trainer.progress.iteration = 0
    ahead()
    assert (trainer.progress.waiting or trainer._ahead)[0].planned is not None


def test_a_group_larger_than_the_step_is_refused(tmp_path: Path) -> None:
    write_rollouts(tmp_path / "r.jsonl", make_rollouts(seed_all(1), 2, 5))
    with pytest.raises(InputError, match=r"group g0 has 5 rollouts .* --global-batch-size is 4; raise it"):
        make_trainer(f"--rollouts {tmp_path}/r.jsonl --global-batch-size 4")


def test_rollouts_without_logprobs_need_them_computed(tmp_path: Path) -> None:
    rollouts = make_rollouts(seed_all(3), 4, 2, logprobs=False)
    write_rollouts(tmp_path / "r.parquet", rollouts)
    arguments = f"--rollouts {tmp_path}/r.parquet --global-batch-size 4"
    with pytest.raises(InputError, match=r"row 1: field .logprobs.: missing.*--old-logprobs recompute"):
        make_trainer(arguments)
    # A single step at the weights themselves needs none: every ratio is 1.
    trainer, _ = make_trainer(f"{arguments} --old-logprobs recompute")
    (step,) = trainer.preparation.prepare(rollouts)
    assert all(sample.old_logprobs is None for sample in step.samples)


def test_a_step_that_is_not_finite_is_skipped_and_reported(tmp_path: Path) -> None:
    rng = seed_all(5)
    advantages = {"poison": np.float32(3e38), "fine": np.float32(1)}
    rollouts = [
        Rollout(
            rng.integers(0, VOCABULARY, 6), np.arange(6) > 0, advantages=np.full(6, advantages[name]), group_id=name
        )
        for name in ("poison", "fine")
        for _ in range(2)
    ]
    write_rollouts(tmp_path / "r.jsonl", rollouts)
    arguments = f"--rollouts {tmp_path}/r.jsonl --global-batch-size 2 --old-logprobs recompute --train-iters 6"
    trainer, _ = make_trainer(f"{arguments} --save {tmp_path}/run")
    model = trainer.model
    for _ in range(6):
        before = {name: values.detach().clone() for name, values in model.named_parameters()}
        record = trainer._step()
        trainer._report(record)
        same = all(torch.equal(values, before[name]) for name, values in model.named_parameters())
        assert same == record["skipped"]
        assert all(torch.isfinite(values).all() for values in model.parameters())
    rows = rows_of(tmp_path / "run" / "metrics.jsonl")
    skipped = [row["skipped"] for row in rows]
    assert sorted(skipped) == [False] * 3 + [True] * 3
    assert all((row["grad_norm"] is None) == row["skipped"] for row in rows)
    assert trainer.console.file.getvalue().count("skipped, the weights are unchanged") == 3


def test_where_a_run_starts(tmp_path: Path) -> None:
    write_rollouts(tmp_path / "r.jsonl", make_rollouts(seed_all(7), 4, 2))
    common = f"--rollouts {tmp_path}/r.jsonl --global-batch-size 4"
    first, second, empty = tmp_path / "first", tmp_path / "second", tmp_path / "empty"
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
