"""Reads stored rollouts, shuffles them by the seed in every epoch, and divides them into optimizer steps.

Related rollouts stay in one step. For policy gradients these are the rollouts of a group, which share a prompt and
whose rewards are compared. For supervised training they are those of a trajectory, whose turns share their history. The
rollouts of step k depend only on the seed and k, so a resumed run needs no reader state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from megatron_dta.common.keyed_random import keyed_permutation
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.config import TreeConfig
from megatron_dta.core.engine import TreeEngine, prepare_batch
from megatron_dta.core.objectives.fields import Objective
from megatron_dta.core.planning.step.sample import TrainingSample
from megatron_dta.core.rollouts.load import load_rollouts
from megatron_dta.core.rollouts.record import Rollout
from megatron_dta.sampling.prompts.text_rollouts import TextReader, holds_text
from megatron_dta.sampling.prompts.tokenizer import Tokenizer, build_tokenizer
from megatron_dta.sampling.sources.batch_source import Evaluation, RolloutSource
from megatron_dta.sampling.task import chat_template
from megatron_dta.training.config import TrainConfig

# Rollouts with stored advantages need no group; then all have this group name, possibly after a file's number.
_UNNAMED_GROUP = Rollout.__dataclass_fields__["group_id"].default


class StoredRollouts(RolloutSource):
    """Returns ``rollouts`` in steps of at most ``batch_size``.

    Args:
        units: name of each rollout's unit; rollouts of one unit stay in one step.
        end_id: the token that ends text, if files hold some.

    Raises:
        InputError: a unit has more than ``batch_size`` rollouts.
    """

    def __init__(
        self, rollouts: Sequence[Rollout], units: Sequence[str], batch_size: int, seed: int, end_id: int | None = None
    ) -> None:
        self.end_id = end_id
        members: dict[str, list[int]] = {}
        for index, unit in enumerate(units):
            members.setdefault(unit, []).append(index)
        largest = max(members, key=lambda unit: len(members[unit]))
        if len(members[largest]) > batch_size:
            raise InputError(
                f"{largest} has {len(members[largest])} rollouts that stay in one step, but --global-batch-size is "
                f"{batch_size}; raise it"
            )
        self._rollouts, self._units = rollouts, list(members.values())
        self._batch_size, self._seed = batch_size, seed
        # First step of each epoch so far. The number of steps in an epoch depends on its order.
        self._epoch_start = [0]

    @property
    def rollouts(self) -> Sequence[Rollout]:
        """All rollouts, in the order of the files."""
        return self._rollouts

    def next_batch(self, step: int) -> list[Rollout]:
        while True:
            epoch = int(np.searchsorted(self._epoch_start, step, side="right")) - 1
            batches = self._epoch(epoch)
            if epoch + 1 == len(self._epoch_start):
                self._epoch_start.append(self._epoch_start[epoch] + len(batches))
            if step < self._epoch_start[epoch + 1]:
                return [self._rollouts[index] for index in batches[step - self._epoch_start[epoch]]]

    def epoch_sizes(self, epoch: int) -> list[int]:
        """Number of rollouts in each step of an epoch. Steps hold whole units; the last step holds the rest."""
        return [len(batch) for batch in self._epoch(epoch)]

    def _epoch(self, epoch: int) -> list[list[int]]:
        """The steps of an epoch as indices: units in shuffled order, as many per step as fit."""
        batches: list[list[int]] = [[]]
        for unit in keyed_permutation(self._seed, epoch, len(self._units)):
            members = self._units[unit]
            if batches[-1] and len(batches[-1]) + len(members) > self._batch_size:
                batches.append([])
            batches[-1] += members
        return batches


class StoredEvaluation(Evaluation):
    """Evaluates ``loss``: the mean negative logprob of the trained tokens of held-out rollouts, divided over ranks."""

    def __init__(self, engine: TreeEngine, rollouts: Sequence[Rollout], tree: TreeConfig, batch_size: int) -> None:
        self._engine = engine
        samples = [TrainingSample(rollout.token_ids, rollout.loss_mask) for rollout in rollouts]
        self._trained_tokens = sum(sample.num_trained for sample in samples)
        first, stride = engine.mesh.data_rank * batch_size, engine.mesh.data_size * batch_size
        pipeline = engine.pipeline(tree.tree_segment_tokens)
        starts = range(first, first + len(samples), stride)  # as many on each rank: experts are shared
        self._batches = [prepare_batch(samples[i : i + batch_size], tree, pipeline=pipeline) for i in starts]

    def evaluate(self, step: int) -> dict[str, float]:
        """Return the mean over all trained tokens. The forward pass is the same as in training, including trees."""
        total = sum(
            float(np.sum(logprobs, dtype=np.float64))
            for batch in self._batches
            for logprobs in self._engine.compute_logprobs(batch)
        )
        return {"loss": -sum(self._engine.mesh.gather_over_data(total)) / self._trained_tokens}


def load_files(
    files: Sequence[str], config: TrainConfig, require: Sequence[str] = (), text: TextReader | None = None
) -> list[Rollout]:
    """Read rollouts from several files and check them against the model. Groups of different files are kept separate.

    Args:
        text: reader for files that hold text; with None such files are refused.

    Raises:
        InputError: a file cannot be read or does not fit the model.
    """
    rollouts: list[Rollout] = []
    vocab_size = config.model.vocab_size
    if vocab_size is None and config.data.rollouts:
        vocab_size = stored_tokenizer(config).vocab_size  # config.checks: one of the two is given
    for number, file in enumerate(files):
        if holds_text(file, config.sampling.input_key):
            of_file = _load_text(file, config, require, text)
        else:
            of_file = load_rollouts(
                file,
                sample_granularity=config.data.rollout_sample_granularity,
                vocab_size=vocab_size,
                max_length=_longest(config),
                require=require,
            )
        if len(files) > 1:
            of_file = [replace(rollout, group_id=f"{number}:{rollout.group_id}") for rollout in of_file]
        rollouts += of_file
    return rollouts


def _load_text(file: str, config: TrainConfig, require: Sequence[str], text: TextReader | None) -> list[Rollout]:
    if text is None:
        raise InputError(
            f"{file}: holds text; --rollouts and --eval-rollouts read it with --tokenizer-type and --tokenizer-model "
            "(and --apply-chat-template for messages), other flags need token_ids"
        )
    name = config.objective.objective
    if name not in ("sft", "dpo") or config.filtering.rejection_sampling is not None:
        what = "--rejection-sampling" if name in ("sft", "dpo") else f"--objective {name}"
        raise InputError(
            f"{file}: holds text without rewards, which {what} needs; give --objective sft or dpo, or rollouts with "
            "token_ids and rewards"
        )
    return text.read(file, pairs=name == "dpo")


def _longest(config: TrainConfig) -> int:
    return config.data.seq_length or config.model.max_position_embeddings


def stored_tokenizer(config: TrainConfig) -> Tokenizer | None:
    """The tokenizer for stored rollouts, if one is given. It encodes text in files and decodes tokens for output."""
    sampling = config.sampling
    if sampling.tokenizer_type is None:
        return None
    checkpoint = config.checkpoint.hf_checkpoint or config.checkpoint.load
    kind, file = sampling.tokenizer_type, sampling.tokenizer_model
    ends = None if sampling.eos_id is None else tuple(sampling.eos_id)
    return _tokenizer(kind, file, ends, config.model.vocab_size, checkpoint)


# Reading a large vocabulary takes a second.
_tokenizer = lru_cache(maxsize=2)(build_tokenizer)


def text_reader(config: TrainConfig) -> TextReader | None:
    """The reader for text in stored rollouts; None if no file holds text or there is no tokenizer."""
    sampling = config.sampling
    if sampling.tokenizer_type is None or not _text_files(config):
        return None
    template = chat_template(sampling)
    sample_granularity = config.data.rollout_sample_granularity
    return TextReader(
        stored_tokenizer(config), template, sampling.input_key, sampling.label_key, sample_granularity, _longest(config)
    )


def _text_files(config: TrainConfig) -> list[str]:
    files = [*(config.data.rollouts or []), *(config.data.eval_rollouts or [])]
    return [file for file in files if holds_text(file, config.sampling.input_key)]


def check_text_flags(config: TrainConfig) -> None:
    """Refuse flags for text if no file of rollouts holds text."""
    sampling, logging = config.sampling, config.logging
    if _text_files(config):
        return
    given = {
        "--apply-chat-template": sampling.apply_chat_template,
        "--input-key": sampling.input_key is not None,
        "--label-key": sampling.label_key is not None,
    }
    # A tokenizer is allowed if it comes from --load-hf or decodes rollouts that are saved.
    if config.checkpoint.hf_checkpoint is None and not logging.save_rollouts_interval:
        given["--tokenizer-type"] = sampling.tokenizer_type is not None
    for flag, present in given.items():
        if present:
            raise InputError(
                f"{flag} has no effect: the files of --rollouts hold token ids or no known text field (messages, "
                "conversations, prompt, ...); leave it out, or name the field with --input-key"
            )


def load_stored_rollouts(config: TrainConfig, objective: Objective, text: TextReader | None) -> StoredRollouts:
    """Build the source for ``--rollouts``. All files are read and checked immediately, those of text with ``text``."""
    require = objective.requires
    if objective.is_policy_gradient and config.objective.needs_rollout_logprobs:
        require = (*require, "logprobs")
    if config.filtering.rejection_sampling is not None:
        require = (*require, "reward")
    if config.model.moe_routing_replay:
        require = (*require, "routed_experts")
    rollouts = load_files(config.data.rollouts or [], config, require, text)
    by_group = config.filtering.rejection_sampling == "best"
    units = [_unit(rollout, index, objective, by_group) for index, rollout in enumerate(rollouts)]
    end_id = None if text is None else text.tokenizer.eos_id
    return StoredRollouts(rollouts, units, config.data.global_batch_size or 1, config.optimization.seed, end_id)


def _unit(rollout: Rollout, index: int, objective: Objective, by_group: bool) -> str:
    """Name of the unit (group or trajectory) that a rollout belongs to."""
    grouped = rollout.advantages is None or rollout.group_id.rpartition(":")[2] != _UNNAMED_GROUP
    if (objective.is_policy_gradient or objective.pair_function is not None or by_group) and grouped:
        return f"group {rollout.group_id}"
    return f"trajectory {rollout.trajectory_id or index} of group {rollout.group_id}"
