"""Speculative sampling from suffix trees of recent rollouts (DAS)."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dta.config.options import option


@dataclass
class SpeculationConfig:
    """Settings of ``megatron_dta.speculation``; none of them changes what is sampled, but the stop."""

    rollout_speculation: str = option(
        "none",
        "Guess several tokens a pass from suffix trees of recent rollouts and verify them: the same samples in fewer "
        "passes. Servers of vLLM or SGLang do so themselves, as tools/rollout_server_command.py starts them.",
        choices=("none", "das"),
    )
    das_window: int = option(16, "Collections of rollouts for which a rollout is drafted from.", minimum=1)
    das_max_tokens: int = option(
        20_000_000, "Most tokens in the trees, about 100 bytes each; the oldest rollouts leave first.", minimum=1
    )
    das_depth: int = option(32, "Tokens of a match and its draft together.", minimum=2, maximum=255)
    das_draft_tokens: int = option(24, "Most tokens of a draft.", minimum=1, maximum=255)
    das_budget: str = option(
        "straggler",
        "What is drafted where it pays: by the probability to be the last to end, by the live batch alone (gate), by "
        "length classes, by the optimal budget; or always.",
        choices=("straggler", "gate", "class", "optimal", "always"),
    )
    rollout_stop_degenerate: bool = option(
        False, "End a response, as the length cap does, where it has fallen into a loop or into noise."
    )
