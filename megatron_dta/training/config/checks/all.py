"""Rejects invalid settings before anything is built, with one line per problem that names the flag and the fix.

All problems are reported at once. A check yields its lines; a check that other code also calls raises ``InputError``
and is wrapped in ``caught``. There are three kinds of problems: a number outside its bounds (declared with the
field), a flag without effect given the others (no flag is accepted and ignored), and combinations that cannot work. A
new check belongs in the module of its topic.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator

from megatron_dta.core.common.errors import caught, raise_all
from megatron_dta.core.config.checks.experts import check_experts
from megatron_dta.core.config.checks.hybrid import check_hybrid
from megatron_dta.core.config.checks.lora import check_lora
from megatron_dta.core.config.checks.mesh import check_context_parallel, check_tensor_parallel, check_world_size
from megatron_dta.core.config.checks.model import check_batch_invariant, check_rotary
from megatron_dta.core.config.checks.transformer_engine import check_transformer_impl
from megatron_dta.core.config.derived.pipeline_layout import stage_layers
from megatron_dta.core.config.options import flag_of
from megatron_dta.training.config.checks.agents import check_agents
from megatron_dta.training.config.checks.distillation import check_distillation
from megatron_dta.training.config.checks.needs import unread_settings
from megatron_dta.training.config.checks.objectives import check_objective
from megatron_dta.training.config.checks.optimizer_states import check_states
from megatron_dta.training.config.checks.reference import check_reference
from megatron_dta.training.config.checks.rollouts import check_rollout_engine, samples
from megatron_dta.training.config.checks.tree import check_tree
from megatron_dta.training.config.checks.treepo import check_treepo
from megatron_dta.training.config.train import TrainConfig, settings_of


def check_config(config: TrainConfig) -> None:
    """Raise ``InputErrors`` with a line for every setting that cannot be used."""
    # The other checks rely on numbers within their bounds, and the source of rollouts decides which flags are read.
    raise_all(_check_bounds(config))
    source, model = list(_check_source(config)), list(_check_model(config))
    if config.model.kv_channels is None:
        raise_all([*source, *model])
    raise_all([*source, *model, *_contradictions(config), *([] if source else unread_settings(config))])


def check_engine(config: TrainConfig) -> None:
    """Check the settings of model, tree, mesh and optimizer, for trainers that bring their own data and losses."""
    raise_all(_check_bounds(config))
    raise_all(
        [
            *_check_model(config),
            *check_tree(config),
            *_check_schedule(config),
            *_check_parallel(config),
            *caught(check_states, config.model, config.optimization, config.parallel),
            # These trainers give the whole schedule. The gateway samples for calls that it gets, without prompts.
            *unread_settings(config, ("optimization.lr_", "optimization.min_lr", "sampling.", "agent.")),
        ]
    )


def _contradictions(config: TrainConfig) -> Iterator[str]:
    yield from _check_data(config)
    yield from check_objective(config)
    yield from check_treepo(config)
    yield from check_tree(config)
    yield from _check_schedule(config)
    yield from _check_parallel(config)
    yield from caught(check_states, config.model, config.optimization, config.parallel)
    yield from _check_hf(config)
    yield from check_rollout_engine(config)
    yield from check_agents(config)
    yield from check_distillation(config)


def _check_bounds(config: TrainConfig) -> Iterator[str]:
    for setting, value in [(s, v) for _, s, given in settings_of(config) for v in _values(given)]:
        flag, bounds = flag_of(setting), setting.metadata
        if bounds["choices"] and value is not None and value not in bounds["choices"]:
            yield f"{flag} {value}: choose one of {', '.join(bounds['choices'])}"
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if not math.isfinite(value):
            yield f"{flag} {value}: must be a finite number"
            continue
        if bounds["minimum"] is not None and value < bounds["minimum"]:
            yield f"{flag} {value}: must be at least {bounds['minimum']}"
        if bounds["above"] is not None and value <= bounds["above"]:
            yield f"{flag} {value}: must be above {bounds['above']}"
        if bounds["maximum"] is not None and value > bounds["maximum"]:
            yield f"{flag} {value}: must be at most {bounds['maximum']}"


def _values(setting: object) -> list:
    return setting if isinstance(setting, list) else [setting]


def _check_model(config: TrainConfig) -> Iterator[str]:
    model = config.model
    heads, groups = model.num_attention_heads, model.num_query_groups
    if model.kv_channels is None:
        yield (
            f"--hidden-size {model.hidden_size} is not divisible by --num-attention-heads {heads}; "
            "change one of them or give --kv-channels"
        )
    else:
        yield from caught(check_rotary, model)
    if heads % groups:
        yield f"--num-attention-heads {heads} is not divisible by --num-query-groups {groups}"
    yield from caught(check_transformer_impl, model)


def _check_source(config: TrainConfig) -> Iterator[str]:
    data, sampling = config.data, config.sampling
    sampled = samples(config)
    if data.rollouts and sampled:
        yield "--rollouts conflicts with sampling (--prompt-data, --task); keep one source of rollouts"
    if not data.rollouts and not sampled:
        yield ("no rollouts to train on: give --rollouts FILE, or --prompt-data FILE or --task to sample them")
    if sampling.prompt_data and sampling.task:
        yield "--task brings its own prompts and conflicts with --prompt-data; keep one of them"


def _check_data(config: TrainConfig) -> Iterator[str]:
    data, sampling, model = config.data, config.sampling, config.model
    sampled = samples(config)
    if data.rollouts and data.global_batch_size is None:
        yield "--rollouts needs --global-batch-size, the number of rollouts per optimizer step"
    if data.rollouts and model.vocab_size is None and sampling.tokenizer_type is None:
        yield "--rollouts needs --vocab-size: the vocabulary size does not follow from stored token ids"
    rewarded = sampling.reward_function or config.environment.environment or config.agent.is_used
    if sampling.prompt_data and not rewarded:
        yield ("--prompt-data needs --reward-function: exact_match, math_verify, code_tests, remote or FILE.py:NAME")
    if sampling.prompt_data and not sampling.tokenizer_type:
        yield "--prompt-data needs --tokenizer-type (and usually --tokenizer-model)"
    if sampled:
        yield from _check_division_of_samples(config)
    length = data.seq_length
    if length is not None and length > model.max_position_embeddings:
        yield (
            f"--seq-length {length} is more than --max-position-embeddings {model.max_position_embeddings}; "
            "raise the latter or cut the sequences"
        )
    if config.logging.eval_interval and not (data.eval_rollouts or sampling.eval_prompt_data or sampling.task):
        yield "--eval-interval needs held-out data: give --eval-rollouts or --eval-prompt-data"


def _check_division_of_samples(config: TrainConfig) -> Iterator[str]:
    sampling, data = config.sampling, config.data
    if sampling.rollout_batch_size % sampling.num_steps_per_rollout:
        yield (
            f"--rollout-batch-size {sampling.rollout_batch_size} is not divisible by "
            f"--num-steps-per-rollout {sampling.num_steps_per_rollout}: groups are kept whole"
        )
    sampled = sampling.rollout_batch_size * sampling.n_samples_per_prompt
    if data.global_batch_size is not None and data.global_batch_size * sampling.num_steps_per_rollout != sampled:
        yield (
            f"--global-batch-size {data.global_batch_size} x --num-steps-per-rollout {sampling.num_steps_per_rollout} "
            f"is not the {sampled} rollouts of --rollout-batch-size x --n-samples-per-prompt; leave out "
            "--global-batch-size to derive it"
        )


def _check_schedule(config: TrainConfig) -> Iterator[str]:
    optimization = config.optimization
    decay_iters = optimization.lr_decay_iters or optimization.train_iters
    if optimization.min_lr > optimization.lr:
        yield f"--min-lr {optimization.min_lr} is above --lr {optimization.lr}"
    if optimization.lr_warmup_iters and optimization.lr_warmup_iters >= decay_iters:
        yield (
            f"--lr-warmup-iters {optimization.lr_warmup_iters} must be below the {decay_iters} steps of the schedule "
            "(--lr-decay-iters or --train-iters)"
        )
    for flag, beta in (("--adam-beta1", optimization.adam_beta1), ("--adam-beta2", optimization.adam_beta2)):
        if beta >= 1:
            yield f"{flag} {beta}: must be below 1"


def _check_parallel(config: TrainConfig) -> Iterator[str]:
    model, parallel = config.model, config.parallel
    yield from caught(check_tensor_parallel, model, parallel)
    yield from caught(check_context_parallel, model, parallel)
    if parallel.pipeline_model_parallel_size > 1:
        yield from caught(stage_layers, model, parallel)
    yield from caught(check_experts, model, parallel)
    yield from caught(check_hybrid, model, parallel)
    yield from caught(check_lora, model, parallel)
    yield from caught(check_batch_invariant, model, parallel)
    yield from caught(check_reference, model, config.objective, config.checkpoint)
    world_size = os.environ.get("WORLD_SIZE", "1")
    yield from caught(check_world_size, parallel, int(world_size) if world_size.isdecimal() else 1)


def _check_hf(config: TrainConfig) -> Iterator[str]:
    checkpoint = config.checkpoint
    if checkpoint.load_hf is not None and checkpoint.load is not None:
        yield "--load-hf conflicts with --load; keep one of them"
