"""Translates the flags of DAS into settings of servers that draft from suffixes.

    flag                  vLLM: --speculative-config           SGLang
    --das-draft-tokens    num_speculative_tokens               --speculative-num-draft-tokens, one more: the sampled one
    --das-depth           suffix_decoding_max_tree_depth       --speculative-ngram-max-trie-depth
    --das-window          suffix_decoding_max_cached_requests

Names and meanings are those of vLLM 0.14 to 0.33 (method ``suffix``: config/speculative.py, and its page Suffix
Decoding) and of SGLang 0.5.11 to 0.5.23 (algorithm ``NGRAM``: its server arguments). Neither has a counterpart of
``--das-budget``.

**vLLM** keeps its responses and evicts the oldest ones; they survive new weights and a reset of the prefix cache. So
every server has its own window of recent rollouts, bounded by a number of requests. (With Model Runner V2, vLLM drafts
on the GPU and always the full number of tokens: choose a smaller --das-draft-tokens there, and add the options that its
page names. Before that version it needs the package arctic-inference.)

**SGLang** keeps a trie of what it is decoding and clears it with its prefix cache at every update of weights. ``PROB``
takes the most frequent continuation, as DAS does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_dta.sampling.speculation.drafter import DrafterParams
from megatron_dta.sampling.speculation.suffix_forest import DraftParams
from megatron_dta.training.config import TrainConfig


@dataclass(frozen=True)
class ServerSpeculation:
    """The settings of servers that draft according to ``--das-*``.

    Attributes:
        draft_tokens, depth: the flags.
        cached_requests: number of responses that one vLLM server keeps.
    """

    draft_tokens: int
    depth: int
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
        fitting = max(1, DrafterParams().max_tokens // sampling.rollout_max_response_len)
        return cls(das.das_draft_tokens, das.das_depth, min(window, fitting))

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
        """SGLang's options, with underscores."""
        return {
            "speculative_algorithm": "NGRAM",
            "speculative_num_draft_tokens": self.draft_tokens + 1,
            "speculative_ngram_max_trie_depth": self.depth,
            "speculative_ngram_match_type": "PROB",
        }
