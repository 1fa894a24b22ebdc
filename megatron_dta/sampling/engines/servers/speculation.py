"""What the flags of DAS mean to servers that draft from suffixes themselves, and what was accepted there.

    flag                  vLLM: --speculative-config           SGLang
    --das-draft-tokens    num_speculative_tokens               --speculative-num-draft-tokens, one more: the sampled one
    --das-depth           suffix_decoding_max_tree_depth       --speculative-ngram-max-trie-depth
    --das-max-tokens      suffix_decoding_max_cached_requests  --speculative-ngram-external-corpus-max-tokens
    --das-window          suffix_decoding_max_cached_requests  the corpus of ``sampling.server_corpus``

Names and meanings are those of vLLM 0.14 to 0.33 (method ``suffix``: config/speculative.py, and its page Suffix
Decoding) and of SGLang 0.5.11 to 0.5.23 (algorithm ``NGRAM``: its server arguments, pull requests 21425 and 22199).
Neither has a counterpart of ``--das-budget``.

**vLLM** keeps the responses that it has given, the oldest leave first; new weights and a reset of its prefix cache
leave them. So every server has its window of recent rollouts by itself, bounded by a number of requests. How far a
match of m tokens allows to draft, and the least probability of a draft, are those of the drafter in this process. (From
Model Runner V2 on, vLLM drafts on the GPU, always the full number of tokens: choose a smaller --das-draft-tokens there,
and add what its page names. Before, it needs the package arctic-inference.)

**SGLang** keeps a trie of what it is decoding, and forgets it with its prefix cache: at every update of weights. Beside
it there is room for corpora, loaded at the start or at run time, which it searches with suffix automata; some nodes of
each draft are set aside for them, divided by the number of corpora, so there is one at a time here. ``PROB`` takes the
most frequent continuation, as DAS does.

A step of a sequence gives the tokens that it has accepted and one more. So the tokens that were given, less those
accepted, are the steps, on either kind of server.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_dta.config import TrainConfig
from megatron_dta.sampling.engines.servers.replies import shortened, shown
from megatron_dta.speculation.suffix_forest import DraftParams

# A server counts tokens of the corpus' text, which may be cut into a few more than were sampled.
_CORPUS_SLACK = 1.25


@dataclass(frozen=True)
class ServerSpeculation:
    """The settings of servers that draft as ``--das-*`` says.

    Attributes:
        draft_tokens, depth, max_tokens: the flags.
        cached_requests: responses that one vLLM server keeps.
    """

    draft_tokens: int
    depth: int
    max_tokens: int
    cached_requests: int

    @classmethod
    def of(cls, config: TrainConfig) -> ServerSpeculation:
        """As the flags of a run say; the window's requests are divided by its servers."""
        sampling, das = config.sampling, config.speculation
        prompts = sampling.over_sampling_batch_size or sampling.rollout_batch_size
        if config.filtering.dynamic_sampling:  # every round's responses are in the cache
            prompts *= config.filtering.dynamic_sampling_max_rounds
        servers = max(1, len(sampling.rollout_server_url or ()))
        window = -(-das.das_window * prompts * sampling.n_samples_per_prompt // servers)
        fitting = max(1, das.das_max_tokens // sampling.rollout_max_response_len)
        return cls(das.das_draft_tokens, das.das_depth, das.das_max_tokens, min(window, fitting))

    @property
    def corpus_max_tokens(self) -> int:
        """Tokens that an SGLang server must take at most."""
        return int(self.max_tokens * _CORPUS_SLACK)

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
        """SGLang's options, by the names that its ``/server_info`` has for them."""
        return {
            "speculative_algorithm": "NGRAM",
            "speculative_num_draft_tokens": self.draft_tokens + 1,
            "speculative_ngram_max_trie_depth": self.depth,
            "speculative_ngram_match_type": "PROB",
            # At least one node is left to the trie where there are two.
            "speculative_ngram_external_sam_budget": max(1, self.draft_tokens // 2),
            "speculative_ngram_external_corpus_max_tokens": self.corpus_max_tokens,
        }

    def vllm_differs(self, found: Mapping[str, Any] | None) -> str | None:
        """How a server's ``speculative_config`` does not fit the flags; None if it does."""
        names = ("method", "num_speculative_tokens", "suffix_decoding_max_tree_depth")
        return _first_difference({name: self.vllm()[name] for name in names}, found or {})

    def sglang_differs(self, found: Mapping[str, Any]) -> str | None:
        """How a server's ``/server_info`` does not fit the flags; None if it does."""
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
    """Tokens that servers have given, and how many they had drafted and accepted for them."""

    given: int = 0
    drafted: int = 0
    accepted: int = 0

    def __add__(self, other: DraftCounts) -> DraftCounts:
        return DraftCounts(self.given + other.given, self.drafted + other.drafted, self.accepted + other.accepted)

    def __sub__(self, other: DraftCounts) -> DraftCounts:
        return DraftCounts(self.given - other.given, self.drafted - other.drafted, self.accepted - other.accepted)

    def metrics(self) -> dict[str, float]:
        """For the training log, named as those of the engine in this process."""
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
