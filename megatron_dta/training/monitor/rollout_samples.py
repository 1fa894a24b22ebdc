"""Prints some rollouts of a batch as text on the console (``--log-rollout-samples``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from megatron_dta.core.rollouts.record import Rollout
from megatron_dta.core.rollouts.sample_granularity import mask_runs
from megatron_dta.sampling.prompts.tokenizer import Tokenizer

# Characters shown: of the prompt its end, of the response half from its start and half from its end.
PROMPT_CHARACTERS, RESPONSE_CHARACTERS = 300, 1200


class RolloutSamples:
    """Prints rollouts of a batch, as token ids if there is no tokenizer.

    Args:
        count: number of rollouts to print.
        interval: steps between progress lines. Only the first batch and batches with a progress line are shown.
        num_steps: number of optimizer steps per rollout batch.
    """

    def __init__(
        self, count: int, interval: int, num_steps: int, tokenizer: Tokenizer | None, report: Callable[[str], None]
    ) -> None:
        self._count, self._interval, self._num_steps = count, interval, num_steps
        self._tokenizer, self._report = tokenizer, report

    def show(self, iteration: int, rollouts: Sequence[Rollout]) -> None:
        """Print some of ``rollouts`` if due. Step ``iteration`` is the first one that trains them."""
        if not rollouts or (iteration > 1 and -iteration % self._interval >= self._num_steps):
            return
        for index in chosen_samples(rollouts, self._count):
            rollout = rollouts[index]
            begin = int(mask_runs(rollout.loss_mask)[0][0])
            reward = "" if rollout.reward is None else f", reward {rollout.reward:.4g}"
            self._report(f"step {iteration}, group {shown(rollout.group_id)}, {len(rollout) - begin} tokens{reward}")
            prompt, rest = self._text(rollout.token_ids[:begin]), self._text(rollout.token_ids[begin:])
            self._report("  prompt    " + _indented(_end(prompt, PROMPT_CHARACTERS)))
            self._report("  response  " + _indented(_ends(rest, RESPONSE_CHARACTERS)))

    def _text(self, token_ids: np.ndarray) -> str:
        if self._tokenizer is None:
            return " ".join(map(str, token_ids.tolist()))
        return shown(self._tokenizer.decode(token_ids))


def chosen_samples(rollouts: Sequence[Rollout], count: int) -> list[int]:
    """Indices of ``count`` rollouts, evenly spread from the lowest to the highest reward; in order without rewards."""
    order = sorted(range(len(rollouts)), key=lambda i: 0.0 if rollouts[i].reward is None else rollouts[i].reward)
    if count == 1:
        return [order[len(order) // 2]]
    places = np.linspace(0, len(order) - 1, min(count, len(order))).round().astype(int)
    return [order[place] for place in places]


def shown(text: str) -> str:
    """Escape characters that would move the cursor or change colours, except line breaks and tabs."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def _indented(text: str) -> str:
    return text.replace("\n", "\n            ")


def _end(text: str, most: int) -> str:
    return text if len(text) <= most else f"[{len(text) - most} characters] {text[-most:]}"


def _ends(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} [{len(text) - 2 * half} characters] {text[-half:]}"
