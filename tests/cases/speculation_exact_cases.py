"""Drafters that are right, wrong or random, and gates that do not depend on a clock."""

import numpy as np

from megatron_dta.sampling.in_process.drafting import Drafting
from megatron_dta.sampling.in_process.suffix_drafting import SuffixDrafting
from megatron_dta.sampling.speculation.drafter import DrafterParams
from megatron_dta.sampling.speculation.forward_cost import ForwardCost
from megatron_dta.sampling.speculation.gate import SpeculationGate
from megatron_dta.sampling.speculation.speculator import Speculator
from megatron_dta.sampling.speculation.suffix_forest import DraftParams
from sampling_cases import VOCAB


class Adversary(Drafting):
    """Drafts that are right, wrong or random: what a request will sample is known by (its context, its key)."""

    def __init__(self, kind: str, answers: dict, seed: int = 0) -> None:
        self.kind, self.answers, self.rng = kind, answers, np.random.default_rng(seed)
        self.drafted = self.accepted = 0

    def propose(self, rows, most) -> tuple[np.ndarray, np.ndarray]:
        drafts = [self._draft(row, limit) for row, limit in zip(rows, most.tolist(), strict=True)]
        lengths = np.array([len(draft) for draft in drafts])
        tokens = np.full((len(drafts), lengths.max() + 1), -7, np.int32)
        tokens[np.arange(tokens.shape[1]) < lengths[:, None]] = np.concatenate(drafts)
        return tokens, lengths

    def _draft(self, row, most: int) -> np.ndarray:
        answer = self.answers[(row.generation.token_ids.tobytes(), row.generation.key)]
        done = row.num_tokens - row.context_length
        # Beyond the end too, where an engine must not look: the tokens there are noise.
        rest = np.concatenate([answer[done:], self.rng.integers(0, VOCAB, 5)])[: max(most, 0)]
        kind = self.rng.choice(["right", "wrong", "random"]) if self.kind == "mixed" else self.kind
        if kind == "wrong":
            rest = (rest + 1) % VOCAB
        elif kind == "random":
            rest = rest[: self.rng.integers(0, len(rest) + 1)].copy()
            if len(rest):
                rest[self.rng.integers(0, len(rest)) :] = self.rng.integers(0, VOCAB)
        return rest.astype(np.int32)

    def verified(self, done) -> None:
        if done.drafted is not None:
            self.drafted += int(done.drafted.sum())
            self.accepted += sum(len(tokens) - 1 for tokens in done.appended)


def answers_of(results: dict) -> dict:
    return {(request.token_ids.tobytes(), request.key): result.token_ids for request, result in results.values()}


def clockless(cost: ForwardCost) -> SpeculationGate:
    """A gate that uses ``cost`` instead of a clock, and counts the whole cost of a forward for the last sample."""
    return SpeculationGate(cost, cost, prices_whole=True)


def suffix_drafting(budget: str = "straggler", follows_clock: bool = False) -> SuffixDrafting:
    """Cheap tokens, so that much is drafted."""
    drafter = DrafterParams(depth=8, early_depth=2, draft=DraftParams(min_probability=0.05, width=6))
    gate = clockless(ForwardCost(1.0, 1e-3, 0.0, 0.0))
    return SuffixDrafting(Speculator(drafter, gate, budget), follows_clock)
