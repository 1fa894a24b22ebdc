"""How rewards are computed that can fail or take long: programs that are run, and reward servers."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dta.config.options import option


@dataclass
class RewardConfig:
    """Settings of ``megatron_dta.sampling.rewards.scoring`` and of the reward functions code_tests and remote."""

    reward_failure: str = option(
        "stop",
        "A reward that cannot be determined (the function raises, the server does not answer) ends the run, or drops "
        "the rollout; it is counted and never taken to be 0.",
        choices=("stop", "drop"),
    )
    reward_workers: int = option(
        8, "Rewards of math_verify, code_tests and remote that are determined at once.", minimum=1
    )
    reward_server_url: list[str] | None = option(
        None, "Servers of --reward-function remote, like http://HOST:PORT/PATH; they take turns."
    )
    reward_timeout_seconds: float | None = option(
        None,
        "A reward server has so long to answer one request (default: 60), and a function of your own for one response "
        "(default: no limit; with one it runs in a thread).",
        above=0,
    )
    reward_attempts: int = option(4, "How often a request to reward servers is sent before it has failed.", minimum=1)
    code_time_seconds: float = option(
        5.0,
        "CPU time of a program of --reward-function code_tests; it is stopped after twice as long in any case.",
        above=0,
    )
    code_memory_mb: int = option(1024, "Address space of such a program, in MiB.", minimum=64)
    code_processes: int = option(8, "Processes and threads that such a program may have.", minimum=1)
