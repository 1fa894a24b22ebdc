"""Settings of speculative decoding from suffix trees of recent rollouts (DAS)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from megatron_dta.core.config.options import option
from megatron_dta.sampling.speculation.lengths import BUDGETS

das_option = partial(option, needs="rollout_speculation=das")


@dataclass
class SpeculationConfig:
    """Settings of ``megatron_dta.sampling.speculation``. Only ``rollout_stop_degenerate`` changes what is sampled."""

    rollout_speculation: str = option(
        "none",
        "Draft several tokens per pass from suffix trees of recent rollouts and verify them: the same samples in "
        "fewer passes. Servers of vLLM or SGLang draft themselves: give it to megatron-dta rollout-server-command.",
        choices=("none", "das"),
    )
    das_window: int = das_option(16, "Number of recent rollout batches kept in the suffix trees.", minimum=1)
    das_depth: int = das_option(
        32, "Maximum number of tokens in a match and its draft together.", minimum=2, maximum=255
    )
    das_draft_tokens: int = das_option(24, "Maximum number of tokens in a draft.", minimum=1, maximum=255)
    das_budget: str = option(
        "straggler",
        "Rule for where drafting pays: by the probability of finishing last (straggler), or by length classes, as in "
        "the paper (class).",
        choices=BUDGETS,
        needs=("rollout_speculation=das", "rollout_engine=in-process"),
    )
    rollout_stop_degenerate: bool = option(
        False,
        "End a response that has fallen into a loop or into noise, as the length cap would.",
        needs="rollout_engine=in-process",
    )
