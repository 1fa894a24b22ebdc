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
from types import MappingProxyType

import numpy as np

from megatron_dta.common.entry_point import run_entry_point
from megatron_dta.common.keyed_random import Domain, keyed_permutation
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.rollouts.load import write_rollouts
from megatron_dta.core.rollouts.record import Rollout
from megatron_dta.sampling.prompts.load import Prompt, prompts_at
from megatron_dta.sampling.prompts.tokenizer import CharacterTokenizer

OPERATORS = {"+": np.add, "-": np.subtract, "*": np.multiply}
_COMMUTATIVE = "+*"
# A million problems for each operator are listed in memory.
_LARGEST_OPERAND = 999
_MAX_TRAIN_PROBLEMS = 2**16


@dataclass
class ArithmeticTask:
    """The problems, their split and their tokenizer.

    Attributes:
        max_operand: operands are 0 .. max_operand.
        operators: which of ``+``, ``-``, ``*`` occur.
        seed: seed of the split; runs with different training seeds are evaluated on the same problems.
        held_out_problems: number of held-out problems (default: a fifth of all, at most 256).
    """

    max_operand: int = 99
    operators: str = "+"
    seed: int = 0
    held_out_problems: int | None = None
    tokenizer: CharacterTokenizer = field(default_factory=CharacterTokenizer)

    def __post_init__(self) -> None:
        if not 1 <= self.max_operand <= _LARGEST_OPERAND:
            raise InputError(f"--arithmetic-max-operand must be 1 to {_LARGEST_OPERAND}, got {self.max_operand}")
        if (
            not self.operators
            or set(self.operators) - OPERATORS.keys()
            or len(set(self.operators)) < len(self.operators)
        ):
            raise InputError(
                f"--arithmetic-operators must be some of {''.join(OPERATORS)}, each once, got {self.operators!r}"
            )
        if self.held_out_problems is None:
            self.held_out_problems = min(256, max(1, len(self._problems) // 5))
        # With all mirrors left out, a held-out problem costs training at most two.
        if not 1 <= self.held_out_problems <= (len(self._problems) - 1) // 2:
            raise InputError(
                f"{self.held_out_problems} of {len(self._problems)} arithmetic problems cannot be held out"
            )

    @property
    def longest_answer_tokens(self) -> int:
        """Tokens of the longest right answer, the end of sequence included."""
        return 1 + max(len(str(answer)) for *_, answer in self._problems)

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
    def _problems(self) -> list[tuple[int, str, int, int]]:
        """Every problem (left, operator, right, answer)."""
        operands = np.arange(self.max_operand + 1)
        left, right = (grid.ravel() for grid in np.meshgrid(operands, operands, indexing="ij"))
        problems: list[tuple[int, str, int, int]] = []
        for operator in self.operators:
            answers = OPERATORS[operator](left, right)
            problems += zip(left.tolist(), [operator] * left.size, right.tolist(), answers.tolist(), strict=True)
        return problems

    @cached_property
    def _split(self) -> tuple[list[tuple[int, str, int, int]], list[tuple[int, str, int, int]]]:
        """(held-out, training) problems; mirrors of held-out problems are in neither."""
        order = [self._problems[index] for index in keyed_permutation(self.seed, 0, len(self._problems), Domain.SPLIT)]
        held_out = order[: self.held_out_problems]
        held_out_keys = {_mirror_key(problem) for problem in held_out}
        return held_out, [problem for problem in order if _mirror_key(problem) not in held_out_keys]

    def _prompt(self, problem: tuple[int, str, int, int]) -> Prompt:
        left, operator, right, answer = problem
        text = f"{left}{operator}{right}="
        record = {"id": text, "question": text, "answer": answer}
        return Prompt(text, self.tokenizer.encode(text), MappingProxyType(record))


def _mirror_key(problem: tuple[int, str, int, int]) -> tuple[int, str, int]:
    left, operator, right, _ = problem
    if operator in _COMMUTATIVE:
        left, right = min(left, right), max(left, right)
    return left, operator, right


def main() -> int:
    """Write solved training problems as stored rollouts."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--output", required=True, help="rollout file to write, .jsonl or .parquet")
    parser.add_argument("--count", type=int, default=4096, help="number of rollouts (default: %(default)s)")
    parser.add_argument("--arithmetic-max-operand", type=int, default=99, help="(default: %(default)s)")
    parser.add_argument("--arithmetic-operators", default="+", help="some of + - * (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the problems (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.count < 1:
        raise InputError(f"--count must be at least 1, got {arguments.count}")
    task = ArithmeticTask(arguments.arithmetic_max_operand, arguments.arithmetic_operators)
    write_rollouts(arguments.output, task.warmup_rollouts(arguments.count, arguments.seed))
    print(f"{arguments.count} solved problems with operands up to {task.max_operand} -> {arguments.output}")
    return 0


if __name__ == "__main__":
    run_entry_point(main)
