"""Runs with ``--batch-invariant-mode``: TreePO and drafts leave no gap, a gap ends the run, limits."""

from collections.abc import Iterator

import pytest

from dta_kernels.invariant.products import set_batch_invariant
from megatron_dta.core.common.errors import InputError, InputErrors
from megatron_dta.training.arguments import parse_arguments
from trainer_cases import make_trainer, rows_of

MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --num-query-groups 2 --ffn-hidden-size 48 --swiglu "
    "--disable-bias-linear --max-position-embeddings 64 --bf16 --batch-invariant-mode"
)
TASK = (
    "--task arithmetic --arithmetic-max-operand 9 --rollout-batch-size 2 --n-samples-per-prompt 4 "
    "--rollout-max-response-len 10 --train-iters 2 --lr 1e-3"
)


@pytest.fixture(autouse=True)
def the_mode_ends() -> Iterator[None]:
    yield
    set_batch_invariant(False)


@pytest.mark.parametrize(
    "flags",
    ["--rollout-method treepo --treepo-segment-length 3", "--rollout-speculation das --num-steps-per-rollout 2"],
)
def test_the_step_after_sampling_has_no_gap(flags: str, tmp_path) -> None:
    trainer, _ = make_trainer(f"{TASK} {flags} --save {tmp_path}", MODEL)
    trainer.run()
    rows = [row for row in rows_of(tmp_path / "metrics.jsonl") if row["iteration"]]
    assert rows[0]["rollout_batch_step"] == 0
    assert all(row["sampler_logprob_gap_max"] == 0 for row in rows if row["rollout_batch_step"] == 0)


def test_a_gap_ends_the_run_before_the_update(tmp_path) -> None:
    trainer, _ = make_trainer(f"{TASK} --save {tmp_path}", MODEL)
    set_batch_invariant(False)
    with pytest.raises(
        InputError, match=r"step 1: logprobs of sampler and trainer differ by up to .*--batch-invariant-mode"
    ):
        trainer.run()
    assert trainer.progress.iteration == 0


@pytest.mark.parametrize(
    ("flags", "refused"),
    [
        ("--lora-rank 4", "does not support --lora-rank"),
        ("--transformer-impl transformer_engine", "does not support --transformer-impl"),
        (
            "--num-experts 4 --moe-ffn-hidden-size 32 --expert-model-parallel-size 2",
            "expert-model-parallel-size above 1",
        ),
        ("--rollout-engine sglang", "is for --rollout-engine in-process"),
    ],
)
def test_what_cannot_be_is_refused(flags: str, refused: str) -> None:
    with pytest.raises((InputError, InputErrors), match=refused):
        parse_arguments(f"{MODEL} {TASK} {flags}".split())
