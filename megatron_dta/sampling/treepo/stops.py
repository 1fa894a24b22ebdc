"""Rules that end a path: end of sequence, an answer in its text, length.

The rules are checked after a segment has been decoded. All decoded tokens are kept, so a path always ends at a node. A
rule that depends only on the path itself ends independent rollouts at the same places, so trees and independent
rollouts have the same distribution.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_dta.core.common.errors import InputError
from megatron_dta.sampling.treepo.tree import EndReason, SampledTree

Decode = Callable[[Sequence[int] | np.ndarray], str]


@dataclass(frozen=True)
class StopRules:
    """The rules of a run.

    Attributes:
        decode: converts token ids to text; required by the rules that inspect text.
        answer: whether the text of a response contains an answer; None: not checked.
    """

    decode: Decode | None = None
    answer: Callable[[str], bool] | None = None

    def end_of(self, tree: SampledTree, node: int, ended: bool, max_response_tokens: int) -> EndReason | None:
        """Why the path ends at ``node``, None if it continues. ``ended``: its last token is an end of sequence."""
        if ended:
            return EndReason.EOS
        if self.answer is not None and self.answer(self._text(tree, tree.lineage(node)[1:])):
            return EndReason.ANSWER
        if tree.response_length(node) >= max_response_tokens:
            return EndReason.LENGTH
        return None

    def _text(self, tree: SampledTree, nodes: list[int]) -> str:
        assert self.decode is not None
        return self.decode(np.concatenate([tree.nodes[i].token_ids[: tree.nodes[i].num_sampled] for i in nodes]))


def boxed_answer(text: str) -> str | None:
    """Content of the last complete ``\\boxed{...}`` with balanced braces; None if there is none."""
    answer = None
    for match in re.finditer(r"\\boxed\s*\{", text):
        depth, begin = 1, match.end()
        for end in range(begin, len(text)):
            depth += (text[end] == "{") - (text[end] == "}")
            if depth == 0:
                answer = text[begin:end]
                break
    return answer


def answer_rule(pattern: str | None) -> Callable[[str], bool] | None:
    if pattern is None:
        return None
    if pattern == "boxed":
        return lambda text: boxed_answer(text) is not None
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise InputError(f"--treepo-answer-pattern {pattern}: not a regular expression: {error}") from None
    return lambda text: expression.search(text) is not None
