"""Flags of tree sampling: presets, what is refused, and that every setting reaches the sampler."""

from __future__ import annotations

import math

import pytest

from megatron_dta.core.common.errors import InputError
from megatron_dta.sampling.config import TreePOConfig
from megatron_dta.sampling.task import build_task
from megatron_dta.sampling.treepo.settings import TreeSettings
from megatron_dta.sampling.treepo.source import stop_rules
from megatron_dta.training.arguments import parse_arguments
from megatron_dta.training.monitor.benefits import treepo_benefit

BASE = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --task arithmetic --max-position-embeddings 9000 "
TREE = BASE + "--rollout-method treepo --treepo-segment-length 2 "


def parse(line: str):
    return parse_arguments(line.split())


@pytest.mark.parametrize("name", TreePOConfig.__dataclass_fields__["treepo_preset"].metadata["choices"])
def test_presets(name: str):
    config = parse(f"{BASE} --treepo-preset {name}")
    init, shape = name.split("-")
    depth, length = map(int, shape.split("x"))
    settings = TreeSettings.from_config(config.treepo, config.sampling, 0, 10)
    assert (settings.width, settings.max_depth, settings.segment_tokens) == (16, depth, length)
    assert settings.max_response_tokens == depth * length
    assert (settings.initial_branches, settings.initial_branches_max) == (2, 8 if init == "more" else None)
    assert (settings.branching_factor, settings.fallback, settings.allocation) == (2, "finished", "even")
    assert config.objective.advantage_estimator == "treepo"
    assert (config.objective.eps_clip, config.objective.eps_clip_high, config.objective.dual_clip) == (0.2, 0.28, 10)
    rules = stop_rules(build_task(config.sampling, 20000), config)
    assert rules.answer(r"\boxed{1}")
    assert (rules.repetition_count, rules.repetition_length, rules.repetition_segments) == (8, 32, 1)
    sampling = config.sampling
    assert (sampling.rollout_batch_size, sampling.over_sampling_batch_size, sampling.num_steps_per_rollout) == (
        512,
        1536,
        16,
    )
    assert config.filtering.overlong_buffer_len == 512
    assert (config.optimization.lr, config.optimization.lr_warmup_iters) == (1e-6, 10)


@pytest.mark.parametrize("name", ["fixed-14x512", "more-56x128", "more-7x1024"])
def test_a_preset_asks_for_no_change_of_flags_that_were_not_given(name: str):
    for flags in (
        *(f"--objective {objective}" for objective in ("grpo", "ppo", "gspo", "gspo-token", "cispo", "dpo")),
        "--objective sft --rejection-sampling best",
        "--environment a.B",
        "--environment a.B --objective cispo --treepo-branch-at turn",
        "--dynamic-sampling",
        "--rollout-batch-size 7",
        "--rollout-batch-size 48",
        "--rollout-batch-size 64 --over-sampling-batch-size 64",
        "--n-samples-per-prompt 4",
        "--n-samples-per-prompt 3 --rollout-batch-size 6 --global-batch-size 9",
        "--rollout-max-response-len 1100",
        "--rollout-max-response-len 300 --treepo-segment-length 100",
        "--train-iters 3",
        "--eps-clip 0.4",
        "--treepo-initial-branches 9",
    ):
        # Raises where a check asks for anything.
        assert parse(f"{BASE} --treepo-preset {name} {flags}").treepo.rollout_method == "treepo"
    for flags, message in (("--rollout-max-response-len 60", "so no path would branch"),):
        with pytest.raises(InputError, match=message):
            parse(f"{BASE} --treepo-preset {name} {flags}")


def test_what_trees_have_saved_is_one_sentence():
    step = {"effective_leaves": 6.8, "rollouts": 32.0, "response_tokens": 100.0, "decoded_tokens": 2720.0}
    records = [{"iteration": 0}, {"iteration": 1, **step}, {"iteration": 2, **step, "rollout_batch_step": 1}]
    first, last = "TreePO decoded 0.85 of the trained tokens (5,440 of 6,400", "); a tree's leaves were worth 6.8 "
    assert treepo_benefit(records).startswith(first + last)
    records = [{**record, "left_out_decoded_tokens": 900.0} for record in records]
    assert treepo_benefit(records).startswith(first + ", and 900 for prompts that were left out" + last)
    assert treepo_benefit([{**step, "decoded_tokens": 3200.0}]) is None
    del step["effective_leaves"]
    assert treepo_benefit([step]) is None


def test_flags_go_before_the_preset():
    config = parse(
        f"{BASE} --rollout-method treepo --treepo-preset more-14x512 --treepo-segment-length 100 --eps-clip 0.1"
    )
    assert (config.treepo.treepo_segment_length, config.treepo.treepo_max_depth) == (100, 14)
    assert config.objective.eps_clip == 0.1


def test_every_flag_reaches_the_sampler():
    config = parse(
        TREE + "--n-samples-per-prompt 12 --treepo-max-depth 7 --treepo-branching-factor 3 --treepo-initial-branches 4 "
        "--treepo-initial-branches-max 6 --treepo-no-budget-transfer --treepo-allocation low-logprob "
        "--treepo-allocation-score path-sum --treepo-allocation-temperature 5 --treepo-allocation-temperature-end 1 "
        "--treepo-allocation-temperature-iters 11 --treepo-fallback longest --treepo-fallback-point min-logprob"
    )
    settings = [TreeSettings.from_config(config.treepo, config.sampling, step, 99) for step in (0, 5, 10, 50)]
    expected = TreeSettings(12, 64, 2, 7, 3, 4, 6, False, "low-logprob", "path-sum", 5.0, "longest", "min-logprob")
    assert settings[0] == expected
    assert [s.temperature for s in settings] == pytest.approx([5, 3, 1, 1])
    assert math.isclose(
        TreeSettings.from_config(config.treepo, config.sampling, 2, 99).temperature,
        5 - 4 * (1 - math.cos(0.2 * math.pi)) / 2,
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (BASE + "--rollout-method treepo", "--treepo-segment-length 512 is not below --rollout-max-response-len 64"),
        (TREE + "--treepo-initial-branches 9", "--treepo-initial-branches 9 is above the width"),
        (TREE + "--treepo-initial-branches-max 9", "--treepo-initial-branches-max 9 is above the width"),
        (TREE + "--treepo-initial-branches-max 1", "--treepo-initial-branches-max 1 is below"),
        (TREE + "--treepo-answer-pattern ((", "--treepo-answer-pattern ((: not boxed and not a regular expression"),
        (TREE + "--environment a.B --treepo-answer-pattern boxed", "leave out --treepo-answer-pattern"),
        (BASE + "--environment a.B --rollout-stop-degenerate", "--rollout-stop-degenerate ends whole responses"),
        (TREE + "--rollout-stop-degenerate", "--rollout-stop-degenerate ends whole responses"),
        (TREE + "--treepo-preset fixed-1x1", "invalid choice"),
        (TREE + "--over-sampling-batch-size 4", "--over-sampling-batch-size 4 is below --rollout-batch-size 16"),
    ],
)
def test_flags_that_do_not_fit_are_refused(flags: str, message: str):
    with pytest.raises(InputError) as error:
        parse(flags)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
