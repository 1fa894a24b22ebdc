"""Translates the flags of DAS into settings of servers that draft from suffixes, and counts what they accept.

    flag                  vLLM: --speculative-config           SGLang
    --das-draft-tokens    num_speculative_tokens               --speculative-num-draft-tokens, one more: the sampled one
    --das-depth           suffix_decoding_max_tree_depth       --speculative-ngram-max-trie-depth
    --das-max-tokens      suffix_decoding_max_cached_requests  --speculative-ngram-external-corpus-max-tokens
    --das-window          suffix_decoding_max_cached_requests  the corpus of ``sampling.server_corpus``

Names and meanings are those of vLLM 0.14 to 0.33 (method ``suffix``: config/speculative.py, and its page Suffix
Decoding) and of SGLang 0.5.11 to 0.5.23 (algorithm ``NGRAM``: its server arguments, pull requests 21425 and 22199).
Neither has a counterpart of ``--das-budget``.

**vLLM** keeps its responses and evicts the oldest ones; they survive new weights and a reset of the prefix cache. So
every server has its own window of recent rollouts, bounded by a number of requests. The length of a draft after a match
of m tokens and the minimum probability of a draft are those of the drafter in this process. (With Model Runner V2, vLLM
drafts on the GPU and always the full number of tokens: choose a smaller --das-draft-tokens there, and add the options
that its page names. Before that version it needs the package arctic-inference.)

**SGLang** keeps a trie of what it is decoding and clears it with its prefix cache at every update of weights. In
addition it searches corpora, loaded at the start or at run time, with suffix automata. Some nodes of each draft are
reserved for them and divided by their number, so only one corpus is loaded at a time. ``PROB`` takes the most frequent
continuation, as DAS does.

A step of a sequence yields the accepted tokens and one more. On both kinds of servers the number of steps is therefore
the number of tokens minus the number of accepted ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_dta.common.http.replies import shortened, shown
from megatron_dta.sampling.speculation.suffix_forest import DraftParams
from megatron_dta.training.config import TrainConfig

# A server tokenizes the corpus' text again, which may give a few more tokens than were sampled.
_CORPUS_SLACK = 1.25


@dataclass(frozen=True)
class ServerSpeculation:
    """The settings of servers that draft according to ``--das-*``.

    Attributes:
        draft_tokens, depth, max_tokens: the flags.
        cached_requests: number of responses that one vLLM server keeps.
    """

    draft_tokens: int
    depth: int
    max_tokens: int
    cached_requests: int

    @classmethod
    def of(cls, config: TrainConfig) -> ServerSpeculation:
        """The settings of a run; the requests of the window are divided among its servers."""
        sampling, das = config.sampling, config.speculation
        prompts = sampling.over_sampling_batch_size or sampling.rollout_batch_size
        if config.filtering.dynamic_sampling:  # the cache contains the responses of every round
            prompts *= config.filtering.dynamic_sampling_max_rounds
        servers = max(1, len(sampling.rollout_server_url or ()))
        window = -(-das.das_window * prompts * sampling.n_samples_per_prompt // servers)
        fitting = max(1, das.das_max_tokens // sampling.rollout_max_response_len)
        return cls(das.das_draft_tokens, das.das_depth, das.das_max_tokens, min(window, fitting))

    def vllm(self) -> dict[str, Any]:
        """vLLM's ``--speculative-config``."""
        draft = DraftParams()
        return {
            "method": "suffix",
            "num_speculative_tokens": self.draft_tokens,
            "suffix_decoding_max_tree_depth": self.depth,
            "suffix_decoding_max_cached_requests": self.cached_requests,
            "suffix_decoding_max_spec_factor": draft.factor,
            "suffix_decoding_min_token_prob": draft.min_probability,
        }

    def sglang(self) -> dict[str, Any]:
        """SGLang's options, by their names in ``/server_info``."""
        return {
            "speculative_algorithm": "NGRAM",
            "speculative_num_draft_tokens": self.draft_tokens + 1,
            "speculative_ngram_max_trie_depth": self.depth,
            "speculative_ngram_match_type": "PROB",
            # Leaves at least one of two nodes to the trie.
            "speculative_ngram_external_sam_budget": max(1, self.draft_tokens // 2),
            "speculative_ngram_external_corpus_max_tokens": int(self.max_tokens * _CORPUS_SLACK),
        }

    def vllm_differs(self, found: Mapping[str, Any] | None) -> str | None:
        """How a server's ``speculative_config`` differs from the flags; None if it agrees."""
        names = ("method", "num_speculative_tokens", "suffix_decoding_max_tree_depth")
        return _first_difference({name: self.vllm()[name] for name in names}, found or {})

    def sglang_differs(self, found: Mapping[str, Any]) -> str | None:
        """How a server's ``/server_info`` differs from the flags; None if it agrees."""
        wanted = self.sglang()
        names = ("speculative_algorithm", "speculative_num_draft_tokens", "speculative_ngram_max_trie_depth")
        different = _first_difference({name: wanted[name] for name in names}, found)
        if different is not None:
            return different
        if not found.get("speculative_ngram_external_sam_budget"):
            return "speculative_ngram_external_sam_budget is 0, so corpora would not be searched"
        most = found.get("speculative_ngram_external_corpus_max_tokens", 0)
        if not isinstance(most, int) or most < self.max_tokens:
            return (
                f"speculative_ngram_external_corpus_max_tokens is {_told(most)}, below --das-max-tokens "
                f"{self.max_tokens}"
            )
        return None


@dataclass(frozen=True)
class DraftCounts:
    """Tokens from servers, and how many tokens they drafted and accepted for them."""

    given: int = 0
    drafted: int = 0
    accepted: int = 0

    def __add__(self, other: DraftCounts) -> DraftCounts:
        return DraftCounts(self.given + other.given, self.drafted + other.drafted, self.accepted + other.accepted)

    def __sub__(self, other: DraftCounts) -> DraftCounts:
        return DraftCounts(self.given - other.given, self.drafted - other.drafted, self.accepted - other.accepted)

    def metrics(self) -> dict[str, float]:
        """Metrics for the training log, named as those of the in-process engine."""
        steps = self.given - self.accepted
        return {
            "speculation_tokens_per_forward": self.given / steps if steps > 0 else 0.0,
            "speculation_generated_tokens": float(self.given),
            "speculation_drafted_tokens": float(self.drafted),
            "speculation_accepted_tokens": float(self.accepted),
            "speculation_wasted_tokens": float(self.drafted - self.accepted),
            "speculation_acceptance": self.accepted / self.drafted if self.drafted else 0.0,
        }


def _first_difference(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> str | None:
    for name, value in wanted.items():
        if found.get(name) != value:
            return f"{name} is {_told(found.get(name))} and not {value}"
    return None


def _told(value: Any) -> str:
    return shortened(str(value)) if value is None or isinstance(value, (str, bool)) else shown(value)
