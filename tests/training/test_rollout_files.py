"""``--save-rollouts-interval``: what chosen steps train is on disk, with the advantages that train."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np

from conftest import seed_all
from megatron_dta.core.rollouts.load import load_rollouts, write_rollouts
from megatron_dta.sampling.prompts.tokenizer import CharacterTokenizer
from trainer_cases import make_rollouts, make_trainer, run

TASK = (
    "--task arithmetic --arithmetic-max-operand 3 --rollout-batch-size 4 --n-samples-per-prompt 3 "
    "--rollout-max-response-len 4 --num-steps-per-rollout 2 --train-iters 7"
)


def test_chosen_steps_are_written_with_what_they_train(tmp_path: Path) -> None:
    seed_all(1)
    flags = f"{TASK} --save {tmp_path} --save-rollouts-interval 3"
    trainer, _ = make_trainer(flags + " --seed 3")
    trained = {}
    plain = trainer._next_step

    def watched(watch):
        step, sampled = plain(watch)
        trained[trainer.progress.iteration + 1] = step
        return step, sampled

    trainer._next_step = watched
    trainer.run()
    trainer.metrics.close()
    folder = tmp_path / "rollouts"
    assert sorted(path.name for path in folder.glob("*.jsonl")) == [f"step_{i:07d}.jsonl" for i in (1, 3, 6)]
    for iteration in (1, 3, 6):
        rollouts = load_rollouts(folder / f"step_{iteration:07d}.jsonl")
        samples = trained[iteration].samples
        assert len({rollout.group_id for rollout in rollouts}) == 2
        for rollout, sample in zip(rollouts, samples, strict=True):
            np.testing.assert_array_equal(rollout.token_ids, sample.token_ids)
            np.testing.assert_array_equal(rollout.advantages, sample.advantages.astype(np.float32))
            assert rollout.reward in (0.0, 1.0)
        texts = json.loads((folder / f"step_{iteration:07d}_tokens.json").read_text())
        ids = {str(token) for rollout in rollouts for token in rollout.token_ids}
        assert texts.keys() == ids
        assert "".join(texts[str(token)] for token in rollouts[0].token_ids[:4]).count("+") == 1
        runs = json.loads((folder / f"step_{iteration:07d}_texts.json").read_text())
        for rollout, parts in zip(rollouts, runs, strict=True):
            assert sum(count for count, _, _ in parts) == len(rollout)
            assert re.fullmatch(r"\d\+\d=", parts[0][1])
            assert not rollout.loss_mask[: parts[0][0]].any()
            ended = rollout.token_ids[-1] == CharacterTokenizer().eos_id
            assert (parts[-1] == [1, "<eos>", True]) == ended


def test_stored_rollouts_have_no_text(tmp_path: Path) -> None:
    write_rollouts(tmp_path / "r.jsonl", make_rollouts(seed_all(2), 4, 3))
    run(
        f"--rollouts {tmp_path}/r.jsonl --global-batch-size 6 --train-iters 2 --save {tmp_path}/run "
        "--save-rollouts-interval 2"
    )
    names = sorted(path.name for path in (tmp_path / "run" / "rollouts").iterdir())
    assert names == ["step_0000001.jsonl", "step_0000002.jsonl"]
    assert len(load_rollouts(tmp_path / "run" / "rollouts" / names[0])) == 6


def test_a_run_that_was_stopped_has_the_same_files(tmp_path: Path) -> None:
    flags = f"{TASK} --save-rollouts-interval 1 --save-interval 1"
    run(f"{flags} --save {tmp_path}/straight")
    run(f"{flags.replace('--train-iters 7', '--train-iters 3')} --save {tmp_path}/stopped")
    run(f"{flags} --save {tmp_path}/stopped")
    straight, stopped = (sorted((tmp_path / name / "rollouts").iterdir()) for name in ("straight", "stopped"))
    assert [path.name for path in stopped] == [path.name for path in straight]
    assert len(straight) == 24  # step 8 is prepared with step 7
    for left, right in zip(straight, stopped, strict=True):
        assert left.read_bytes() == right.read_bytes()
