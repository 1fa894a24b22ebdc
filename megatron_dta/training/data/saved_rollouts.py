"""Saves the rollouts of selected steps, with rewards, advantages and decoded text.

SAVE/rollouts/step_0000100.jsonl         the step's rollouts, for ``megatron_dta.core.rollouts``
SAVE/rollouts/step_0000100_tokens.json   {"17": " the", ...}: the text of each token id, if there is a tokenizer
SAVE/rollouts/step_0000100_texts.json    [[[9, "What is 1+1?", false], ...], ...]: each rollout's text in runs of tokens
                                         that are either all trained or all untrained: number of tokens, text, whether
                                         it is a special token. A single token may be part of a character, so runs are
                                         decoded as a whole.

The files are written when the step is prepared. Later would be too late, since checkpoints do not keep the rewards of
the step's samples. A run that continues in the middle of a rollout batch has therefore already written them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.common.files import replacing
from megatron_dta.core.rollouts.load import write_rollouts
from megatron_dta.core.rollouts.record import Rollout

if TYPE_CHECKING:
    # Reports import this module without Megatron.
    from megatron_dta.sampling.prompts.tokenizer import Tokenizer
    from megatron_dta.training.data.step import StepSamples

FOLDER = "rollouts"
TOKENS_SUFFIX = "_tokens.json"
TEXTS_SUFFIX = "_texts.json"


class RolloutFiles:
    """Writes the rollouts of the first step and of every ``interval``-th step. Only one process creates it.

    Args:
        save: folder of the run.
        tokenizer: decodes the tokens; None if only token ids are known.
    """

    def __init__(self, save: str | Path, interval: int, tokenizer: Tokenizer | None) -> None:
        self._folder, self._interval, self._tokenizer = Path(save) / FOLDER, interval, tokenizer

    def write(self, first_iteration: int, steps: Sequence[StepSamples]) -> None:
        """Write the rollouts of those ``steps`` that are due; the first of them will be step ``first_iteration``."""
        for iteration, step in enumerate(steps, start=first_iteration):
            if step.rollouts is not None and (iteration == 1 or iteration % self._interval == 0):
                self._write(iteration, trained_rollouts(step))

    def _write(self, iteration: int, rollouts: list[Rollout]) -> None:
        path = self._folder / f"step_{iteration:07d}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{self._folder}: the folder cannot be created ({error.strerror})") from error
        write_rollouts(path.with_suffix(".jsonl"), rollouts)
        if self._tokenizer is None:
            return
        ids = np.unique(np.concatenate([rollout.token_ids for rollout in rollouts])).tolist()
        texts = {str(token): self._tokenizer.special_text(token) or self._tokenizer.decode([token]) for token in ids}
        runs = [text_runs(rollout, self._tokenizer) for rollout in rollouts]
        for suffix, content in ((TOKENS_SUFFIX, texts), (TEXTS_SUFFIX, runs)):
            with replacing(path.with_name(path.name + suffix)) as temporary:
                temporary.write_text(json.dumps(content), encoding="utf-8")


def text_runs(rollout: Rollout, tokenizer: Tokenizer) -> list[tuple[int, str, bool]]:
    """Split a rollout into runs of trained or untrained tokens: (number of tokens, text, is one special token)."""
    ids = rollout.token_ids.tolist()
    special = [tokenizer.special_text(token) for token in ids]
    runs, begin = [], 0
    for end in range(1, len(ids) + 1):
        goes_on = end < len(ids) and special[begin] is None and special[end] is None
        if goes_on and rollout.loss_mask[end] == rollout.loss_mask[begin]:
            continue
        text = special[begin]
        runs.append((end - begin, tokenizer.decode(ids[begin:end]) if text is None else text, text is not None))
        begin = end
    return runs


def trained_rollouts(step: StepSamples) -> list[Rollout]:
    """The rollouts of the step, with the advantages used in training if there are any."""
    assert step.rollouts is not None
    return [
        rollout if sample.advantages is None else replace(rollout, advantages=sample.advantages)
        for rollout, sample in zip(step.rollouts, step.samples, strict=True)
    ]
