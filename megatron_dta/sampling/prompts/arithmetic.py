"""The built-in task: problems such as ``12+7=``, answered in decimal digits and an end-of-sequence token.

All problems with operands up to ``max_operand`` are divided once, by a keyed order, into a training and a held-out
part. A problem and its mirror (``12+7`` and ``7+12``) count as one, so a held-out reward cannot come from memory of
the mirror.

    python -m megatron_dta.sampling.prompts.arithmetic --output warmup.jsonl --count 4096

writes solved training problems as stored rollouts, for a supervised warm-up (``--objective sft --rollouts
warmup.jsonl``).
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from types import MappingProxyType

import numpy as np

from megatron_dta.common.entry_point import run_entry_point
from megatron_dta.common.keyed_random import Domain, keyed_permutation
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.rollouts.load import write_rollouts
from megatron_dta.core.rollouts.record import Rollout
from megatron_dta.sampling.prompts.load import Prompt, prompts_at
from megatron_dta.sampling.prompts.tokenizer import CharacterTokenizer

# A million problems are listed in memory.
_LARGEST_OPERAND = 999
_MAX_TRAIN_PROBLEMS, _MAX_HELD_OUT_PROBLEMS = 2**16, 256


@dataclass
class ArithmeticTask:
    """The problems, their split and their tokenizer.

    Attributes:
        max_operand: operands are 0 .. max_operand.
        seed: seed of the split; runs with different training seeds are evaluated on the same problems.
    """

    max_operand: int = 99
    seed: int = 0
    tokenizer: CharacterTokenizer = field(default_factory=CharacterTokenizer)

    def __post_init__(self) -> None:
        if not 1 <= self.max_operand <= _LARGEST_OPERAND:
            raise InputError(f"--arithmetic-max-operand must be 1 to {_LARGEST_OPERAND}, got {self.max_operand}")

    @property
    def longest_answer_tokens(self) -> int:
        """Tokens of the longest right answer, the end of sequence included."""
        return 1 + len(str(2 * self.max_operand))

    @cached_property
    def train_prompts(self) -> list[Prompt]:
        """Problems to train on, in the keyed order of the split; at most 65,536 of them."""
        return [self._prompt(problem) for problem in self._split[1][:_MAX_TRAIN_PROBLEMS]]

    @cached_property
    def held_out_prompts(self) -> list[Prompt]:
        """Problems that training never sees; any first part of the list is a uniform sample of them."""
        return [self._prompt(problem) for problem in self._split[0]]

    def warmup_rollouts(self, count: int, seed: int = 0) -> list[Rollout]:
        """``count`` solved training problems as rollouts, the answer and its end trained; repeats after an epoch."""
        rollouts = []
        for prompt in prompts_at(self.train_prompts, 0, count, seed):
            answer = np.append(self.tokenizer.encode(str(prompt.record["answer"])), np.int32(self.tokenizer.eos_id))
            token_ids = np.concatenate([prompt.token_ids, answer])
            loss_mask = np.arange(token_ids.size) >= prompt.token_ids.size
            rollouts.append(Rollout(token_ids=token_ids, loss_mask=loss_mask, group_id=prompt.prompt_id))
        return rollouts

    @cached_property
    def _problems(self) -> list[tuple[int, int]]:
        """The operands of every problem."""
        return list(product(range(self.max_operand + 1), repeat=2))

    @cached_property
    def _split(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """(held-out, training) problems; mirrors of held-out problems are in neither."""
        order = [self._problems[index] for index in keyed_permutation(self.seed, 0, len(self._problems), Domain.SPLIT)]
        held_out = order[: min(_MAX_HELD_OUT_PROBLEMS, max(1, len(order) // 5))]
        held_out_keys = set(map(frozenset, held_out))
        return held_out, [problem for problem in order if frozenset(problem) not in held_out_keys]

    def _prompt(self, problem: tuple[int, int]) -> Prompt:
        text = f"{problem[0]}+{problem[1]}="
        record = {"id": text, "question": text, "answer": sum(problem)}
        return Prompt(text, self.tokenizer.encode(text), MappingProxyType(record))


def main() -> int:
    """Write solved training problems as stored rollouts."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--output", required=True, help="rollout file to write, .jsonl or .parquet")
    parser.add_argument("--count", type=int, default=4096, help="number of rollouts (default: %(default)s)")
    parser.add_argument("--arithmetic-max-operand", type=int, default=99, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the problems (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.count < 1:
        raise InputError(f"--count must be at least 1, got {arguments.count}")
    task = ArithmeticTask(arguments.arithmetic_max_operand)
    write_rollouts(arguments.output, task.warmup_rollouts(arguments.count, arguments.seed))
    print(f"{arguments.count} solved problems with operands up to {task.max_operand} -> {arguments.output}")
    return 0


if __name__ == "__main__":
    run_entry_point(main)
